#include "planner/program/activation_slots.h"

#include <algorithm>
#include <array>
#include <deque>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"

namespace parplan {

namespace {

// Slots of one kind: the one that has been free the longest is taken first.
class FreeSlots {
 public:
  explicit FreeSlots(int count) : free_(static_cast<std::size_t>(count)) { std::iota(free_.begin(), free_.end(), 0); }
  int take(const Action& action) {
    PARPLAN_ASSERT(!free_.empty(), fmt::format("no slot is free for {}", write_action(action)));
    const int slot = free_.front();
    free_.pop_front();
    return slot;
  }
  void free(int slot) { free_.push_back(slot); }

 private:
  std::deque<int> free_;
};

// The largest number of micro-batches of the stages `split` that are between their forward and the
// end of their backward, or between the two parts of it.
enum class Part { both, second };
int most_between(const std::vector<Action>& actions, const std::set<int>& split, Part part) {
  const Phase begins = part == Part::both ? Phase::forward : Phase::backward_inputs;
  int held = 0, most = 0;
  for (const Action& action : actions) {
    if (!split.contains(action.stage)) continue;
    held += action.phase == begins;
    most = std::max(most, held);
    held -= action.phase == Phase::backward_weights || (part == Part::both && action.phase == Phase::backward);
  }
  return most;
}

}  // namespace

int input_buffers(const std::vector<Action>& actions) {
  std::vector<Action> with_input;
  std::ranges::copy_if(actions, std::back_inserter(with_input), [](const Action& action) { return action.stage > 0; });
  const auto arriving = std::ranges::count(with_input, Phase::forward, &Action::phase);
  return std::min(most_in_flight(with_input) + 1, static_cast<int>(arriving));
}

Slots play_slots(const Schedule& schedule, int rank, InputSlots inputs) {
  const std::vector<Action>& actions = schedule.ranks[rank];
  const int last_stage = schedule.stages() - 1;
  const bool has_head =
      schedule.rank_of_stage[last_stage] == rank && std::ranges::count(schedule.rank_of_stage, rank) > 1;
  int micro_batches = 0;
  std::set<int> split;  // stages
  for (const Action& action : actions) {
    micro_batches = std::max(micro_batches, action.micro_batch + 1);
    if (action.phase == Phase::backward_inputs) split.insert(action.stage);
  }
  Slots slots{.saved = most_in_flight(actions),
              .head = has_head ? most_in_flight_of_last_stage(schedule) : 0,
              .inputs = inputs == InputSlots::one_more ? input_buffers(actions) : 0,
              .exchanges = schedule.ranks.size() > 1 ? std::min(schedule.exchanges, micro_batches) : 1,
              .for_weights = most_between(actions, split, Part::both),
              .left = most_between(actions, split, Part::second),
              .actions = {}};
  FreeSlots saved(slots.saved), heads(slots.head), arriving(slots.inputs), for_weights(slots.for_weights),
      left(slots.left);
  std::map<std::pair<int, int>, ActionSlots> held;  // by stage and micro-batch
  std::array<int, 2> exchanged{};                   // per flow
  for (const Action& action : actions) {
    const std::pair key{action.stage, action.micro_batch};
    const bool is_forward = action.phase == Phase::forward, has_parts = split.contains(action.stage);
    const bool arrives = action.stage > 0 && slots.inputs > 0, takes_head = has_head && action.stage == last_stage;
    if (is_forward) {
      ActionSlots& taken = held[key];
      taken.saved = saved.take(action);
      if (takes_head) taken.head = heads.take(action);
      if (arrives) taken.input = arriving.take(action);
      if (has_parts) taken.for_weights = for_weights.take(action);
    }
    const auto slot = held.find(key);
    PARPLAN_ASSERT(slot != held.end(), fmt::format("{} before its forward", write_action(action)));
    if (action.phase == Phase::backward_inputs) slot->second.left = left.take(action);
    ActionSlots& of_action = slots.actions.emplace_back(slot->second);
    if (const std::optional<Flow> flow = flow_of(action.phase); flow) {
      int& taken = exchanged[index_of(*flow)];
      of_action.exchange = taken % slots.exchanges;
      if (!is_forward || sends(schedule, action)) ++taken;
      if (!is_forward) saved.free(slot->second.saved);
      if (!is_forward && takes_head) heads.free(slot->second.head);
      if (!is_forward && arrives) arriving.free(slot->second.input);
    }
    if (action.phase == Phase::backward_weights) left.free(slot->second.left);
    if (action.phase != Phase::backward && action.phase != Phase::backward_weights) continue;
    if (has_parts) for_weights.free(slot->second.for_weights);
    held.erase(slot);
  }
  return slots;
}

}  // namespace parplan
