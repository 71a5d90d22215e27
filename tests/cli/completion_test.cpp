// The installed shells load the scripts and report their completions.
#include "cli/completion.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>

#include "cli/data_folder.h"
#include "models/find_model.h"
#include "tests/cli/call.h"
#include "tests/cli/shell.h"

namespace parplan {
namespace {

using namespace testing;

using Words = std::set<std::string>;

bool installed(const std::string& program) { return shell("command -v " + program + " >/dev/null").code == 0; }

Words lines_of(const std::string& text) {
  Words words;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (!line.empty()) words.insert(line);
  return words;
}

Words set_of(const std::vector<std::string>& names) { return {names.begin(), names.end()}; }
Words zoo() { return set_of(zoo_names(zoo_folder())); }
Words clusters() { return set_of(cluster_names(cluster_catalog())); }
Words command_names() {
  Words names;
  for (const Command& command : commands()) names.emplace(command.name);
  return names;
}
Words with(Words words, const Words& more) {
  words.insert(more.begin(), more.end());
  return words;
}
bool holds(const Words& all, const Words& some) { return std::ranges::includes(all, some); }

// A folder with the scripts, in which "plan.yaml" and "my models/" are the only files.
struct Place {
  Folder folder;
  Place() {
    for (const Shell shell : {Shell::bash, Shell::zsh, Shell::fish})
      folder.write(fmt::format("script.{}", name(shell)), call({"completion", name(shell)}).out);
    std::filesystem::create_directory(folder.path("files"));
    folder.write("files/plan.yaml", "");
    std::filesystem::create_directory(folder.path("files/my models"));
  }
};

// Bash's completions of a line whose words are cut as readline cuts them: at spaces and at "=".
struct Bash : Place {
  Words complete(const std::vector<std::string>& words) const {
    std::string line = "parplan";
    for (const std::string& word : words) line += fmt::format(" \"{}\"", word);
    const Called said =
        shell(fmt::format("cd '{}' && bash --norc -c 'source ../script.bash; COMP_WORDS=({}); COMP_CWORD={}; _parplan; "
                          "printf \"%s\\n\" \"${{COMPREPLY[@]}}\"'",
                          folder.path("files"), line, words.size()));
    REQUIRE(said.code == 0);
    return lines_of(said.out);
  }
};

TEST_CASE("bash completes commands, options, choices, names and files" * doctest::skip(!installed("bash"))) {
  const Bash bash;
  CHECK(bash.complete({""}) == with(command_names(), {"--help", "--version"}));
  CHECK(bash.complete({"su"}) == Words{"suggest"});
  CHECK(bash.complete({"suggest", ""}) == with(zoo(), {"plan.yaml", "my models"}));
  CHECK(bash.complete({"suggest", "gpt2-"}) == Words{"gpt2-large", "gpt2-medium", "gpt2-xl"});
  CHECK(bash.complete({"explain", ""}) == Words{"plan.yaml", "my models"});
  CHECK(bash.complete({"suggest", "gpt2", "--cluster", ""}) == with(clusters(), {"plan.yaml", "my models"}));
  CHECK(bash.complete({"suggest", "gpt2", "--cluster", "=", "dgx-a"}) == Words{"dgx-a100"});
  CHECK(bash.complete({"suggest", "gpt2", "--cluster", "="}) == with(clusters(), {"plan.yaml", "my models"}));
  CHECK(bash.complete({"suggest", "gpt2", "--precision", ""}) == Words{"bf16", "fp16", "fp8", "tf32", "fp32"});
  CHECK(bash.complete({"suggest", "gpt2", "--zero", ""}) == Words{"0", "1", "2", "3"});
  CHECK(bash.complete({"suggest", "gpt2", "--devices", ""}) == Words{});
  CHECK(bash.complete({"suggest", "gpt2", "--preci"}) == Words{"--precision"});
  CHECK(bash.complete({"completion", ""}) == Words{"bash", "zsh", "fish"});
  CHECK(bash.complete({"frobnicate", ""}) == Words{});
  CHECK(bash.complete({"measure", "--device", ""}) == Words{"cpu", "cuda"});
  CHECK(bash.complete({"sweep", "gpt2", "--cluster", "dgx-a"}) == Words{"dgx-a100"});
  CHECK(bash.complete({"sweep", "gpt2", "--cluster", "dgx-a100,dgx-h"}) == Words{"dgx-a100,dgx-h100"});
  CHECK(bash.complete({"sweep", "gpt2", "--cluster", "=", "dgx-a100,gaudi3-8,pl"}) ==
        Words{"dgx-a100,gaudi3-8,plan.yaml"});
  CHECK(bash.complete({"sweep", "gpt2", "--device", "t4,h200"}) == Words{"t4,h200-sxm-141gb"});
}

TEST_CASE("bash completes an argument once, then the options that are not given yet" *
          doctest::skip(!installed("bash"))) {
  const Bash bash;
  const Words all = bash.complete({"run", "-"});
  CHECK(holds(all, {"--steps", "--data", "--json", "--quiet", "--help", "-h"}));
  Words rest = all;
  rest.erase("--steps");
  rest.erase("--quiet");
  CHECK(bash.complete({"run", "--steps", "3", "plan.yaml", "--quiet", ""}) == rest);
  CHECK(bash.complete({"run", "--quiet", ""}) == Words{"plan.yaml", "my models"});
  // The value of --json is optional.
  CHECK(bash.complete({"run", "plan.yaml", "--json", ""}) == Words{"plan.yaml", "my models"});
  rest = all;
  rest.erase("--json");
  CHECK(bash.complete({"run", "plan.yaml", "--json", "-"}) == rest);
}

TEST_CASE("fish completes commands, options, choices, names and files" * doctest::skip(!installed("fish"))) {
  const Place place;
  // Fish prints a description after a tab.
  const auto complete = [&](const std::string& line) {
    const Called said = shell(
        fmt::format("cd '{}' && HOME='{}' fish --no-config -c \"source ../script.fish; complete -C '{}'\" | cut -f 1",
                    place.folder.path("files"), place.folder.path("home"), line));
    REQUIRE(said.code == 0);
    return lines_of(said.out);
  };
  CHECK(complete("parplan ") == command_names());
  CHECK(complete("parplan su") == Words{"suggest"});
  CHECK(holds(complete("parplan suggest "), with(zoo(), {"plan.yaml", "my models/"})));
  CHECK(complete("parplan suggest gpt2 --precision ") == Words{"bf16", "fp16", "tf32", "fp32"});
  CHECK(complete("parplan suggest gpt2 --cluster dgx-a") == Words{"dgx-a100"});
  CHECK(complete("parplan suggest gpt2 --pre") == Words{"--precision"});
  CHECK(complete("parplan suggest gpt2 --devices ") == Words{});
  CHECK(complete("parplan explain ") == Words{"plan.yaml", "my models/"});
  CHECK(complete("parplan completion ") == Words{"bash", "zsh", "fish"});
  CHECK(complete("parplan sweep gpt2 --cluster dgx-a") == Words{"dgx-a100"});
  CHECK(complete("parplan sweep gpt2 --cluster dgx-a100,dgx-h") == Words{"dgx-a100,dgx-h100"});
}

// zsh completes on a terminal only: a second zsh gets one, the line and a tab, and records what is
// added to its list.
TEST_CASE("zsh completes commands, options, choices, names and files" * doctest::skip(!installed("zsh"))) {
  const Place place;
  const std::string folder = place.folder.path("");
  place.folder.write("setup.zsh", fmt::format(R"zsh(PROMPT=
autoload -Uz compinit
compinit -u -d {0}/dump
source {0}/script.zsh
cd {0}/files
bindkey '^I' complete-word
finish() {{ exit }}
comppostfuncs=(finish)
compadd() {{
  # -O, -A and -D fill arrays and add nothing.
  if [[ ${{@[1,(i)(-|--)]}} == *-(O|A|D)\ * ]]; then
    builtin compadd "$@"
    return
  fi
  local -a hits
  builtin compadd -A hits "$@"
  (( $#hits )) && print -rl -- $hits >> {0}/found
  builtin compadd "$@"
}}
print set'' up
)zsh",
                                              folder));
  place.folder.write("driver.zsh", R"zsh(zmodload zsh/zpty || exit 3
: > $2/found
zpty z zsh -f -i
zpty -w z "source $2/setup.zsh"
zpty -r -m z seen '*set up*' || exit 4
zpty -n -w z "$1"$'\t'
while zpty -r z seen; do :; done
cat $2/found
)zsh");
  const auto complete = [&](const std::string& line) {
    const Called said = shell(fmt::format("timeout 120 zsh -f '{0}/driver.zsh' '{1}' '{0}'", folder, line));
    REQUIRE(said.code == 0);
    return lines_of(said.out);
  };
  CHECK(complete("parplan ") == command_names());
  CHECK(complete("parplan su") == Words{"suggest"});
  CHECK(complete("parplan suggest ") == with(zoo(), {"plan.yaml", "my\\ models"}));
  CHECK(complete("parplan suggest gpt2 --cluster=dgx-a") == Words{"dgx-a100"});
  CHECK(complete("parplan suggest gpt2 --precision ") == Words{"bf16", "fp16", "tf32", "fp32"});
  CHECK(complete("parplan suggest gpt2 --pre") == Words{"--precision"});
  CHECK(complete("parplan suggest gpt2 --devices ") == Words{});
  CHECK(complete("parplan explain ") == Words{"plan.yaml", "my\\ models"});
  CHECK(complete("parplan measure --device ") == Words{"cpu", "cuda"});
  CHECK(complete("parplan sweep gpt2 --cluster dgx-a100,dgx-h") == Words{"dgx-h100"});
  CHECK(complete("parplan sweep gpt2 --device t4,h200") == Words{"h200-sxm-141gb"});
  CHECK(holds(complete("parplan run plan.yaml -"), {"--steps", "--data", "--json", "--quiet", "--help", "-h"}));
}

TEST_CASE("what is offered for a value follows from its type") {
  const auto of_type = [](const std::string& type) {
    return offer({.names = {"--x"}, .type = type, .description = "", .group = ""});
  };
  CHECK(of_type("gpipe|1f1b") == Offer{.values = {"gpipe", "1f1b"}, .files = false});
  CHECK(of_type("0..3") == Offer{.values = {"0", "1", "2", "3"}, .files = false});
  CHECK(of_type("[FILE|-]") == Offer{.values = {}, .files = true});
  CHECK(of_type("PLAN.yaml") == Offer{.values = {}, .files = true});
  CHECK(of_type("N,N,...") == Offer{});
  CHECK(of_type("") == Offer{});
  CHECK(set_of(of_type("MODEL|PLAN").values) == zoo());
  CHECK(of_type("KIND").values == nvidia_card_names(cluster_catalog()));
  CHECK(of_type("cpu|cuda|cuda:N").values == std::vector<std::string>{"cpu", "cuda"});
  CHECK(of_type("KIND,...") == Offer{.values = nvidia_card_names(cluster_catalog()), .files = false, .list = true});
  CHECK(of_type("FILE|NAME,...") == Offer{.values = cluster_names(cluster_catalog()), .files = true, .list = true});
  CHECK(of_type("PRICE|NAME=PRICE,...") == Offer{});
}

TEST_CASE("options and arguments that name files, models, clusters or devices are completed") {
  for (const DeclaredCommand& command : declared_commands())
    for (const std::vector<DeclaredOption>* list : {&command.arguments, &command.options})
      for (const DeclaredOption& option : *list)
        for (const std::string& word : words_of_type(option.type))
          if (Words{"FILE", "PLAN", "MODEL", "CLUSTER", "DIR", "NAME", "NAME,...", "KIND", "KIND,..."}.contains(word)) {
            INFO(command.name << " " << spelled(option));
            CHECK_FALSE(offer(option) == Offer{});
          }
}

TEST_CASE("a shell that is not known is refused") {
  const Called called = call({"completion", "bsh"});
  CHECK(called.code == 2);
  CHECK(called.err == "error: shell: expected one of bash, zsh, fish, found 'bsh'; did you mean 'bash'?\n");
  CHECK(call({"completion"}).err == "error: completion needs a bash|zsh|fish: the shell that the script is for\n");
}

}  // namespace
}  // namespace parplan
