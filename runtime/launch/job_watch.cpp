#include "runtime/launch/job_watch.h"

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

std::string seconds_text(milliseconds time) {
  return fmt::format("{:g} s", std::chrono::duration<double>(time).count());
}

}  // namespace

// A process is lost after half of the timeout, has a fifth of it to end by itself, and the rest is
// for whoever started it. Ranks that all wait may be moving large messages over a slow
// network: for them it is twelve timeouts.
WatchTimes watch_times(milliseconds timeout) {
  return {.beat = std::clamp(timeout / 40, milliseconds(1), milliseconds(250)),
          .silence = timeout / 2,
          .standstill = timeout * 12,
          .ending = timeout / 5};
}

JobWatch::JobWatch(Options options) : options_(std::move(options)), times_(watch_times(options_.timeout)) {
  try {
    thread_ = std::thread([this] { watch_until_stopped(); });
  } catch (const std::system_error& error) {
    throw RunError(fmt::format("the thread that watches this job cannot be created: {}", error.code().message()));
  }
}

JobWatch::~JobWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void JobWatch::expect(const std::string& reason, milliseconds patience, std::function<std::string()> details) {
  const std::lock_guard lock(mutex_);
  reason_ = reason;
  details_ = std::move(details);
  left_ = patience;
}

void JobWatch::join(Rendezvous& rendezvous) {
  const std::lock_guard lock(mutex_);
  rendezvous_ = &rendezvous;
  end_others_ = rendezvous.way_to_end_others();
  reason_.reset();
  details_ = {};
}

void JobWatch::leave() {
  const std::lock_guard lock(mutex_);
  rendezvous_ = nullptr;
  if (reason_) return;
  reason_ = failure_.value_or("the other processes of this job do not let this one leave");
  // Where nothing has failed, the others may be slow to leave on a busy machine: MPI_Finalize waits
  // for all of them.
  left_ = failure_ ? times_.ending : times_.silence + times_.ending;
}

void JobWatch::host(WatchedRanks ranks) {
  const std::lock_guard lock(mutex_);
  if (rendezvous_ != nullptr) rendezvous_->describe_positions(ranks.describe);
  ranks_ = std::move(ranks);
}

void JobWatch::release() {
  write_records();
  const std::lock_guard lock(mutex_);
  if (rendezvous_ != nullptr) rendezvous_->describe_positions({});
  ranks_.reset();
}

std::vector<std::string> JobWatch::write_records() {
  const std::lock_guard lock(mutex_);
  if (!failure_ && rendezvous_ != nullptr) failure_ = failure_of(*rendezvous_);
  if (failure_) write_once(*failure_);
  return files_;
}

void JobWatch::write_once(const std::string& reason) {
  if (written_ || !ranks_) return;
  written_ = true;
  try {
    files_ = ranks_->write_records(reason);
  } catch (const std::exception&) {
    // The failure itself matters more than its record.
  }
}

std::optional<std::string> JobWatch::failure_of(Rendezvous& rendezvous) const {
  try {
    rendezvous.check();
  } catch (const std::exception& failure) {
    return failure.what();
  }
  return std::nullopt;
}

std::optional<std::string> JobWatch::silent_peer(const std::vector<Heard>& heard, milliseconds passed) {
  std::optional<std::string> lost;
  for (const Heard& now : heard) {
    Peer& peer = peers_[now.process];
    if (now.signs != peer.signs) peer.silent = milliseconds(0);
    else peer.silent += passed;
    peer.signs = now.signs;
    peer.position = now.position;
    if (lost || peer.silent < times_.silence) continue;
    lost = fmt::format("process {} was lost: no sign of life for {}", now.process, seconds_text(times_.silence));
    if (ranks_ && now.position.step >= 0)
      *lost += fmt::format("; it was last in {}", ranks_->describe(now.process, now.position));
    if (!ranks_) continue;
    for (const FlightRecorder* recorder : ranks_->recorders)
      if (const Position own = recorder->position(); own.waits && own.step >= 0)
        *lost += fmt::format("; rank {} waits in {}", rendezvous_->process(),
                             ranks_->describe(rendezvous_->process(), own));
  }
  return lost;
}

// Process 0 knows of all ranks: there they are its own, or one of each process.
std::optional<std::string> JobWatch::standstill(milliseconds passed) {
  if (!ranks_ || rendezvous_->process() != 0) return std::nullopt;
  std::vector<Position> positions;
  for (const FlightRecorder* recorder : ranks_->recorders) positions.push_back(recorder->position());
  for (const auto& [process, peer] : peers_) positions.push_back(peer.position);
  std::vector<std::int64_t> moves;
  for (const Position& position : positions) moves.push_back(position.moves);
  const bool all_wait = std::ranges::all_of(positions, &Position::waits);
  still_ = all_wait && moves == moves_ ? still_ + passed : milliseconds(0);
  moves_ = std::move(moves);
  if (still_ < times_.standstill) return std::nullopt;
  std::string text = fmt::format("all ranks wait for each other and none has moved for {}",
                                 seconds_text(times_.standstill));
  constexpr std::size_t shown = 8;
  for (std::size_t rank = 0; rank < std::min(positions.size(), shown); ++rank)
    text += fmt::format("; rank {} waits in {}", rank, ranks_->describe(static_cast<int>(rank), positions[rank]));
  return text;
}

void JobWatch::look(milliseconds passed, std::unique_lock<std::mutex>& lock) {
  if (rendezvous_ != nullptr && !failure_) {
    const Position own = ranks_ ? ranks_->recorders.front()->position() : Position{};
    const std::vector<Heard> heard = rendezvous_->beat(own);
    std::optional<std::string> found = failure_of(*rendezvous_);
    if (!found) {
      if ((found = silent_peer(heard, passed)) || (found = standstill(passed))) {
        rendezvous_->fail(*found);
        found = failure_of(*rendezvous_);  // another may have come first
      }
    }
    if (found) {
      failure_ = found;
      reason_ = found;
      left_ = times_.ending;
      if (ranks_) ranks_->abort(*found);
      write_once(*found);
    }
    return;
  }
  if (!reason_) return;
  left_ -= passed;
  if (left_ > milliseconds(0)) return;
  std::string reason = *reason_;
  if (details_) reason += details_();
  if (!files_.empty()) reason += fmt::format("; the last instructions of its ranks: {}", fmt::join(files_, ", "));
  const std::function<void()> end_others = end_others_ ? end_others_ : [] {};
  reason_.reset();
  lock.unlock();
  options_.last_resort(reason, end_others);
  lock.lock();
}

void JobWatch::watch_until_stopped() {
  std::unique_lock lock(mutex_);
  auto before = Clock::now();
  while (!stopped_) {
    changed_.wait_for(lock, times_.beat, [&] { return stopped_; });
    if (stopped_) return;
    const auto now = Clock::now();
    // A turn that took much longer than it was to take is one in which this process did not run.
    const auto passed = std::min(std::chrono::ceil<milliseconds>(now - before), 2 * times_.beat);
    before = now;
    try {
      look(passed, lock);
    } catch (const std::bad_alloc&) {
      if (!lock.owns_lock()) lock.lock();  // no memory for words: the next turn may find some
    }
  }
}

}  // namespace parplan
