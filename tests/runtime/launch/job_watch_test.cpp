#include "runtime/launch/job_watch.h"

#include <doctest/doctest.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "planner/base/error.h"
#include "runtime/launch/flight_recorder.h"

using namespace parplan;
using namespace std::chrono_literals;

namespace {

// Process 0 of a job whose other processes do what a test says. Time is what the watch counts: its
// beats.
class ScriptedRendezvous final : public Rendezvous {
 public:
  explicit ScriptedRendezvous(std::function<std::vector<Heard>(std::int64_t beat)> script)
      : script_(std::move(script)) {}
  int process() const override { return 0; }
  int processes() const override { return 2; }
  int local_process() const override { return 0; }
  int local_processes() const override { return 2; }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte>) override { return {}; }
  void check() override {
    const std::lock_guard lock(mutex_);
    if (failure_) throw RunError(*failure_);
  }
  void fail(const std::string& text) noexcept override {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = text;
  }
  std::vector<Heard> beat(const Position&) noexcept override { return script_(++beats); }
  std::unique_ptr<Communicator> make_communicator(const std::vector<CommunicationGroup>&, int) override {
    return nullptr;
  }

  std::string wait_for_failure() {
    while (true) {
      try {
        check();
      } catch (const RunError& error) {
        return error.what();
      }
      std::this_thread::sleep_for(1ms);
    }
  }
  void wait_for_beats(std::int64_t count) const {
    while (beats < count) std::this_thread::sleep_for(1ms);
  }

  std::atomic<std::int64_t> beats = 0;

 private:
  std::function<std::vector<Heard>(std::int64_t beat)> script_;
  std::mutex mutex_;
  std::optional<std::string> failure_;
};

struct LastResort {
  std::mutex mutex;
  std::vector<std::string> reasons;
  std::function<void(const std::string&, const std::function<void()>&)> call() {
    return [this](const std::string& reason, const std::function<void()>& end_others) {
      end_others();
      const std::lock_guard lock(mutex);
      reasons.push_back(reason);
    };
  }
  std::string wait() {
    while (true) {
      {
        const std::lock_guard lock(mutex);
        if (!reasons.empty()) return reasons.front();
      }
      std::this_thread::sleep_for(1ms);
    }
  }
};

// Ranks of a process, as a job shows them to the watch.
struct Ranks {
  FlightRecorder recorder;
  std::atomic<int> aborts = 0;
  std::atomic<int> written = 0;
  WatchedRanks watched() {
    return {.recorders = {&recorder},
            .abort = [this](const std::string&) { ++aborts; },
            .describe = [](int rank, const Position& p) {
              return "step " + std::to_string(p.step) + " of rank " + std::to_string(rank);
            },
            .write_records = [this](const std::string&) {
              ++written;
              return std::vector<std::string>{"records.jsonl"};
            }};
  }
};

std::vector<Heard> alive(std::int64_t beat) { return {{.process = 1, .signs = beat, .position = {}}}; }

// A turn takes 5 ms: the silence is 20 turns, the standstill 480, the ending 8.
constexpr auto timeout = 200ms;

}  // namespace

TEST_CASE("a process that gives no sign of life is lost, with what it did last and who waits") {
  Ranks ranks;
  ranks.recorder.begin_step(6);
  ranks.recorder.begin(3, 1);
  ranks.recorder.begin_waiting();
  ScriptedRendezvous rendezvous([](std::int64_t beat) {
    return std::vector<Heard>{{.process = 1, .signs = std::min<std::int64_t>(beat, 5), .position = {.step = 5}}};
  });
  LastResort last;
  JobWatch watch({.timeout = timeout, .last_resort = last.call()});
  watch.join(rendezvous);
  watch.host(ranks.watched());
  const std::string lost =
      "process 1 was lost: no sign of life for 0.1 s; it was last in step 5 of rank 1; rank 0 waits in step 6 of rank "
      "0";
  CHECK(rendezvous.wait_for_failure() == lost);
  // Nobody ends this process by itself: the last resort is taken, once all else was tried.
  CHECK(last.wait() == lost + "; the last instructions of its ranks: records.jsonl");
  CHECK(ranks.aborts == 1);
  CHECK(ranks.written == 1);
  watch.release();
}

TEST_CASE("a process that gives signs of life may take its time") {
  Ranks ranks;
  ScriptedRendezvous rendezvous(alive);
  LastResort last;
  JobWatch watch({.timeout = timeout, .last_resort = last.call()});
  watch.join(rendezvous);
  watch.host(ranks.watched());
  rendezvous.wait_for_beats(700);  // many silences, and more than a standstill: it does not wait
  CHECK_NOTHROW(rendezvous.check());
  watch.release();
  CHECK(ranks.aborts == 0);
  CHECK(ranks.written == 0);
}

TEST_CASE("a job whose ranks all wait and do not move has failed, and one that moves has not") {
  for (const bool moves : {false, true}) {
    Ranks ranks;
    ranks.recorder.begin_step(2);
    ranks.recorder.begin(0, 0);
    ranks.recorder.begin_waiting();
    ScriptedRendezvous rendezvous([&](std::int64_t beat) {
      return std::vector<Heard>{
          {.process = 1, .signs = beat, .position = {.step = 2, .waits = true, .moves = moves ? beat / 100 : 0}}};
    });
    LastResort last;
    JobWatch watch({.timeout = timeout, .last_resort = last.call()});
    watch.join(rendezvous);
    watch.host(ranks.watched());
    if (moves) {
      rendezvous.wait_for_beats(800);
      CHECK_NOTHROW(rendezvous.check());
    } else {
      CHECK(rendezvous.wait_for_failure() ==
            "all ranks wait for each other and none has moved for 2.4 s; rank 0 waits in step 2 of rank 0; rank 1 "
            "waits in step 2 of rank 1");
    }
    watch.release();
  }
}

TEST_CASE("a failure anywhere wakes the ranks, and their last instructions are written once") {
  Ranks ranks;
  ScriptedRendezvous rendezvous(alive);
  LastResort last;
  JobWatch watch({.timeout = 600s, .last_resort = last.call()});  // time enough to end by itself
  watch.join(rendezvous);
  watch.host(ranks.watched());
  rendezvous.abort("out of paper");
  while (ranks.aborts == 0) std::this_thread::sleep_for(1ms);
  CHECK(watch.write_records() == std::vector<std::string>{"records.jsonl"});
  watch.release();
  watch.leave();
  CHECK(ranks.written == 1);
  CHECK(last.reasons.empty());
}

TEST_CASE("records of a failure that the watch has not seen yet are written when they are asked for") {
  Ranks ranks;
  ScriptedRendezvous rendezvous(alive);
  LastResort last;
  JobWatch watch({.timeout = 6000s, .last_resort = last.call()});
  watch.join(rendezvous);
  watch.host(ranks.watched());
  CHECK(watch.write_records().empty());
  rendezvous.fail("gone");
  CHECK(watch.write_records() == std::vector<std::string>{"records.jsonl"});
  watch.release();
}

TEST_CASE("what is known of those who do not come is asked for when the time is up") {
  LastResort last;
  std::atomic<int> asked = 0;
  JobWatch watch({.timeout = timeout, .last_resort = last.call()});
  watch.expect("they have not met", 20ms, [&] {
    ++asked;
    return std::string("; rank 1 is not there");
  });
  CHECK(last.wait() == "they have not met; rank 1 is not there");
  CHECK(asked == 1);
}

TEST_CASE("a process that does not meet the others, or cannot leave them, is ended") {
  {
    LastResort last;
    JobWatch watch({.timeout = timeout, .last_resort = last.call()});
    watch.expect("nobody came", 10ms);
    CHECK(last.wait() == "nobody came");
  }
  {
    ScriptedRendezvous rendezvous(alive);
    LastResort last;
    JobWatch watch({.timeout = timeout, .last_resort = last.call()});
    watch.expect("nobody came", 600s);
    watch.join(rendezvous);
    watch.leave();
    CHECK(last.wait() == "the other processes of this job do not let this one leave");
  }
}
