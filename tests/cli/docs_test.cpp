// What docs/ says of commands and fields is what they do.
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "cli/commands.h"
#include "planner/report/row.h"
#include "tests/cli/call.h"

namespace parplan {
namespace {

using namespace testing;

std::string page(const std::string& name) {
  std::ifstream file(std::string(PARPLAN_SOURCE_DIR) + "/docs/" + name);
  REQUIRE(file.good());
  return {std::istreambuf_iterator<char>(file), {}};
}

// The lines of ```sh blocks that call parplan, as words.
std::vector<std::vector<std::string>> commands_of(const std::string& text) {
  std::vector<std::vector<std::string>> found;
  std::istringstream lines(text);
  bool in_block = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("```")) {
      in_block = !in_block && line == "```sh";
      continue;
    }
    if (!in_block || !line.starts_with("parplan ")) continue;
    std::istringstream words(line.substr(8));
    std::vector<std::string>& command = found.emplace_back();
    for (std::string word; words >> word;) command.push_back(word);
  }
  return found;
}

TEST_CASE("every command of the command line's page runs, from the top of the tree") {
  const Folder folder;
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::create_directory_symlink(std::string(PARPLAN_SOURCE_DIR) + "/tests", folder.path("tests"));
  std::filesystem::current_path(folder.path(""));
  const std::vector<std::vector<std::string>> commands = commands_of(page("cli.md"));
  CHECK(commands.size() >= 10);
  for (const std::vector<std::string>& command : commands) {
    const Called called = call(command);
    INFO(fmt::format("{}", fmt::join(command, " ")));
    INFO(called.err);
    CHECK(called.code == 0);
  }
  std::filesystem::current_path(before);
}

TEST_CASE("the command line's page holds each command's help, word for word") {
  const std::string text = page("cli.md");
  for (const Command& command : commands()) {
    const std::string name(command.name);
    const Called called = call({name, "--help"});
    REQUIRE(called.code == 0);
    std::string help = called.out;
    help.erase(help.find_last_not_of('\n') + 1);
    INFO(help);
    CHECK(text.find("$ parplan " + name + " --help\n" + help + "\n```") != std::string::npos);
  }
}

TEST_CASE("the page on JSON describes every column in order") {
  std::string table;
  for (const Column& column : columns()) table += fmt::format("| `{}` | {} | {} |\n", column.key, column.unit, column.description);
  CHECK(page("json.md").find("|---|---|---|\n" + table + "\n") != std::string::npos);
}

}  // namespace
}  // namespace parplan
