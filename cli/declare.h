#pragma once

#include <functional>
#include <string>

namespace CLI {
class App;
}

namespace parplan {

// Options are declared on a command through this header alone: CLI11's header takes longer to
// compile than a command.

struct NewOption {
  std::string names;  // "-o,--output"; of a command's argument its name, "MODEL"
  std::string type;   // "N", "FILE|NAME"; of an argument and of a flag empty
  std::string description;
  std::string group = {};       // "Where"; empty: CLI11's own, "Options"
  bool required = false;        // an argument that must be given
  bool value_optional = false;  // --json may stand alone
};

// `read` is called with the value when the command line is parsed; ConfigError names the option.
void add_option(CLI::App& app, const NewOption& option, std::function<void(const std::string&)> read);
// The value as it stands.
void add_option(CLI::App& app, const NewOption& option, std::string& value);
// `set` is called, or `value` becomes true, where the flag is given.
void add_flag(CLI::App& app, const NewOption& option, std::function<void()> set);
void add_flag(CLI::App& app, const NewOption& option, bool& value);

}  // namespace parplan
