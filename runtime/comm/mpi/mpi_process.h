#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "runtime/launch/rendezvous.h"

namespace parplan {

// MPI in this process: initialises and finalises it, waits, and passes on why the job has ended.
// MPI itself cannot wake a process that waits for a message, short of killing it. So nothing waits
// inside MPI but for making and freeing communicators, the beginning and the end; every other wait
// is a loop of tests that also looks for messages of failure on a separate communicator. The
// job's watch (JobWatch) ends a process that hangs inside MPI: no sign of life gets through then.
class MpiProcess {
 public:
  // Throws RunError where MPI does not let threads take turns, or was initialised before.
  MpiProcess();
  // Finalises MPI together with all others. After a failure it does so only if all others end
  // within 2 s and no message is in flight between this process's memory and others. Otherwise MPI
  // stays open; mpirun then sees that the process failed and ends the remaining ones.
  ~MpiProcess();
  MpiProcess(const MpiProcess&) = delete;
  MpiProcess& operator=(const MpiProcess&) = delete;

  int process() const;
  int processes() const;
  int local_process() const;
  int local_processes() const;

  // Held around every call of MPI (threads take turns).
  std::timed_mutex& calls();
  // Returns when `ready`, which is called with `calls` held, is true. Throws RunError as Rendezvous
  // does, and also when a process of `concerned` ended 2 s ago and `ready` is still false.
  void wait_until(const std::function<bool()>& ready, std::span<const int> concerned);
  void check();
  void fail(const std::string& text) noexcept;  // the text that all throw
  std::vector<Heard> beat(const Position& own) noexcept;
  // Called when a message between this process's memory and others cannot be cancelled.
  void leave_open();

  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> own);

  struct State;

 private:
  std::unique_ptr<State> state_;
};

// Ends all processes of the job by MPI_Abort; it may not return.
void abort_mpi();

}  // namespace parplan
