#include "cli/declared_options.h"

#include <algorithm>
#include <sstream>

#include <fmt/format.h>

#include "tests/cli/call.h"

namespace parplan {
namespace {

using namespace testing;

TEST_CASE("help says what a command does, how it is called, and its options by group") {
  CHECK(
      help(DeclaredCommand{
          .name = "walk",
          .description = "Go somewhere",
          .arguments = {{.names = {}, .type = "WHERE", .description = "a place", .group = "Options", .required = true},
                        {.names = {}, .type = "WHEN", .description = "a time (default: now)", .group = "Options"}},
          .options = {{.names = {"-h", "--help"}, .type = "", .description = "print this help", .group = "Options"},
                      {.names = {"--pace"}, .type = "slow|fast", .description = "how fast", .group = "How"},
                      {.names = {"-s", "--shoes"},
                       .type = "KIND_OF_SHOES_FOR_WALKING",
                       .description = "what to wear",
                       .group = "Options"},
                      {.names = {"--with"},
                       .type = "[NAME]",
                       .description = "who comes along: a description that is longer than what a line of a terminal "
                                      "holds goes on in the next line",
                       .group = "How",
                       .value_optional = true}}}) ==
      "Go somewhere\n"
      "\n"
      "Usage: parplan walk [OPTIONS] WHERE [WHEN]\n"
      "\n"
      "  WHERE                           a place\n"
      "  WHEN                            a time (default: now)\n"
      "\n"
      "Options:\n"
      "  -h, --help                      print this help\n"
      "  -s, --shoes KIND_OF_SHOES_FOR_WALKING\n"
      "                                  what to wear\n"
      "\n"
      "How:\n"
      "  --pace slow|fast                how fast\n"
      "  --with [NAME]                   who comes along: a description that is longer than what a line of a terminal "
      "holds\n"
      "                                  goes on in the next line\n");
}

TEST_CASE("the help of a command is what it declares") {
  CHECK(call({"completion", "--help"}).out ==
        "Let the shell complete commands, options and names\n"
        "\n"
        "Usage: parplan completion [OPTIONS] bash|zsh|fish\n"
        "\n"
        "  bash|zsh|fish                   the shell that the script is for\n"
        "\n"
        "Options:\n"
        "  -h, --help                      print this help\n");
  for (const DeclaredCommand& command : declared_commands()) {
    const Called called = call({command.name, "--help"});
    CHECK(called.code == 0);
    CHECK(called.err == "");
    CHECK(called.out == help(command));
    CHECK(call({command.name, "-h"}).out == called.out);
    CHECK(called.out.starts_with(command.description + "\n\nUsage: " + usage(command) + "\n"));
    std::istringstream lines(called.out);
    for (std::string line; std::getline(lines, line);) CHECK(line.size() <= 120);
    for (const DeclaredOption& option : command.options) {
      INFO(command.name << " " << spelled(option));
      CHECK(called.out.find("\n  " + spelled(option)) != std::string::npos);
      CHECK(called.out.find("\n" + option.group + ":\n") != std::string::npos);
      CHECK_FALSE(option.description.empty());
    }
  }
}

TEST_CASE("the help of parplan names every command") {
  const Called called = call({"--help"});
  CHECK(called.code == 0);
  for (const DeclaredCommand& command : declared_commands())
    CHECK(called.out.find(fmt::format("\n  {:<32}{}", command.name, command.description.substr(0, 40))) !=
          std::string::npos);
  CHECK(called.out.ends_with("\nOptions:\n"
                             "  -h, --help                      print this help\n"
                             "  --version                       print the version\n"));
}

TEST_CASE("what is declared says types, optional values and required arguments") {
  const std::vector<DeclaredCommand> commands = declared_commands();
  const auto of = [&](const std::string& name) -> const DeclaredCommand& {
    return *std::ranges::find(commands, name, &DeclaredCommand::name);
  };
  const auto option = [&](const std::string& command, const std::string& name) {
    for (const DeclaredOption& one : of(command).options)
      if (std::ranges::find(one.names, name) != one.names.end()) return one;
    FAIL("no option " << name);
    return DeclaredOption{};
  };
  CHECK(option("suggest", "-o") ==
        DeclaredOption{.names = {"-o", "--output"},
                       .type = "PLAN.yaml",
                       .description = "write the best plan to this file, or to standard output with -",
                       .group = "Output"});
  CHECK(option("suggest", "--json").value_optional);
  CHECK(option("suggest", "--quiet").type == "");
  CHECK(option("run", "--share-gpu").type == "");
  CHECK(option("run", "--steps").group == "Options");
  CHECK(option("simulate", "--sequence-parallel").type == "");
  CHECK(of("suggest").arguments.front() ==
        DeclaredOption{.names = {},
                       .type = "MODEL",
                       .description = "a model.yaml, a Hugging Face config.json or a name of the zoo",
                       .group = "Options",
                       .required = true});
  CHECK_FALSE(of("topology").arguments.front().required);
  CHECK(of("measure").arguments.empty());
  CHECK(words_of_type("[FILE|-]") == std::vector<std::string>{"FILE", "-"});
  CHECK(words_of_type("gpipe|1f1b") == std::vector<std::string>{"gpipe", "1f1b"});
  CHECK(words_of_type("") == std::vector<std::string>{});
}

}  // namespace
}  // namespace parplan
