#pragma once

#include <functional>
#include <ostream>
#include <span>
#include <string_view>

namespace CLI {
class App;
}

namespace parplan {

inline constexpr int exit_done = 0;
inline constexpr int exit_failed = 1;
inline constexpr int exit_bad_input = 2;
inline constexpr int exit_bug = 70;
// A command that ended in good order because of a signal: as shells say it of processes that died.
inline constexpr int exit_of_signal(int signal) { return 128 + signal; }

// Where a command writes data and messages, and whether a person watches the messages.
struct Terminal {
  std::ostream& out;
  std::ostream& err;
  bool watched = false;
};

// Executes a command with the parsed arguments and returns the exit code.
using CommandBody = std::function<int(Terminal&)>;

// One command: its name, one line of description, and the function that declares its options on an
// App and returns the body that reads them.
struct Command {
  std::string_view name;
  std::string_view description;
  CommandBody (*declare)(CLI::App& app) = nullptr;
};
std::span<const Command> commands();

CommandBody declare_suggest(CLI::App& app);
CommandBody declare_simulate(CLI::App& app);
CommandBody declare_run(CLI::App& app);
CommandBody declare_explain(CLI::App& app);
CommandBody declare_measure(CLI::App& app);
CommandBody declare_topology(CLI::App& app);
CommandBody declare_sweep(CLI::App& app);
CommandBody declare_validate(CLI::App& app);
CommandBody declare_completion(CLI::App& app);

}  // namespace parplan
