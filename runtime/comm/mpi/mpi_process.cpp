#include "runtime/comm/mpi/mpi_process.h"

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdint>
#include <cstring>
#include <deque>
#include <numeric>
#include <optional>
#include <thread>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/base/text.h"
#include "runtime/comm/mpi/mpi_check.h"

namespace parplan {
namespace {

using Clock = std::chrono::steady_clock;

// Tags of the control communicator.
constexpr int failure_tag = 1;
constexpr int farewell_tag = 2;
constexpr int beat_tag = 3;

// Messages of failure leave immediately, without the receiver's help: they are below the eager
// limit of Open MPI's shared memory, 4096 bytes with its header.
constexpr std::size_t longest_reason = 3000;
constexpr std::chrono::seconds farewell_patience(2);
constexpr std::chrono::seconds telling_patience(1);
constexpr std::chrono::seconds grace_of_the_ended(2);
// How long a beat waits for the thread that is inside MPI.
constexpr std::chrono::milliseconds beat_patience(100);

using Beat = std::array<std::int64_t, 5>;

}  // namespace

struct MpiProcess::State {
  std::timed_mutex calls;
  MPI_Comm control = MPI_COMM_NULL;
  MPI_Comm meeting = MPI_COMM_NULL;
  int process = 0;
  int processes = 1;
  int local_process = 0;
  int local_processes = 1;
  bool crowded = false;  // more processes on this machine than cores

  std::mutex telling;  // guards `failure`, which any thread may ask for
  std::optional<std::string> failure;
  std::optional<std::string> known_failure() {
    const std::lock_guard lock(telling);
    return failure;
  }
  // Whether this is the first one.
  bool note(const std::string& text) {
    const std::lock_guard lock(telling);
    if (failure) return false;
    failure = text;
    return true;
  }

  // With `calls` held.
  std::vector<std::optional<Clock::time_point>> ended;  // by process, when its farewell was read
  struct Posted {
    MPI_Request request = MPI_REQUEST_NULL;
    std::string text;
  };
  std::deque<Posted> posted;  // an element does not move: MPI reads it
  // The beat on its way to each process, and what came from it.
  struct Pulse {
    MPI_Request request = MPI_REQUEST_NULL;
    Beat sent{};
    std::int64_t signs = 0;
    Position position;
  };
  std::vector<Pulse> pulses;  // by process
  std::vector<Heard> heard;   // by the last beat that got through; of the thread that beats
  bool open_for_good = false;

  void post_to_others(int tag, const std::string& text);
  bool all_posted_are_sent();
  void read_control();
};

// Sends to all others, with `calls` held.
void MpiProcess::State::post_to_others(int tag, const std::string& text) {
  for (int other = 0; other < processes; ++other) {
    if (other == process) continue;
    Posted& message = posted.emplace_back();
    message.text = text;
    PARPLAN_MPI(
        MPI_Isend(message.text.data(), static_cast<int>(text.size()), MPI_CHAR, other, tag, control, &message.request));
  }
}

bool MpiProcess::State::all_posted_are_sent() {
  int done = 1;
  for (Posted& message : posted) {
    if (done) PARPLAN_MPI(MPI_Test(&message.request, &done, MPI_STATUS_IGNORE));
  }
  for (Pulse& pulse : pulses) {
    if (done) PARPLAN_MPI(MPI_Test(&pulse.request, &done, MPI_STATUS_IGNORE));
  }
  return done != 0;
}

// Reads the messages of others, with `calls` held.
void MpiProcess::State::read_control() {
  while (true) {
    int found = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    PARPLAN_MPI(MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, control, &found, &message, &status));
    if (!found) return;
    int length = 0;
    PARPLAN_MPI(MPI_Get_count(&status, MPI_CHAR, &length));
    std::string text(static_cast<std::size_t>(length), '\0');
    PARPLAN_MPI(MPI_Mrecv(text.data(), length, MPI_CHAR, &message, MPI_STATUS_IGNORE));
    Pulse& pulse = pulses[static_cast<std::size_t>(status.MPI_SOURCE)];
    ++pulse.signs;
    if (status.MPI_TAG == failure_tag) note(printable(text));
    if (status.MPI_TAG == farewell_tag) ended[status.MPI_SOURCE] = Clock::now();
    if (status.MPI_TAG != beat_tag || text.size() != sizeof(Beat)) continue;
    Beat beat{};
    std::memcpy(beat.data(), text.data(), sizeof beat);
    pulse.position = {.step = beat[0],
                      .call = static_cast<std::int32_t>(beat[1]),
                      .instruction = static_cast<std::int32_t>(beat[2]),
                      .waits = beat[3] != 0,
                      .moves = beat[4]};
  }
}

MpiProcess::MpiProcess() : state_(std::make_unique<State>()) {
  int initialised = 0;
  PARPLAN_MPI(MPI_Initialized(&initialised));
  if (initialised) throw RunError("MPI has been used by this process before and cannot begin again");
  int provided = 0;
  PARPLAN_MPI(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided));
  PARPLAN_MPI(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));  // its duplicates inherit it
  if (provided < MPI_THREAD_SERIALIZED)
    throw RunError("this MPI does not let threads take turns (MPI_THREAD_SERIALIZED)");
  State& s = *state_;
  PARPLAN_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &s.control));
  PARPLAN_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &s.meeting));
  PARPLAN_MPI(MPI_Comm_rank(s.control, &s.process));
  PARPLAN_MPI(MPI_Comm_size(s.control, &s.processes));
  MPI_Comm machine = MPI_COMM_NULL;
  PARPLAN_MPI(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, s.process, MPI_INFO_NULL, &machine));
  PARPLAN_MPI(MPI_Comm_rank(machine, &s.local_process));
  PARPLAN_MPI(MPI_Comm_size(machine, &s.local_processes));
  PARPLAN_MPI(MPI_Comm_free(&machine));
  // All cores of the machine count: mpirun binds each process to its own.
  s.crowded = s.local_processes > sysconf(_SC_NPROCESSORS_ONLN);
  s.ended.resize(static_cast<std::size_t>(s.processes));
  s.pulses.resize(static_cast<std::size_t>(s.processes));
}

MpiProcess::~MpiProcess() {
  State& s = *state_;
  try {
    {
      const std::lock_guard lock(s.calls);
      if (s.open_for_good) return;
      s.post_to_others(farewell_tag, "");
    }
    std::optional<Clock::time_point> deadline;
    while (true) {
      {
        const std::lock_guard lock(s.calls);
        s.read_control();
        const auto others_ended = static_cast<int>(
            std::count_if(s.ended.begin(), s.ended.end(), [](const auto& when) { return when.has_value(); }));
        if (s.all_posted_are_sent() && others_ended == s.processes - 1) break;
        if (s.known_failure() && !deadline) deadline = Clock::now() + farewell_patience;
        if (deadline && Clock::now() > *deadline) return;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    const std::lock_guard lock(s.calls);
    PARPLAN_MPI(MPI_Comm_free(&s.meeting));
    PARPLAN_MPI(MPI_Comm_free(&s.control));
    PARPLAN_MPI(MPI_Finalize());
  } catch (const std::exception&) {
    // MPI has failed; it stays open.
  }
}

int MpiProcess::process() const { return state_->process; }
int MpiProcess::processes() const { return state_->processes; }
int MpiProcess::local_process() const { return state_->local_process; }
int MpiProcess::local_processes() const { return state_->local_processes; }
std::timed_mutex& MpiProcess::calls() { return state_->calls; }

void MpiProcess::leave_open() {
  const std::lock_guard lock(state_->calls);
  state_->open_for_good = true;
}

void MpiProcess::check() {
  // The watch asks, too, while another thread may hang inside MPI.
  if (const std::unique_lock lock(state_->calls, beat_patience); lock.owns_lock()) state_->read_control();
  if (const std::optional<std::string> failure = state_->known_failure()) throw RunError(*failure);
}

// Spins while there is a core for every process of the machine, then yields, then naps, as ranks in
// threads do (LocalWorld).
void MpiProcess::wait_until(const std::function<bool()>& ready, std::span<const int> concerned) {
  State& s = *state_;
  const int spins = s.crowded ? 0 : 4000;
  const int yields = s.crowded ? 200 : 20000;
  std::string ended;
  for (int attempt = 0; ended.empty(); ++attempt) {
    {
      const std::lock_guard lock(s.calls);
      if (ready()) return;
      s.read_control();
      if (const std::optional<std::string> failure = s.known_failure()) throw RunError(*failure);
      for (const int other : concerned) {
        const auto& when = s.ended[other];
        if (when && Clock::now() - *when > grace_of_the_ended) ended = fmt::format("process {} has ended", other);
      }
    }
    if (attempt < spins) continue;
    if (attempt < spins + yields)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  fail(ended);
  check();
}

void MpiProcess::fail(const std::string& text) noexcept {
  State& s = *state_;
  try {
    const auto deadline = Clock::now() + telling_patience;
    {
      const std::unique_lock lock(s.calls, deadline);
      if (lock.owns_lock()) s.read_control();
      if (!s.note(text.substr(0, longest_reason)) || !lock.owns_lock()) return;
      s.post_to_others(failure_tag, *s.known_failure());
    }
    // A first message to a process may need a connection first, which MPI makes only inside its
    // calls.
    while (Clock::now() < deadline) {
      const std::lock_guard lock(s.calls);
      if (s.all_posted_are_sent()) return;
    }
  } catch (const std::exception&) {
    // The network is gone; this process still knows the reason.
  }
}

// A beat whose predecessor is still on its way is left out: it would say the same.
std::vector<Heard> MpiProcess::beat(const Position& own) noexcept {
  State& s = *state_;
  try {
    const std::unique_lock lock(s.calls, beat_patience);
    if (!lock.owns_lock()) return s.heard;
    s.read_control();
    s.heard.clear();
    for (int other = 0; other < s.processes; ++other) {
      State::Pulse& pulse = s.pulses[static_cast<std::size_t>(other)];
      if (other == s.process || (s.process != 0 && other != 0) || s.ended[other]) continue;
      s.heard.push_back({.process = other, .signs = pulse.signs, .position = pulse.position});
      int sent = 0;
      PARPLAN_MPI(MPI_Test(&pulse.request, &sent, MPI_STATUS_IGNORE));
      if (!sent) continue;
      pulse.sent = {own.step, own.call, own.instruction, own.waits ? 1 : 0, own.moves};
      PARPLAN_MPI(MPI_Isend(pulse.sent.data(), sizeof(Beat), MPI_CHAR, other, beat_tag, s.control, &pulse.request));
    }
  } catch (const std::exception&) {
    // No sign of life came through.
  }
  return s.heard;
}

std::vector<std::vector<std::byte>> MpiProcess::all_gather(std::span<const std::byte> own) {
  State& s = *state_;
  check();
  PARPLAN_ASSERT(own.size() <= INT_MAX, fmt::format("{} bytes", own.size()));
  std::vector<int> everyone(static_cast<std::size_t>(s.processes));
  std::iota(everyone.begin(), everyone.end(), 0);
  MPI_Request request = MPI_REQUEST_NULL;
  const auto is_done = [&] {
    int done = 0;
    PARPLAN_MPI(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
    return done != 0;
  };
  // Memory that MPI may still write to outlives this call when it fails: a collective cannot be
  // cancelled.
  struct Exchange {
    int own_length = 0;
    std::vector<int> lengths, begins;
    std::vector<std::byte> own, all;
  };
  auto exchange = std::make_unique<Exchange>();
  exchange->own_length = static_cast<int>(own.size());
  exchange->own.assign(own.begin(), own.end());
  exchange->lengths.resize(everyone.size());
  exchange->begins.resize(everyone.size());
  try {
    {
      const std::lock_guard lock(s.calls);
      PARPLAN_MPI(
          MPI_Iallgather(&exchange->own_length, 1, MPI_INT, exchange->lengths.data(), 1, MPI_INT, s.meeting, &request));
    }
    wait_until(is_done, everyone);
    const std::int64_t total = std::accumulate(exchange->lengths.begin(), exchange->lengths.end(), std::int64_t{0});
    PARPLAN_ASSERT(total <= INT_MAX, fmt::format("{} bytes in all", total));
    std::exclusive_scan(exchange->lengths.begin(), exchange->lengths.end(), exchange->begins.begin(), 0);
    exchange->all.resize(static_cast<std::size_t>(total));
    {
      const std::lock_guard lock(s.calls);
      PARPLAN_MPI(MPI_Iallgatherv(exchange->own.data(), exchange->own_length, MPI_BYTE, exchange->all.data(),
                                  exchange->lengths.data(), exchange->begins.data(), MPI_BYTE, s.meeting, &request));
    }
    wait_until(is_done, everyone);
  } catch (...) {
    static_cast<void>(exchange.release());
    throw;
  }
  std::vector<std::vector<std::byte>> result;
  for (std::size_t p = 0; p < everyone.size(); ++p) {
    const auto begin = exchange->all.begin() + exchange->begins[p];
    result.emplace_back(begin, begin + exchange->lengths[p]);
  }
  return result;
}

void abort_mpi() {
  int usable = 0, over = 0;
  MPI_Initialized(&usable);
  MPI_Finalized(&over);
  if (usable && !over) MPI_Abort(MPI_COMM_WORLD, 1);
}

}  // namespace parplan
