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
  std::string names;  // "-o,--output"; for an argument of the command its name, "MODEL"
  std::string type;   // "N", "FILE|NAME"; empty for an argument and for a flag
  std::string description;
  std::string group = {};       // "Where"; empty: CLI11's own, "Options"
  bool required = false;        // an argument that must be given
  bool value_optional = false;  // --json may stand alone
};

// `read` is called with the value when the command line is parsed; ConfigError names the option.
void add_option(CLI::App& app, const NewOption& option, std::function<void(const std::string&)> read);
// The value without any change.
void add_option(CLI::App& app, const NewOption& option, std::string& value);
// `set` is called, or `value` becomes true, where the flag is given.
void add_flag(CLI::App& app, const NewOption& option, std::function<void()> set);
void add_flag(CLI::App& app, const NewOption& option, bool& value);

}  // namespace parplan
