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

// MPI in this process: begins and ends it, waits, and passes on why the job is over. MPI itself
// knows no way to wake a process that waits for a message, short of killing it: so nothing waits
// inside MPI; every wait is a loop of tests that also looks for messages of failure on a
// communicator of their own.
class MpiProcess {
 public:
  // RunError where MPI does not let threads take turns, or has been here before.
  MpiProcess();
  // Ends MPI together with all others. After a failure only if all others end within 10 s and no
  // message is under way between this process's memory and others: else MPI stays open, by which
  // mpirun sees that the process failed and ends those that remain.
  ~MpiProcess();
  MpiProcess(const MpiProcess&) = delete;
  MpiProcess& operator=(const MpiProcess&) = delete;

  int process() const;
  int processes() const;
  int local_process() const;
  int local_processes() const;

  // Held around every call of MPI (threads take turns).
  std::mutex& calls();
  // Returns when `ready`, which is called with `calls` held, says so. RunError as Rendezvous has
  // it; also when a process of `concerned` has ended for 2 s and `ready` still does not hold.
  void wait_until(const std::function<bool()>& ready, std::span<const int> concerned);
  void check();
  void abort(const std::string& text) noexcept;  // what all others throw
  // A message between the memory of this process and others cannot be taken back.
  void leave_open();

  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> own);

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace parplan
