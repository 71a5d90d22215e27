#include "cli/completion.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <string_view>

#include <fmt/format.h>

#include "cli/add_option.h"
#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/data_folder.h"
#include "cli/version.h"
#include "models/find_model.h"
#include "planner/base/enum_index.h"
#include "planner/base/text.h"

namespace parplan {
namespace {

// What upper-case words of types stand for, where that can be listed: nothing is offered for an N
// or a RATE.
struct KindOfValue {
  std::string_view word;
  std::vector<std::string> (*names)() = nullptr;  // names that come with parplan
  bool files = false;
};

std::vector<std::string> models() { return zoo_names(zoo_folder()); }
std::vector<std::string> clusters() { return cluster_names(cluster_catalog()); }
std::vector<std::string> cards() { return nvidia_card_names(cluster_catalog()); }  // the values of --device and --like

constexpr std::array kinds_of_values = {
    KindOfValue{"MODEL", models, true}, KindOfValue{"PLAN", nullptr, true}, KindOfValue{"CLUSTER", clusters, true},
    KindOfValue{"NAME", clusters},      KindOfValue{"KIND", cards},         KindOfValue{"FILE", nullptr, true},
    KindOfValue{"DIR", nullptr, true},
};

// Scripts contain names unquoted, so no character of them may mean something to a shell.
bool is_plain(const std::string& word) {
  return !word.empty() &&
         word.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+-") ==
             std::string::npos;
}

std::string single_quoted(std::string_view text) {
  std::string out;
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return "'" + out + "'";
}

std::vector<std::string> long_and_short_names(const std::vector<DeclaredOption>& options) {
  std::vector<std::string> names;
  for (const DeclaredOption& option : options) names.insert(names.end(), option.names.begin(), option.names.end());
  return names;
}

// ---- bash ----

std::string bash_offer(const Offer& offer) {
  return fmt::format("offers={}{}{}", single_quoted(join(offer.values, " ")), offer.files ? " files=yes" : "",
                     offer.list ? " list=yes" : "");
}

std::string bash_script(const std::vector<DeclaredCommand>& commands) {
  std::vector<std::string> names;
  std::string by_command;
  std::string by_option;
  for (const DeclaredCommand& command : commands) {
    names.push_back(command.name);
    std::vector<std::string> flags;
    std::vector<std::string> optional;
    for (const DeclaredOption& option : command.options) {
      if (option.type.empty()) flags.insert(flags.end(), option.names.begin(), option.names.end());
      if (option.value_optional) optional.insert(optional.end(), option.names.begin(), option.names.end());
      if (option.type.empty()) continue;
      std::vector<std::string> patterns;
      for (const std::string& name : option.names) patterns.push_back(single_quoted(command.name + " " + name));
      by_option += fmt::format("    {}) {} ;;\n", join(patterns, "|"), bash_offer(offer(option)));
    }
    const std::string argument =
        command.arguments.empty() ? ""
                                  : fmt::format(" takes_argument=yes {}", bash_offer(offer(command.arguments.front())));
    by_command += fmt::format("    {}) flags={} optional={} options={}{} ;;\n", command.name,
                              single_quoted(join(flags, " ")), single_quoted(join(optional, " ")),
                              single_quoted(join(long_and_short_names(command.options), " ")), argument);
  }
  names.insert(names.end(), {"--help", "--version"});
  return fmt::format(R"script(# Completion of parplan {version} for bash: source <(parplan completion bash)
_parplan() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} command= option= argument= given=' ' flags= optional= options= offers= files= list= before= takes_argument= word i
  # bash cuts --option=value at the equals sign.
  [[ $current == = ]] && current=
  for ((i = 1; i < COMP_CWORD; ++i)); do
    word=${{COMP_WORDS[i]}}
    if [[ $word == = ]]; then
      continue
    elif [[ -z $command ]]; then
      command=$word
      case $command in
{by_command}      esac
    elif [[ $word == -[!0-9]* ]]; then
      given+="$word "
      option=$word
      [[ " $flags " == *" $word "* ]] && option=
    elif [[ -n $option ]]; then
      option=
    else
      argument=$word
    fi
  done
  if [[ -z $command ]]; then
    offers={names}
  elif [[ -n $option && ! ($current == -* && " $optional " == *" $option "*) ]]; then
    offers= files=
    case "$command $option" in
{by_option}    esac
  elif [[ $current == -* || -n $argument || -z $takes_argument ]]; then
    offers= files=
    for word in $options; do
      [[ $given == *" $word "* ]] || offers+="$word "
    done
  fi
  COMPREPLY=()
  if [[ -n $list && $current == *,* ]]; then
    before=${{current%,*}},
    current=${{current##*,}}
  fi
  while IFS= read -r word; do
    COMPREPLY+=("$before$word")
  done < <(compgen -W "$offers" -- "$current"; [[ -n $files ]] && compgen -f -- "$current")
  [[ -n $files ]] && compopt -o filenames 2>/dev/null
  return 0
}}
complete -F _parplan parplan
)script",
                     fmt::arg("version", version()), fmt::arg("by_command", by_command),
                     fmt::arg("by_option", by_option), fmt::arg("names", single_quoted(join(names, " "))));
}

// ---- zsh ----

// Brackets end an explanation, colons a message (zshcompsys(1), _arguments).
std::string zsh_escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

std::string zsh_action(const Offer& offer) {
  if (offer.values.empty()) return offer.files ? "_files" : " ";
  const std::string values = join(offer.values, " ");
  if (offer.list) return fmt::format(" {} {}", offer.files ? "_parplan_list_or_files" : "_parplan_list", values);
  return offer.files ? fmt::format(" _parplan_name_or_file {}", values) : fmt::format("({})", values);
}

std::string zsh_option(const DeclaredOption& option) {
  const std::string explanation = fmt::format("[{}]", zsh_escaped(option.description));
  const std::string value = option.type.empty() ? ""
                                                : fmt::format("{}{}:{}", option.value_optional ? "::" : ":",
                                                              zsh_escaped(option.type), zsh_action(offer(option)));
  std::string text;
  for (const std::string& name : option.names) {
    const std::string excluded = option.names.size() > 1 ? fmt::format("({})", join(option.names, " ")) : "";
    const std::string joined = option.type.empty() ? "" : name.starts_with("--") ? "=" : "+";
    text += fmt::format("        {} \\\n", single_quoted(excluded + name + joined + explanation + value));
  }
  return text;
}

std::string zsh_script(const std::vector<DeclaredCommand>& commands) {
  std::string names;
  std::string by_command;
  for (const DeclaredCommand& command : commands) {
    names += fmt::format("    {}\n", single_quoted(command.name + ":" + zsh_escaped(command.description)));
    by_command += fmt::format("    {})\n      _arguments -S : \\\n", command.name);
    for (const DeclaredOption& option : command.options) by_command += zsh_option(option);
    for (const DeclaredOption& argument : command.arguments)
      by_command +=
          fmt::format("        {} \\\n",
                      single_quoted(fmt::format("1:{}:{}", zsh_escaped(argument.type), zsh_action(offer(argument)))));
    by_command += "        && return 0\n      ;;\n";
  }
  return fmt::format(R"script(#compdef parplan
# Completion of parplan {version} for zsh: source <(parplan completion zsh), after compinit
_parplan_name_or_file() {{
  _alternative "names:name:($*)" 'files:file:_files'
}}
_parplan_list() {{
  compset -P '*,'
  compadd - "$@"
}}
_parplan_list_or_files() {{
  compset -P '*,'
  _parplan_name_or_file "$@"
}}
_parplan() {{
  local curcontext="$curcontext" state line
  local -a commands=(
{names}  )
  _arguments -C '(- *)'{{-h,--help}}'[print this help]' '(- *)--version[print the version]' '1: :->command' '*:: :->rest' && return 0
  if [[ $state == command ]]; then
    _describe command commands
    return
  fi
  curcontext="${{curcontext%:*:*}}:parplan-$words[1]:"
  case $words[1] in
{by_command}  esac
  return 1
}}
if [[ $funcstack[1] == _parplan ]]; then
  _parplan "$@"
else
  compdef _parplan parplan
fi
)script",
                     fmt::arg("version", version()), fmt::arg("names", names), fmt::arg("by_command", by_command));
}

// ---- fish ----

std::string fish_quoted(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\'' || c == '\\') out += '\\';
    out += c;
  }
  return "'" + out + "'";
}

std::string fish_offer(const Offer& offer) {
  std::string values = join(offer.values, " ");
  if (offer.list) values = fmt::format("(__fish_complete_list , \"printf '%s\\n' {}\")", values);
  return (offer.values.empty() ? "" : " -a " + fish_quoted(values)) + (offer.files ? " -F" : " -f");
}

std::string fish_script(const std::vector<DeclaredCommand>& commands) {
  std::string text = fmt::format(
      "# Completion of parplan {} for fish: parplan completion fish | source\ncomplete -c parplan -e\ncomplete -c "
      "parplan -f\n",
      version());
  const std::string anywhere = "complete -c parplan -n __fish_use_subcommand";
  text += anywhere + " -l version -d 'print the version'\n" + anywhere + " -s h -l help -d 'print this help'\n";
  for (const DeclaredCommand& command : commands)
    text += fmt::format("{} -a {} -d {}\n", anywhere, command.name, fish_quoted(command.description));
  for (const DeclaredCommand& command : commands) {
    const std::string here = fmt::format("complete -c parplan -n '__fish_seen_subcommand_from {}'", command.name);
    for (const DeclaredOption& argument : command.arguments) text += here + fish_offer(offer(argument)) + '\n';
    for (const DeclaredOption& option : command.options) {
      text += here;
      for (const std::string& name : option.names)
        text += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      if (!option.type.empty()) text += " -r" + fish_offer(offer(option));
      text += " -d " + fish_quoted(option.description) + '\n';
    }
  }
  return text;
}

struct ShellRow {
  Shell shell{};
  const char* name;
  std::string (*script)(const std::vector<DeclaredCommand>&);
};
constexpr std::array shell_rows = {
    ShellRow{Shell::bash, "bash", bash_script},
    ShellRow{Shell::zsh, "zsh", zsh_script},
    ShellRow{Shell::fish, "fish", fish_script},
};

}  // namespace

const char* name(Shell shell) { return shell_rows[index_of(shell)].name; }

Offer offer(const DeclaredOption& option) {
  Offer all;
  for (std::string word : words_of_type(option.type)) {
    const std::string more = ",...";
    const bool list = word.ends_with(more);
    if (list) word.resize(word.size() - more.size());
    const auto kind = std::ranges::find(kinds_of_values, word, &KindOfValue::word);
    if (kind != kinds_of_values.end()) {
      if (kind->names != nullptr) std::ranges::copy_if(kind->names(), std::back_inserter(all.values), is_plain);
      all.files = all.files || kind->files;
      all.list = all.list || list;
    } else if (word.ends_with(".yaml")) {  // written there
      all.files = true;
    } else if (const std::size_t dots = word.find("..");
               dots != std::string::npos && word.find(',') == std::string::npos) {
      for (int value = std::stoi(word); value <= std::stoi(word.substr(dots + 2)); ++value)
        all.values.push_back(std::to_string(value));
    } else if (is_plain(word) && word != "-" &&
               std::ranges::none_of(word, [](char c) { return c >= 'A' && c <= 'Z'; })) {
      all.values.push_back(word);
    }
  }
  return all;
}

std::string completion_script(Shell shell, const std::vector<DeclaredCommand>& commands) {
  return shell_rows[index_of(shell)].script(commands);
}

CommandBody declare_completion(CLI::App& app) {
  const auto wanted = std::make_shared<Shell>();
  std::vector<std::string> names;
  for (const ShellRow& row : shell_rows) names.emplace_back(row.name);
  add_option(
      app, {.names = join(names, "|"), .type = "", .description = "the shell that the script is for", .required = true},
      [wanted, names](const std::string& text) { *wanted = shell_rows[parse_choice("shell", text, names)].shell; });
  return [wanted](Terminal& terminal) {
    terminal.out << completion_script(*wanted, declared_commands());
    return exit_done;
  };
}

}  // namespace parplan
