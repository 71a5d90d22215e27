// docs/ describes commands and fields as they are.
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "cli/declared_options.h"
#include "tests/cli/call.h"
#include "tests/cli/generated_parts.h"

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
    // Words as a shell splits them: '2.50 USD' is one.
    std::vector<std::string>& command = found.emplace_back();
    bool quoted = false;
    bool open = false;
    for (const char c : line.substr(8)) {
      if (c == '\'') quoted = !quoted;
      else if (c == ' ' && !quoted) open = false;
      else {
        if (!open) command.emplace_back();
        open = true;
        command.back() += c;
      }
    }
  }
  return found;
}

TEST_CASE("every command of the pages on the command line, capacity and calibration runs, from the top of the tree") {
  const Folder folder;
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::create_directory_symlink(std::string(PARPLAN_SOURCE_DIR) + "/tests", folder.path("tests"));
  std::filesystem::current_path(folder.path(""));
  std::vector<std::vector<std::string>> commands = commands_of(page("cli.md"));
  CHECK(commands.size() >= 10);
  for (const char* name : {"capacity.md", "calibration.md"})
    for (std::vector<std::string>& command : commands_of(page(name))) commands.push_back(std::move(command));
  for (const std::vector<std::string>& command : commands) {
    const Called called = call(command);
    INFO(fmt::format("{}", fmt::join(command, " ")));
    INFO(called.err);
    CHECK(called.code == 0);
  }
  std::filesystem::current_path(before);
}

// `cmake --build BUILD --target pages` sets the variable.
TEST_CASE("pages hold the tables that are written from what the program declares") {
  for (const char* name : {"cli.md", "json.md", "accuracy.md"}) {
    const std::string found = page(name);
    const std::string wanted = with_generated_parts(found);
    if (found != wanted && std::getenv("PARPLAN_WRITE_PAGES") != nullptr) {
      std::ofstream(std::string(PARPLAN_SOURCE_DIR) + "/docs/" + name) << wanted;
      continue;
    }
    INFO("docs/" << name << " is not up to date: cmake --build BUILD --target pages");
    CHECK(found == wanted);
  }
}

TEST_CASE("every link within the command line's page leads to a heading") {
  const std::string text = page("cli.md");
  std::string headings;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("## ")) headings += "(#" + anchor(line.substr(3)) + ")";
  int links = 0;
  for (std::size_t at = text.find("(#"); at != std::string::npos; at = text.find("(#", at + 1)) {
    const std::string link = text.substr(at, text.find(')', at) + 1 - at);
    INFO(link);
    CHECK(headings.find(link) != std::string::npos);
    ++links;
  }
  CHECK(links >= 10);
}

TEST_CASE(
    "the command line's page has a section and a table of every command, and of every group that commands share") {
  const std::string text = page("cli.md");
  for (const DeclaredCommand& command : declared_commands()) {
    CHECK(text.find(fmt::format("\n## {}\n", command.name)) != std::string::npos);
    CHECK(text.find(fmt::format("<!-- generated: options of {} -->", command.name)) != std::string::npos);
    for (const DeclaredOption& option : command.options) {
      INFO(command.name << " " << spelled(option));
      CHECK((option.names.back() == "--help" || text.find(option.names.back()) != std::string::npos));
    }
  }
}

}  // namespace
}  // namespace parplan
