#include "planner/plan/schedule.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/base/text.h"

namespace parplan {
namespace {

std::optional<int> parse_number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

// Faults that one stage shows by itself.
std::optional<std::string> find_fault_of_stage(const std::vector<Action>& actions, int stage, int micro_batches) {
  const auto count = static_cast<std::size_t>(micro_batches);
  std::vector<bool> forward(count), backward(count);
  int last_backward = -1;
  for (const Action& action : actions) {
    const std::string text = write_action(action);
    if (action.stage != stage)
      return fmt::format("stage {} lists {}, an action of stage {}", stage, text, action.stage);
    if (action.micro_batch < 0 || action.micro_batch >= micro_batches)
      return fmt::format("stage {} lists {}, and there are {} micro-batches, numbered from 0", stage, text,
                         micro_batches);
    const auto m = static_cast<std::size_t>(action.micro_batch);
    auto& done = action.phase == Phase::forward ? forward : backward;
    if (done[m]) return fmt::format("stage {} runs {} twice", stage, text);
    done[m] = true;
    if (action.phase == Phase::forward) continue;
    if (!forward[m])
      return fmt::format("stage {} runs {} before {}", stage, text,
                         write_action({stage, Phase::forward, action.micro_batch}));
    if (action.micro_batch < last_backward)
      return fmt::format("stage {} runs {} after {}; backwards must run in ascending order of micro-batches", stage,
                         text, write_action({stage, Phase::backward, last_backward}));
    last_backward = action.micro_batch;
  }
  for (int m = 0; m < micro_batches; ++m)
    for (Phase phase : {Phase::forward, Phase::backward})
      if (!(phase == Phase::forward ? forward : backward)[m])
        return fmt::format("stage {} never runs {}", stage, write_action({stage, phase, m}));
  return std::nullopt;
}

std::vector<int> forwards_of(const std::vector<Action>& actions) {
  std::vector<int> order;
  for (const Action& action : actions)
    if (action.phase == Phase::forward) order.push_back(action.micro_batch);
  return order;
}

}  // namespace

std::string write_action(const Action& action) {
  return fmt::format("{}{}{}", action.stage, action.phase == Phase::forward ? 'F' : 'B', action.micro_batch);
}

Action parse_action(const std::string& text) {
  const std::size_t letter = text.find_first_not_of("0123456789");
  if (letter != std::string::npos && (text[letter] == 'F' || text[letter] == 'B')) {
    const std::string_view view = text;
    const auto stage = parse_number(view.substr(0, letter));
    const auto micro_batch = parse_number(view.substr(letter + 1));
    if (stage && micro_batch)
      return {*stage, text[letter] == 'F' ? Phase::forward : Phase::backward, *micro_batch};
  }
  throw ConfigError(fmt::format(
      "expected an action: a stage, F (forward) or B (backward), and a micro-batch, such as 2F0; found '{}'", text));
}

std::optional<std::string> find_fault(const Schedule& schedule, int micro_batches) {
  if (schedule.empty()) return "the schedule has no stages";
  if (micro_batches < 1)
    return fmt::format("the schedule needs at least 1 micro-batch, and there are {}", micro_batches);
  const int stages = static_cast<int>(schedule.size());
  const auto actions_of = [&](int stage) -> const std::vector<Action>& { return schedule[stage]; };
  for (int s = 0; s < stages; ++s)
    if (auto fault = find_fault_of_stage(actions_of(s), s, micro_batches)) return fault;

  // Neighbours exchange activations over one in-order channel, so both must take micro-batches in
  // one order; gradients do because backwards ascend everywhere.
  for (int s = 0; s + 1 < stages; ++s) {
    const std::vector<int> sent = forwards_of(actions_of(s)), received = forwards_of(actions_of(s + 1));
    const auto [a, b] = std::mismatch(sent.begin(), sent.end(), received.begin());
    if (a != sent.end())
      return fmt::format(
          "stage {} sends {} where stage {} receives for {}; neighbours must run their forwards in one order", s,
          write_action({s, Phase::forward, *a}), s + 1, write_action({s + 1, Phase::forward, *b}));
  }

  // Dry run: every stage advances as far as what it waits for has been done.
  const auto count = static_cast<std::size_t>(micro_batches);
  std::vector<std::vector<bool>> forward(schedule.size(), std::vector<bool>(count));
  std::vector<std::vector<bool>> backward = forward;
  std::vector<std::size_t> next(schedule.size());
  const auto awaited = [&](const Action& action) -> std::optional<Action> {
    const int neighbour = action.stage + (action.phase == Phase::forward ? -1 : 1);
    if (neighbour < 0 || neighbour >= stages) return std::nullopt;
    const auto& done = action.phase == Phase::forward ? forward : backward;
    if (done[neighbour][action.micro_batch]) return std::nullopt;
    return Action{neighbour, action.phase, action.micro_batch};
  };
  for (bool advanced = true; advanced;) {
    advanced = false;
    for (std::size_t s = 0; s < schedule.size(); ++s)
      while (next[s] < schedule[s].size() && !awaited(schedule[s][next[s]])) {
        const Action& action = schedule[s][next[s]++];
        (action.phase == Phase::forward ? forward : backward)[s][action.micro_batch] = true;
        advanced = true;
      }
  }
  std::vector<std::string> waiting;
  for (std::size_t s = 0; s < schedule.size(); ++s)
    if (next[s] < schedule[s].size()) {
      const Action& action = schedule[s][next[s]];
      waiting.push_back(fmt::format("{} waits for {}", write_action(action), write_action(*awaited(action))));
    }
  if (waiting.empty()) return std::nullopt;
  return fmt::format("the schedule cannot run to its end: {}", join(waiting));
}

int most_in_flight(const std::vector<Action>& stage) {
  int held = 0, most = 0;
  for (const Action& action : stage) {
    held += action.phase == Phase::forward ? 1 : -1;
    most = std::max(most, held);
  }
  return most;
}

}  // namespace parplan
