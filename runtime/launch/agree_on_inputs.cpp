#include "runtime/launch/agree_on_inputs.h"

#include <algorithm>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace parplan {
namespace {

// The text of a refusal, and the processes that have it.
struct Refusal {
  std::string text;
  std::vector<int> processes;
};

std::string named(const std::vector<int>& processes) {
  constexpr std::size_t shown = 8;
  std::string names;
  for (std::size_t i = 0; i < std::min(processes.size(), shown); ++i)
    names += fmt::format("{}{}", i == 0 ? "" : ", ", processes[i]);
  if (processes.size() > shown) names += fmt::format(" and {} more", processes.size() - shown);
  return fmt::format("process{} {}", processes.size() == 1 ? "" : "es", names);
}

}  // namespace

void agree(Rendezvous& rendezvous, const std::function<void()>& check) {
  std::exception_ptr own;
  std::string text;
  try {
    check();
  } catch (const ConfigError& error) {
    own = std::current_exception();
    text = error.what();
  }
  std::vector<Refusal> refusals;  // by the first process that has each
  const auto texts = rendezvous.all_gather(std::as_bytes(std::span<const char>(text)));
  for (std::size_t process = 0; process < texts.size(); ++process) {
    if (texts[process].empty()) continue;
    const std::string one = text_of(texts[process]);
    auto refusal = std::ranges::find(refusals, one, &Refusal::text);
    if (refusal == refusals.end()) refusal = refusals.insert(refusals.end(), Refusal{.text = one, .processes = {}});
    refusal->processes.push_back(static_cast<int>(process));
  }
  if (refusals.empty()) return;
  if (rendezvous.process() != 0) throw SaidElsewhere(refusals.front().text);
  if (refusals.front().processes.size() == texts.size()) std::rethrow_exception(own);
  std::string all;
  for (const Refusal& refusal : refusals) {
    const std::string_view prefix = "error: ";
    const std::string_view said = refusal.text;
    all += fmt::format("{}{} of {}: {}", all.empty() ? "" : "\n", named(refusal.processes), texts.size(),
                       said.substr(said.starts_with(prefix) ? prefix.size() : 0));
  }
  throw ConfigError(all);
}

}  // namespace parplan
