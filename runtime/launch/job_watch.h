#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/launch/flight_recorder.h"
#include "runtime/launch/rendezvous.h"

namespace parplan {

// From the failure of a rank or process to the end of the job's last process.
inline constexpr std::chrono::milliseconds default_timeout(10'000);

// The parts of a job's timeout. What remains of it is for whoever started the processes: it ends
// those that are stopped.
struct WatchTimes {
  std::chrono::milliseconds beat;        // between two signs of life of a process
  std::chrono::milliseconds silence;     // without a sign of life, after which a process is lost
  std::chrono::milliseconds standstill;  // in which all ranks wait and none moves
  std::chrono::milliseconds ending;      // for a process to end by itself once the job has failed
};
WatchTimes watch_times(std::chrono::milliseconds timeout);

// What the watch of a process knows of its ranks.
struct WatchedRanks {
  std::vector<const FlightRecorder*> recorders;
  // Wakes all that wait in communicators.
  std::function<void(const std::string& reason)> abort;
  // "step 3, all_reduce (sum) of layers.backward over dp with ranks 0, 2": for any rank of the job.
  std::function<std::string(int rank, const Position&)> describe;
  // Writes the last instructions of these ranks and returns the names of the files.
  std::function<std::vector<std::string>(const std::string& reason)> write_records;
};

// The only place where a job's time runs out. A thread beside the ranks tells the other processes
// several times a second that this one lives, and sees to it that every wait ends:
//
// - A process that gives no sign of life (stopped, gone, cut off) is lost: the job fails. One that
//   computes gives signs, however long its kernels take.
// - Once the job has failed, here or elsewhere, all that wait in a communicator are woken, the last
//   instructions of the ranks are written, and this process has to end in time; otherwise
//   `last_resort` ends it.
// - When all ranks wait and none of them moves, nothing can come any more: the job fails.
//
// Time is counted in turns of the thread, so that time in which this process was stopped itself
// does not count against the others.
class JobWatch {
 public:
  struct Options {
    std::chrono::milliseconds timeout = default_timeout;
    // Ends this process, which does not end by itself. `end_others` ends the other processes by
    // force, and may not return. Called by the watch's thread.
    std::function<void(const std::string& reason, const std::function<void()>& end_others)> last_resort;
  };
  explicit JobWatch(Options options);  // RunError where no thread can be created
  ~JobWatch();
  JobWatch(const JobWatch&) = delete;
  JobWatch& operator=(const JobWatch&) = delete;

  // Before the processes meet: the reason and the time after which this process ends by force.
  // `details`, asked for then, are added to the reason.
  void expect(const std::string& reason, std::chrono::milliseconds patience,
              std::function<std::string()> details = {});
  // From here on, until `leave`, the processes of this rendezvous are watched.
  void join(Rendezvous& rendezvous);
  // From here on the rendezvous is not used any more: this process has to end in time.
  void leave();

  // The ranks of this process, from `host` to `release`. To be called while joined. Releasing
  // writes their last instructions if the job has failed.
  void host(WatchedRanks ranks);
  void release();

  // Called where a failure is known, so that messages can name the files: writes the last
  // instructions of the ranks, once, if the job has failed. The names of all files so far.
  std::vector<std::string> write_records();

 private:
  // What is known of another process.
  struct Peer {
    std::int64_t signs = 0;
    Position position;
    std::chrono::milliseconds silent{0};
  };

  void watch_until_stopped();
  // A turn of the thread, `passed` after the one before.
  void look(std::chrono::milliseconds passed, std::unique_lock<std::mutex>& lock);
  std::optional<std::string> failure_of(Rendezvous& rendezvous) const;
  std::optional<std::string> silent_peer(const std::vector<Heard>& heard, std::chrono::milliseconds passed);
  std::optional<std::string> standstill(std::chrono::milliseconds passed);
  void write_once(const std::string& reason);

  Options options_;
  WatchTimes times_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;
  Rendezvous* rendezvous_ = nullptr;
  std::optional<WatchedRanks> ranks_;
  std::map<int, Peer> peers_;
  std::function<void()> end_others_;
  std::vector<std::int64_t> moves_;  // of all ranks, when one last moved
  std::chrono::milliseconds still_{0};
  // Why this process has to end, and how much time it has left.
  std::optional<std::string> reason_;
  std::function<std::string()> details_;
  std::chrono::milliseconds left_{0};
  std::optional<std::string> failure_;  // of the job
  bool written_ = false;
  std::vector<std::string> files_;
  std::thread thread_;
};

}  // namespace parplan
