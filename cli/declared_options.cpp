#include "cli/declared_options.h"

#include <algorithm>
#include <iterator>
#include <sstream>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "planner/base/text.h"

namespace parplan {
namespace {

const DeclaredOption help_option{
    .names = {"-h", "--help"}, .type = "", .description = "print this help", .group = "Options"};
const DeclaredOption version_option{
    .names = {"--version"}, .type = "", .description = "print the version", .group = "Options"};

// The column where descriptions begin, and the length of lines, for a terminal of usual width.
constexpr std::size_t indent = 34;
constexpr std::size_t width = 120;

// " left right", the right side wrapped between words. A left side that is too long has its own
// line.
std::string entry(const std::string& left, const std::string& right) {
  std::string text = "  " + left;
  std::size_t column = text.size();
  if (column >= indent) {
    text += '\n';
    column = 0;
  }
  const auto go_to_column = [&] {
    text += std::string(indent - column, ' ');
    column = indent;
  };
  go_to_column();
  std::istringstream words(right);
  bool first = true;
  for (std::string word; words >> word;) {
    if (!first && column + 1 + word.size() > width) {
      text += '\n';
      column = 0;
      go_to_column();
      first = true;
    }
    if (!first) text += ' ';
    text += word;
    column += word.size() + (first ? 0 : 1);
    first = false;
  }
  return text + '\n';
}

std::string grouped(const std::vector<DeclaredOption>& options) {
  std::vector<std::string> groups;
  for (const DeclaredOption& option : options)
    if (std::ranges::find(groups, option.group) == groups.end()) groups.push_back(option.group);
  std::string text;
  for (const std::string& group : groups) {
    text += fmt::format("\n{}:\n", group);
    for (const DeclaredOption& option : options)
      if (option.group == group) text += entry(spelled(option), option.description);
  }
  return text;
}

}  // namespace

DeclaredCommand declared(const CLI::App& app) {
  DeclaredCommand command{
      .name = app.get_name(), .description = app.get_description(), .arguments = {}, .options = {help_option}};
  for (const CLI::Option* option : app.get_options()) {
    if (option == app.get_help_ptr()) continue;
    // Options outside parplan's groups are in CLI11's: "Options", or "OPTIONS" from version 2.5 on.
    const bool ungrouped = CLI::detail::to_lower(option->get_group()) == "options";
    DeclaredOption one{.names = {},
                       .type = option->get_type_name(),
                       .description = option->get_description(),
                       .group = ungrouped ? "Options" : option->get_group(),
                       .required = option->get_required(),
                       .value_optional = option->get_items_expected_min() == 0 && option->get_items_expected_max() > 0};
    if (option->get_positional()) {
      one.type = option->get_single_name();
      command.arguments.push_back(one);
      continue;
    }
    if (option->get_items_expected_max() == 0) one.type.clear();
    for (const std::string& name : option->get_snames()) one.names.push_back("-" + name);
    for (const std::string& name : option->get_lnames()) one.names.push_back("--" + name);
    command.options.push_back(one);
  }
  return command;
}

DeclaredCommand declared(const Command& command) {
  CLI::App app{std::string(command.description), std::string(command.name)};
  [[maybe_unused]] const CommandBody body = command.declare(app);
  return declared(app);
}

std::vector<DeclaredCommand> declared_commands() {
  std::vector<DeclaredCommand> all;
  for (const Command& command : commands()) all.push_back(declared(command));
  return all;
}

std::vector<std::string> words_of_type(const std::string& type) {
  std::vector<std::string> words;
  std::string text;
  std::ranges::copy_if(type, std::back_inserter(text), [](char c) { return c != '[' && c != ']'; });
  std::istringstream parts(text);
  for (std::string word; std::getline(parts, word, '|');) words.push_back(word);
  return words;
}

std::string spelled(const DeclaredOption& option) {
  const std::string names = join(option.names);
  return names.empty() || option.type.empty() ? names + option.type : names + " " + option.type;
}

std::string usage(const DeclaredCommand& command) {
  std::string text = fmt::format("parplan {} [OPTIONS]", command.name);
  for (const DeclaredOption& argument : command.arguments)
    text += argument.required ? " " + argument.type : " [" + argument.type + "]";
  return text;
}

std::string help(const DeclaredCommand& command) {
  std::string text = fmt::format("{}\n\nUsage: {}\n", command.description, usage(command));
  if (!command.arguments.empty()) text += '\n';
  for (const DeclaredOption& argument : command.arguments) text += entry(argument.type, argument.description);
  return text + grouped(command.options);
}

std::string help(const std::vector<DeclaredCommand>& commands) {
  std::string text =
      "parplan: the query planner of distributed training\n\nUsage: parplan COMMAND [OPTIONS] ...\n\nCommands (parplan "
      "COMMAND --help says more):\n";
  for (const DeclaredCommand& command : commands) text += entry(command.name, command.description);
  return text + grouped({help_option, version_option});
}

}  // namespace parplan
