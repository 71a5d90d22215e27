#pragma once

#include <string>
#include <vector>

#include "cli/commands.h"

namespace parplan {

// What commands declare, as data: --help, the tables of docs/cli.md and shell completion are all
// generated from it.

struct DeclaredOption {
  std::vector<std::string> names;  // "-o", "--output"; none for an argument of the command
  std::string type;                // "N", "FILE|NAME", "gpipe|1f1b"; for an argument its name, "MODEL"; empty: a flag
  std::string description;
  std::string group;               // "Where"
  bool required = false;           // an argument that must be given
  bool value_optional = false;     // --json may stand alone
  bool operator==(const DeclaredOption&) const = default;
};

struct DeclaredCommand {
  std::string name;
  std::string description;
  std::vector<DeclaredOption> arguments;
  std::vector<DeclaredOption> options;  // in the order of their declaration, --help first
};

DeclaredCommand declared(const Command& command);
DeclaredCommand declared(const CLI::App& app);  // of the app on which a command was declared
std::vector<DeclaredCommand> declared_commands();

// "[FILE|-]" consists of the words "FILE" and "-", the possible values. A lower-case word is a
// literal value, an upper-case one a kind of value.
std::vector<std::string> words_of_type(const std::string& type);

// "-o, --output PLAN.yaml"
std::string spelled(const DeclaredOption& option);
// "parplan suggest [OPTIONS] MODEL"
std::string usage(const DeclaredCommand& command);

// The text that `parplan COMMAND --help` and `parplan --help` print.
std::string help(const DeclaredCommand& command);
std::string help(const std::vector<DeclaredCommand>& commands);

}  // namespace parplan
