#include "cli/command_line.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <iostream>
#include <optional>
#include <set>
#include <streambuf>

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ostream.h>

#include "cli/commands.h"
#include "cli/declared_options.h"
#include "cli/report_error.h"
#include "cli/version.h"
#include "planner/base/error.h"
#include "planner/base/text.h"

namespace parplan {
namespace {

constexpr std::array command_rows = {
    Command{"suggest", "The best plans for a model on a cluster, ranked", declare_suggest},
    Command{"simulate", "One given layout, or a plan, simulated", declare_simulate},
    Command{"run", "Execute a plan and put what it took beside what was promised", declare_run},
    Command{"explain", "Why this plan: where time and memory go, what it beats, what binds", declare_explain},
    Command{"sweep",
            "Capacity: the best plans over cluster sizes, devices, batches and sequences, with time, cost and energy",
            declare_sweep},
    Command{"measure", "What the kernels of this machine take, as a device and a cluster to plan with",
            declare_measure},
    Command{"topology", "Show a cluster as parplan sees it", declare_topology},
    Command{"validate", "Published training runs beside what parplan predicts for them", declare_validate},
    Command{"completion", "Let the shell complete commands, options and names", declare_completion},
};

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  return names;
}

// "-" and "-3" are values, "--dp", "--dp=2" and "-o" are options.
bool looks_like_option(const std::string& word) {
  return word.size() > 1 && word[0] == '-' && !(word[1] >= '0' && word[1] <= '9') && word[1] != '.';
}
std::string option_of(const std::string& word) {
  return word.starts_with("--") ? word.substr(0, word.find('=')) : word.substr(0, 2);
}

// Reports errors in the words of a command before CLI11 reads them, in parplan's own terms; and
// gives options whose value is optional their value "-", so that nothing is guessed.
std::vector<std::string> checked(const CLI::App& app, const std::vector<std::string>& words) {
  const std::vector<std::string> names = option_names(app);
  std::vector<const CLI::Option*> positionals;
  for (const CLI::Option* option : app.get_options())
    if (option->get_positional()) positionals.push_back(option);
  std::vector<std::string> result;
  std::set<const CLI::Option*> seen;
  std::size_t found_positionals = 0;
  const auto is_value = [&](std::size_t i) { return i < words.size() && !looks_like_option(words[i]); };
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (!looks_like_option(word)) {
      if (found_positionals == positionals.size())
        throw ConfigError(fmt::format(
            "unexpected argument '{}'; {} takes {}", word, app.get_name(),
            positionals.empty() ? "options only" : fmt::format("one {}", positionals.front()->get_name(true))));
      if (word.empty())
        throw ConfigError(fmt::format("the {0} is empty; {1}", positionals[found_positionals]->get_name(true),
                                      positionals[found_positionals]->get_required()
                                          ? "give " + positionals[found_positionals]->get_description()
                                          : "name one, or leave it out"));
      ++found_positionals;
      result.push_back(word);
      continue;
    }
    const std::string name = option_of(word);
    const CLI::Option* option = app.get_option_no_throw(name);
    if (option == nullptr)
      throw ConfigError(fmt::format("unknown option '{}'; see parplan {} --help{}", name, app.get_name(),
                                    name.starts_with("--") ? did_you_mean(name, names) : ""));
    if (!seen.insert(option).second) throw ConfigError(fmt::format("{} is given twice; give it once", name));
    if (option->get_items_expected_max() == 0) {  // a flag
      if (word != name) throw ConfigError(fmt::format("{0} takes no value, found '{1}'; write {0} alone", name, word));
      result.push_back(word);
      continue;
    }
    const bool has_value = word != name;
    if (has_value ? word == name + "=" : is_value(i + 1) && words[i + 1].empty())
      throw ConfigError(fmt::format("{0} needs a value ({1}), found an empty one; give one, or leave {0} out", name,
                                    option->get_type_name()));
    if (has_value) {
      result.push_back(word);
    } else if (is_value(i + 1)) {
      result.push_back(word);
      result.push_back(words[++i]);
    } else if (option->get_items_expected_min() == 0) {
      result.push_back(name + "=-");
    } else {
      throw ConfigError(fmt::format("{} needs a value ({})", name, option->get_type_name()));
    }
  }
  const bool asks_for_help =
      std::ranges::any_of(result, [](const std::string& word) { return word == "--help" || word == "-h"; });
  if (asks_for_help) return {"--help"};
  for (std::size_t p = found_positionals; p < positionals.size(); ++p)
    if (positionals[p]->get_required())
      throw ConfigError(fmt::format("{} needs a {}: {}", app.get_name(), positionals[p]->get_name(true),
                                    positionals[p]->get_description()));
  return result;
}

// Passes on what is written to a stream, and records why that first failed: later nobody can tell,
// since errno has been overwritten by then.
class WatchedBuffer : public std::streambuf {
 public:
  explicit WatchedBuffer(std::ostream& stream) : stream_(stream), passed_to_(stream.rdbuf(this)) {}
  ~WatchedBuffer() override { stream_.rdbuf(passed_to_); }
  WatchedBuffer(const WatchedBuffer&) = delete;
  WatchedBuffer& operator=(const WatchedBuffer&) = delete;

  // The system's reason if anything that was written did not arrive.
  std::optional<std::string> failure() {
    stream_.flush();
    if (stream_.good() && !failed_) return std::nullopt;
    return error_ == 0 ? "it takes no more" : std::strerror(error_);
  }

 protected:
  int_type overflow(int_type c) override {
    if (traits_type::eq_int_type(c, traits_type::eof())) return traits_type::not_eof(c);
    errno = 0;
    return note(passed_to_->sputc(traits_type::to_char_type(c)),
                [](int_type put) { return !traits_type::eq_int_type(put, traits_type::eof()); });
  }
  std::streamsize xsputn(const char* text, std::streamsize size) override {
    errno = 0;
    return note(passed_to_->sputn(text, size), [&](std::streamsize written) { return written == size; });
  }
  int sync() override {
    errno = 0;
    return note(passed_to_->pubsync(), [](int result) { return result == 0; });
  }

 private:
  template <class Result, class Succeeded>
  Result note(Result result, Succeeded succeeded) {
    if (!succeeded(result) && !failed_) {
      failed_ = true;
      error_ = errno;
    }
    return result;
  }

  std::ostream& stream_;
  std::streambuf* passed_to_;
  bool failed_ = false;
  int error_ = 0;
};

int carry_out(const std::vector<std::string>& arguments, Terminal& terminal) {
  if (arguments.empty()) {
    terminal.err << help(declared_commands());
    return exit_bad_input;
  }
  const std::string& first = arguments.front();
  if (first == "--version") {
    fmt::print(terminal.out, "parplan {}\n", version());
    return exit_done;
  }
  if (first == "--help" || first == "-h") {
    terminal.out << help(declared_commands());
    return exit_done;
  }
  std::vector<std::string> names;
  for (const Command& command : command_rows) names.emplace_back(command.name);
  const auto found = std::ranges::find(command_rows, first, &Command::name);
  if (found == command_rows.end()) {
    if (looks_like_option(first))
      throw ConfigError(fmt::format("unknown option '{}'; expected a command: {}", first, join(names)));
    throw ConfigError(
        fmt::format("unknown command '{}'; allowed: {}{}", first, join(names), did_you_mean(first, names)));
  }
  CLI::App app{std::string(found->description), std::string(found->name)};
  const CommandBody body = found->declare(app);
  std::vector<std::string> words = checked(app, {arguments.begin() + 1, arguments.end()});
  std::ranges::reverse(words);  // the order that CLI11 wants
  try {
    app.parse(words);
  } catch (const CLI::CallForHelp&) {
    terminal.out << help(declared(app));
    return exit_done;
  } catch (const CLI::ParseError& error) {
    throw ConfigError(error.what());
  }
  return body(terminal);
}

}  // namespace

std::span<const Command> commands() { return command_rows; }

int run_command_line(std::vector<std::string> arguments, std::ostream& out, std::ostream& err) {
  Terminal terminal{.out = out, .err = err, .watched = &err == &std::cerr && isatty(STDERR_FILENO) != 0};
  WatchedBuffer watched(out);
  try {
    const int code = carry_out(arguments, terminal);
    if (const auto reason = watched.failure()) {
      err << "error: cannot write to standard output: " << *reason << '\n';
      return code == exit_done ? exit_failed : code;
    }
    return code;
  } catch (const std::exception&) {
    return report_error(err);
  }
}

}  // namespace parplan
