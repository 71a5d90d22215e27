#pragma once

#include <string>
#include <vector>

namespace parplan {

// Starts `processes` copies of `program` (by default this one) with `arguments` (without the program's name) and torchrun's variables
// for a free port of 127.0.0.1, and waits for them. Process 0 has this process's input and output; what the others write, to either
// output, comes out on standard error line by line as "[rank 3] ...": as with torchrun and mpirun nothing is lost and one can tell
// whose it is. SIGINT, SIGTERM and SIGHUP are forwarded. When one fails, the others get SIGTERM, and SIGKILL 5 s later. Returns the
// exit code of the first that failed (128 + signal number where a signal ended it), or 0. RunError where a process cannot be started.
struct ChildrenOptions {
  int processes = 1;
  std::string program = "/proc/self/exe";
};
int run_children(const std::vector<std::string>& arguments, const ChildrenOptions& options);

}  // namespace parplan
