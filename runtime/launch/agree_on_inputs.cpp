#include "runtime/launch/agree_on_inputs.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/base/text.h"
#include "runtime/launch/fingerprint.h"

namespace parplan {
namespace {

// The text of a refusal, and the processes that have it.
struct Refusal {
  std::string text;
  std::vector<int> processes;
};

// "processes 1, 3", or "rank 1".
std::string named(std::string_view one, std::string_view several, const std::vector<int>& numbers) {
  constexpr std::size_t shown = 8;
  std::string names;
  for (std::size_t i = 0; i < std::min(numbers.size(), shown); ++i)
    names += fmt::format("{}{}", i == 0 ? "" : ", ", numbers[i]);
  if (numbers.size() > shown) names += fmt::format(" and {} more", numbers.size() - shown);
  return fmt::format("{} {}", numbers.size() == 1 ? one : several, names);
}
std::string named(const std::vector<int>& processes) { return named("process", "processes", processes); }

// A fact takes a line, "name<tab>value". Other control characters go, too: the text is printed.
std::string line_of(const Fact& fact) {
  std::string line = fact.name + '\t' + fact.value;
  for (std::size_t i = 0; i < line.size(); ++i)
    if (i != fact.name.size() && (static_cast<unsigned char>(line[i]) < 0x20 || line[i] == 0x7f)) line[i] = '?';
  return line + '\n';
}

std::vector<Fact> facts_in(std::string_view text) {
  std::vector<Fact> facts;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    const std::size_t tab = line.find('\t');
    if (tab == std::string_view::npos) continue;
    facts.push_back({.name = printable(line.substr(0, tab)), .value = printable(line.substr(tab + 1))});
  }
  return facts;
}

// A value of a fact, and the processes that have it.
struct Holding {
  std::string value;
  std::vector<int> processes;
};

// "rank 1 has learning rate 0.001, rank 0 has 0.0003"; process 0 comes last. Empty where all have
// the same.
std::string difference(const std::string& name, const std::vector<std::vector<Fact>>& everyone) {
  std::vector<Holding> holdings;  // that of process 0 first
  for (std::size_t process = 0; process < everyone.size(); ++process) {
    const auto fact = std::ranges::find(everyone[process], name, &Fact::name);
    const std::string value = fact == everyone[process].end() ? "no value" : fact->value;
    auto holding = std::ranges::find(holdings, value, &Holding::value);
    if (holding == holdings.end()) holding = holdings.insert(holdings.end(), Holding{.value = value, .processes = {}});
    holding->processes.push_back(static_cast<int>(process));
  }
  if (holdings.size() == 1) return "";
  std::rotate(holdings.begin(), holdings.begin() + 1, holdings.end());
  std::string text;
  for (const Holding& holding : holdings)
    text += fmt::format("{}{} {} {}{}", text.empty() ? "" : ", ", named("rank", "ranks", holding.processes),
                        holding.processes.size() == 1 ? "has" : "have", text.empty() ? name + " " : "", holding.value);
  return text;
}

std::string differences(const std::vector<std::vector<Fact>>& everyone) {
  constexpr std::size_t shown = 6;
  std::vector<std::string> names;
  for (const std::vector<Fact>& facts : everyone)
    for (const Fact& fact : facts)
      if (std::ranges::find(names, fact.name) == names.end()) names.push_back(fact.name);
  std::vector<std::string> texts;
  for (const std::string& name : names)
    if (const std::string text = difference(name, everyone); !text.empty()) texts.push_back(text);
  const std::size_t more = texts.size() - std::min(texts.size(), shown);
  texts.resize(texts.size() - more);
  if (more > 0) texts.push_back(fmt::format("and {} more differ", more));
  return join(texts, "; ");
}

}  // namespace

void agree(Rendezvous& rendezvous, const std::function<void()>& check) {
  std::optional<SaidForAll> own;
  std::string text;
  try {
    check();
  } catch (const ConfigError& error) {
    own.emplace(error);
    text = error.what();
  }
  std::vector<Refusal> refusals;  // by the first process that has each
  const auto texts = rendezvous.all_gather(std::as_bytes(std::span<const char>(text)));
  for (std::size_t process = 0; process < texts.size(); ++process) {
    if (texts[process].empty()) continue;
    const std::string one = printable(text_of(texts[process]));
    auto refusal = std::ranges::find(refusals, one, &Refusal::text);
    if (refusal == refusals.end()) refusal = refusals.insert(refusals.end(), Refusal{.text = one, .processes = {}});
    refusal->processes.push_back(static_cast<int>(process));
  }
  if (refusals.empty()) return;
  if (rendezvous.process() != 0) throw SaidElsewhere(refusals.front().text);
  if (refusals.front().processes.size() == texts.size()) throw SaidForAll(*own);
  std::string all;
  for (const Refusal& refusal : refusals) {
    const std::string_view prefix = "error: ";
    const std::string_view said = refusal.text;
    all += fmt::format("{}{} of {}: {}", all.empty() ? "" : "\n", named(refusal.processes), texts.size(),
                       said.substr(said.starts_with(prefix) ? prefix.size() : 0));
  }
  throw SaidForAll(ConfigError(all));
}

void agree_on(Rendezvous& rendezvous, std::span<const Fact> facts) {
  if (rendezvous.processes() == 1) return;
  std::string text;
  for (const Fact& fact : facts) text += line_of(fact);
  const std::uint64_t own = fingerprint(text);
  const auto same = [&](const std::vector<std::byte>& bytes) {
    return bytes.size() == sizeof own && std::memcmp(bytes.data(), &own, sizeof own) == 0;
  };
  // All processes see the same list, with one fingerprint or with several.
  if (std::ranges::all_of(rendezvous.all_gather(std::as_bytes(std::span(&own, 1))), same)) return;
  std::vector<std::vector<Fact>> everyone;
  for (const std::vector<std::byte>& bytes : rendezvous.all_gather(std::as_bytes(std::span<const char>(text))))
    everyone.push_back(facts_in(text_of(bytes)));
  const std::string message = fmt::format(
      "the processes of this job differ: {}; start all of them with the same plan, data, options and build of parplan",
      differences(everyone));
  if (rendezvous.process() != 0) throw SaidElsewhere(message);
  throw SaidForAll(ConfigError(message));
}

}  // namespace parplan
