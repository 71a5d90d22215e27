#include "cli/add_option.h"

#include <utility>

#include <CLI/CLI.hpp>

namespace parplan {

void add_option(CLI::App& app, const NewOption& option, std::function<void(const std::string&)> read) {
  CLI::Option* added = app.add_option_function<std::string>(option.names, std::move(read), option.description);
  added->type_name(option.type)->required(option.required);
  if (!option.group.empty()) added->group(option.group);
  if (option.value_optional) added->expected(0, 1);
}

void add_option(CLI::App& app, const NewOption& option, std::string& value) {
  add_option(app, option, [&value](const std::string& text) { value = text; });
}

void add_flag(CLI::App& app, const NewOption& option, std::function<void()> set) {
  CLI::Option* added = app.add_flag_callback(option.names, std::move(set), option.description);
  if (!option.group.empty()) added->group(option.group);
}

void add_flag(CLI::App& app, const NewOption& option, bool& value) {
  add_flag(app, option, [&value] { value = true; });
}

}  // namespace parplan
