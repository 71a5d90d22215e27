#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace parplan {

struct ChildrenOptions {
  int processes = 1;
  std::string program = "/proc/self/exe";
  // Called with each line, without its end, that a process other than 0 writes to its standard
  // output or error. The caller may show it with the rank in front, as torchrun and mpirun
  // --tag-output do.
  std::function<void(int process, std::string_view line)> on_line;
};

// Starts copies of `program` (by default this one) with `arguments` (without the program's name)
// and torchrun's variables for a free port of 127.0.0.1, and waits for them all. Process 0 has this
// process's input and outputs; the others have no input, and their outputs go to `on_line`.
// SIGTERM, SIGHUP and SIGINT (unless it comes from the terminal, which sends it to all by itself)
// are passed on. Once one has failed, the others have 1 s to end by themselves, as they do when it
// told them; then they get SIGTERM and, 5 s later, SIGKILL. They also get SIGTERM when this process
// dies. Returns the exit code of the first that failed (128 + its number where a signal ended it),
// or 0. Throws RunError where a process cannot be started. Must be called while this process has
// one thread: it handles signals.
int run_children(const std::vector<std::string>& arguments, const ChildrenOptions& options);

}  // namespace parplan
