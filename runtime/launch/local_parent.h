#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace parplan {

// What happened to a child by itself, not because its parent ended it.
struct ChildEvent {
  enum class Kind { exited, killed, stopped };
  int process = 0;
  Kind kind = Kind::exited;
  int number = 0;  // the exit code, not 0; or the signal
  std::chrono::milliseconds after{0};              // since it was started
  std::optional<std::int64_t> last_step = {};      // that it had completed, from 0
};

struct ChildrenOptions {
  int processes = 1;
  std::string program = "/proc/self/exe";
  // Called with each line, without its end, that a process other than 0 writes to its standard
  // output or error. The caller may show it with the rank in front, as torchrun and mpirun
  // --tag-output do.
  std::function<void(int process, std::string_view line)> on_line;
  std::function<void(const ChildEvent& event)> on_event = {};  // may be empty
};

// Starts copies of `program` (by default this one) with `arguments` (without the program's name),
// torchrun's variables for a free port of 127.0.0.1, and a random token, and waits for them all.
// Process 0 has this process's input and outputs; the others have no input, and their outputs go
// to `on_line`. SIGTERM, SIGHUP and SIGINT (unless it comes from the terminal, which sends it to
// all by itself) are passed on. Once one has failed, the others have 1 s to end by themselves, as
// they do when it told them; then those that are stopped get SIGKILL, the others SIGTERM and, 5 s
// later, SIGKILL. They also get SIGKILL when this process dies. Returns the exit code of the first
// that failed, or 0: of the first that a signal ended, before any that this process sent because of
// a failure (128 + its number), otherwise of the first that exited with a code. `on_event` hears
// of exit codes in the same order: after that second, or when all have ended. Throws RunError
// where a process cannot be started. Must be called while this process has one thread: it handles
// signals.
int run_children(const std::vector<std::string>& arguments, const ChildrenOptions& options);

}  // namespace parplan
