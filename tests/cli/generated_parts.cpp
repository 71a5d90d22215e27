#include "tests/cli/generated_parts.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "cli/declared_options.h"
#include "cli/published_model.h"
#include "planner/base/text.h"
#include "planner/report/plan_row.h"
#include "planner/report/sweep.h"
#include "planner/report/table.h"
#include "planner/validate/validate.h"
#include "planner/validate/validation_report.h"

namespace parplan::testing {
namespace {

const std::string begins = "<!-- generated: ";
const std::string name_ends = " -->\n";
const std::string ends = "<!-- end of generated -->";

// `a|b` in a table's cell.
std::string code(const std::string& text) {
  std::string escaped;
  for (const char c : text) escaped += c == '|' ? std::string("\\|") : std::string(1, c);
  return "`" + escaped + "`";
}

std::vector<std::string> commands_with(const DeclaredOption& option) {
  std::vector<std::string> names;
  for (const DeclaredCommand& command : declared_commands())
    if (std::ranges::find(command.options, option) != command.options.end()) names.push_back(command.name);
  return names;
}
bool is_shared(const DeclaredOption& option) { return commands_with(option).size() > 1; }

std::string command_table() {
  std::string text = "| command | |\n|---|---|\n";
  for (const DeclaredCommand& command : declared_commands())
    text += fmt::format("| [`{0}`](#{0}) | {1} |\n", command.name, command.description);
  return text;
}

// The options of one command alone, and links to the others.
std::string options_of_command(const DeclaredCommand& command) {
  std::string rows;
  std::vector<std::string> groups;
  for (const DeclaredOption& argument : command.arguments)
    rows += fmt::format("| {} | {} |\n", code(argument.type), argument.description);
  for (const DeclaredOption& option : command.options) {
    if (option.group == "Options" && is_shared(option)) continue;  // --help
    if (!is_shared(option)) {
      rows += fmt::format("| {} | {} |\n", code(spelled(option)), option.description);
    } else if (const std::string link = fmt::format("[{}](#{})", option.group, anchor(option.group));
               std::ranges::find(groups, link) == groups.end()) {
      groups.push_back(link);
    }
  }
  std::string text = fmt::format("```text\n{}\n```\n", usage(command));
  if (!rows.empty()) text += "\n| | |\n|---|---|\n" + rows;
  if (!groups.empty()) text += fmt::format("\nWith options of {}.\n", join(groups));
  return text;
}

std::string options_of_group(const std::string& group) {
  std::vector<DeclaredOption> options;
  for (const DeclaredCommand& command : declared_commands())
    for (const DeclaredOption& option : command.options)
      if (option.group == group && is_shared(option) && std::ranges::find(options, option) == options.end())
        options.push_back(option);
  REQUIRE_MESSAGE(!options.empty(), "no command shares options of group " << group);
  std::string text = "| option | | of |\n|---|---|---|\n";
  for (const DeclaredOption& option : options)
    text += fmt::format("| {} | {} | {} |\n", code(spelled(option)), option.description, join(commands_with(option)));
  return text;
}

std::string columns_table() {
  std::string table = "| key | unit | meaning |\n|---|---|---|\n";
  for (const Column& column : columns())
    table += fmt::format("| `{}` | {} | {} |\n", column.key, column.unit, column.description);
  return table;
}

// The columns of a row of sweep besides a plan's columns.
std::string sweep_columns_table() {
  std::string table = "| key | unit | meaning |\n|---|---|---|\n";
  for (const SweepColumn& column : sweep_columns())
    if (std::ranges::find(columns(), column.key, &Column::key) == columns().end())
      table += fmt::format("| `{}` | {} | {} |\n", column.key, column.unit, column.description);
  return table;
}

// By engine: a source is one engine's, and the file names it.
std::string accuracy(const std::string& file) {
  const std::string source = PARPLAN_SOURCE_DIR;
  const std::vector<ValidatedRun> runs =
      validate(read_published_runs(source + "/tests/data/published/" + file),
               {.catalog = {source + "/configs/devices", source + "/configs/clusters"},
                .engines = source + "/configs/engines",
                .engine = {}},
               graph_of_published, 0, {});
  const auto percent = [](double share) { return fmt::format("{:.1f} %", 100.0 * share); };
  std::string text =
      "| | | runs | mean | median | largest | bias | rank correlation |\n|---|---|---|---|---|---|---|---|\n";
  for (const SummaryRow& row : summary_rows(runs)) {
    if (row.of != "all" && row.of != "message size" && (row.of != "engine" || row.name == "nccl")) continue;
    const ErrorSummary& errors = row.errors;
    text += fmt::format("| {}, {} | {} | {} | {} | {} | {} | {} | {} |\n", row.quantity, row.stated, row.name,
                        errors.count, percent(errors.mean_absolute), percent(errors.median_absolute),
                        percent(errors.largest_absolute), percent(errors.bias),
                        errors.rank_correlation ? fmt::format("{:.2f}", *errors.rank_correlation) : "");
  }
  text += "\n```text\n" + fold_lines(summary_in_words(runs), 96) + "```\n";
  return text;
}

std::string part(const std::string& name) {
  if (name == "commands") return command_table();
  if (name == "columns") return columns_table();
  if (name == "columns of sweep") return sweep_columns_table();
  const std::string of_group = "options of group ";
  if (name.starts_with(of_group)) return options_of_group(name.substr(of_group.size()));
  for (const DeclaredCommand& command : declared_commands())
    if (name == "options of " + command.name) return options_of_command(command);
  constexpr std::string_view accuracy_of = "accuracy of ";
  if (name.starts_with(accuracy_of)) return accuracy(name.substr(accuracy_of.size()));
  FAIL("no generated part is named '" << name << "'");
  return {};
}

}  // namespace

std::string anchor(std::string heading) {
  std::ranges::transform(heading, heading.begin(),
                         [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  return heading;
}

std::string with_generated_parts(const std::string& page) {
  std::string text;
  std::size_t at = 0;
  for (std::size_t begin = page.find(begins); begin != std::string::npos; begin = page.find(begins, at)) {
    const std::size_t name_at = begin + begins.size();
    const std::size_t name_end = page.find(name_ends, name_at);
    const std::size_t end = page.find(ends, name_at);
    REQUIRE_MESSAGE((name_end != std::string::npos && end != std::string::npos), "a generated part has no end");
    const std::string name = page.substr(name_at, name_end - name_at);
    text += page.substr(at, begin - at) + begins + name + name_ends + part(name);
    at = end;
  }
  return text + page.substr(at);
}

}  // namespace parplan::testing
