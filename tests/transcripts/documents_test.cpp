// The commands in README.md and docs/ work.
#include <doctest/doctest.h>

#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "tests/temporary_folder.h"

namespace parplan {
namespace {

namespace files = std::filesystem;

// Commands of the setup, which have run where tests run, and the benchmarks, which take minutes.
const std::vector<std::string> skipped_programs = {"./setup.sh",
                                                   "cmake",
                                                   "ctest",
                                                   "git",
                                                   "pip",
                                                   "build/tests/bench/search_bench",
                                                   "build/tests/bench/train_bench",
                                                   "build/tests/bench/gemm_bench",
                                                   "build/tests/bench/communicator_bench"};

std::string text_of(const files::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<files::path> pages() {
  const files::path source = PARPLAN_SOURCE_DIR;
  std::vector<files::path> found;
  if (files::exists(source / "README.md")) found.push_back(source / "README.md");
  for (const files::directory_entry& entry : files::recursive_directory_iterator(source / "docs"))
    if (entry.path().extension() == ".md") found.push_back(entry.path());
  std::sort(found.begin(), found.end());
  return found;
}

struct Command {
  std::string place;  // "README.md:15"
  std::string text;
  int exit_code = 0;
};

// The commands of a page: every line of a block marked sh, bash or console (there after "$ "), and
// in any other block the lines that begin with "$ ". `&&` separates commands, a backslash at the
// end of a line continues it, and a comment "# exit 2" states another exit code than 0.
std::vector<Command> commands_of(const std::string& name, const std::string& text) {
  static const std::regex states_exit("\\s+# exit ([0-9]+)\\s*$"), has_comment("\\s+# .*$");
  std::vector<Command> commands;
  std::istringstream lines(text);
  std::string block;
  bool inside = false;
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.starts_with("```")) {
      inside = !inside;
      block = inside ? line.substr(3) : "";
      continue;
    }
    if (!inside) continue;
    const bool prompt = line.starts_with("$ ");
    if (!prompt && block != "sh" && block != "bash") continue;
    const int first = number;
    std::string command = prompt ? line.substr(2) : line;
    for (std::string more; command.ends_with("\\") && std::getline(lines, more); ++number) {
      command.pop_back();
      command += more;
    }
    int exit_code = 0;
    if (std::smatch stated; std::regex_search(command, stated, states_exit)) exit_code = std::stoi(stated[1]);
    command = std::regex_replace(command, has_comment, "");
    if (command.empty() || command.starts_with("#")) continue;
    for (std::size_t begin = 0; begin < command.size();) {
      const std::size_t end = std::min(command.find(" && ", begin), command.size());
      commands.push_back({.place = fmt::format("{}:{}", name, first),
                          .text = command.substr(begin, end - begin),
                          .exit_code = exit_code});
      begin = end + 4;
    }
  }
  return commands;
}

// The time of training grows with its steps; one step shows that the command works.
std::string with_one_step(const std::string& command) {
  static const std::regex run("^((?:build/)?parplan run)( .*)$"), steps(" --steps[ =][0-9]+");
  std::smatch parts;
  if (!std::regex_match(command, parts, run) || parts[2] == " --help") return command;
  return parts[1].str() + " --steps 1" + std::regex_replace(parts[2].str(), steps, "");
}

// A folder that looks like the top of the tree after setup.sh, without its sources.
class Workplace {
 public:
  Workplace() {
    files::create_directories(folder_ / "cache");
    ::setenv("XDG_CACHE_HOME", (folder_ / "cache").c_str(), 1);  // this machine is measured once for all pages
    ::unsetenv("PARPLAN_DATA");
  }

  files::path page(const std::string& name) const {
    std::string flat = name;
    std::replace(flat.begin(), flat.end(), '/', '-');
    const files::path page = folder_ / flat;
    files::create_directories(page / "build");
    files::create_symlink(PARPLAN_BINARY, page / "build" / "parplan");
    for (const char* shared : {"models", "configs", "tests", "docs"})
      files::create_directory_symlink(files::path(PARPLAN_SOURCE_DIR) / shared, page / shared);
    return page;
  }

 private:
  testing::TemporaryFolder folder_;
};

// The exit code of `command`, run by the shell; minus the signal's number if one ended it.
int run_in(const files::path& folder, const std::string& command) {
  const int status =
      std::system(fmt::format("cd '{}' && PATH=\"$PWD/build:$PATH\" && {{ {}\n}} > stdout.txt 2> stderr.txt",
                              folder.string(), command)
                      .c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace

TEST_CASE("commands are found in a page") {
  const std::string text =
      "parplan outside of a block\n"
      "```sh\n./setup.sh && build/parplan suggest gpt2 -o plan.yaml\n# words\nparplan run plan.yaml \\\n--steps 5  # "
      "exit 2\n```\n"
      "```text\n$ parplan run --help\nwhat it prints\n```\n"
      "```yaml\nname: tiny\n```\n";
  std::string found;
  for (const Command& command : commands_of("page", text))
    found += fmt::format("{} [{}] {}\n", command.place, with_one_step(command.text), command.exit_code);
  CHECK(found ==
        "page:3 [./setup.sh] 0\n"
        "page:3 [build/parplan suggest gpt2 -o plan.yaml] 0\n"
        "page:5 [parplan run --steps 1 plan.yaml] 2\n"
        "page:9 [parplan run --help] 0\n");
}

TEST_CASE("every command of README.md and docs runs, training cut to one step") {
  const Workplace workplace;
  std::map<std::string, int> skipped;
  int ran = 0;
  std::string times;
  for (const files::path& path : pages()) {
    const std::string name = path.lexically_relative(PARPLAN_SOURCE_DIR).string();
    const std::vector<Command> commands = commands_of(name, text_of(path));
    if (commands.empty()) continue;
    const files::path folder = workplace.page(name);
    for (const Command& command : commands) {
      const std::string program = command.text.substr(0, command.text.find(' '));
      if (std::find(skipped_programs.begin(), skipped_programs.end(), program) != skipped_programs.end()) {
        ++skipped[program];
        continue;
      }
      INFO(command.place << ": " << command.text);
      const bool ours = program == "parplan" || program == "build/parplan";
      CHECK_MESSAGE(ours, "neither parplan nor one of the programs that are skipped by name");
      if (!ours) continue;
      const auto begin = std::chrono::steady_clock::now();
      const int code = run_in(folder, with_one_step(command.text));
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      INFO(text_of(folder / "stderr.txt"));
      CHECK(code == command.exit_code);
      times += fmt::format("{:6.2f} s  {}: {}\n", seconds, command.place, command.text);
      ++ran;
    }
  }
  std::string left_out;
  for (const auto& [program, count] : skipped) left_out += fmt::format(" {} ({})", program, count);
  MESSAGE(fmt::format("{} commands ran, skipped are{}\n{}", ran, left_out, times));
  CHECK(ran > 0);
}

TEST_CASE("every link of README.md and docs to a file leads to one") {
  static const std::regex code("``[`][^`]*``[`]");  // fenced: captures of lambdas look like links
  static const std::regex link("\\]\\(([^)#:]+)(#[^)]*)?\\)");
  int links = 0;
  for (const files::path& path : pages()) {
    const std::string text = std::regex_replace(text_of(path), code, "");
    for (std::sregex_iterator found(text.begin(), text.end(), link), end; found != end; ++found) {
      const std::string target = (*found)[1];
      INFO(path.lexically_relative(PARPLAN_SOURCE_DIR).string() << " links to " << target);
      CHECK(files::exists(path.parent_path() / target));
      ++links;
    }
  }
  CHECK(links > 0);
}

}  // namespace parplan
