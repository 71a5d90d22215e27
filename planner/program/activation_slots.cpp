#include "planner/program/activation_slots.h"

#include <algorithm>
#include <array>
#include <deque>
#include <iterator>
#include <map>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"

namespace parplan {

namespace {

std::deque<int> all_free(int count) {
  std::deque<int> free(static_cast<std::size_t>(count));
  std::iota(free.begin(), free.end(), 0);
  return free;
}

// Those for activations that other ranks send: the first stage has none.
int input_buffers(const std::vector<Action>& actions) {
  std::vector<Action> with_input;
  std::ranges::copy_if(actions, std::back_inserter(with_input), [](const Action& action) { return action.stage > 0; });
  return std::min(most_in_flight(with_input) + 1, static_cast<int>(with_input.size() / 2));
}

}  // namespace

Slots play_slots(const Schedule& schedule, int rank, InputSlots inputs) {
  const std::vector<Action>& actions = schedule.ranks[rank];
  int micro_batches = 0;
  for (const Action& action : actions) micro_batches = std::max(micro_batches, action.micro_batch + 1);
  Slots slots{.saved = most_in_flight(actions),
              .inputs = inputs == InputSlots::one_more ? input_buffers(actions) : 0,
              .exchanges = schedule.ranks.size() > 1 ? std::min(schedule.exchanges, micro_batches) : 1,
              .actions = {}};
  std::deque<int> free = all_free(slots.saved), free_inputs = all_free(slots.inputs);
  struct Held {
    int saved = 0;
    int input = 0;
  };
  std::map<std::pair<int, int>, Held> held;  // by stage and micro-batch
  std::array<int, 2> exchanged{};           // per phase
  for (const Action& action : actions) {
    const std::pair key{action.stage, action.micro_batch};
    const bool is_forward = action.phase == Phase::forward;
    if (is_forward) {
      PARPLAN_ASSERT(!free.empty(), fmt::format("no slot of {} is free for {}", slots.saved, write_action(action)));
      Held& taken_by = held[key];
      taken_by.saved = free.front();
      free.pop_front();
      if (action.stage > 0 && slots.inputs > 0) {
        taken_by.input = free_inputs.front();
        free_inputs.pop_front();
      }
    }
    const auto slot = held.find(key);
    PARPLAN_ASSERT(slot != held.end(), fmt::format("{} before its forward", write_action(action)));
    const bool takes_exchange = !is_forward || sends(schedule, action);
    int& taken = exchanged[index_of(action.phase)];
    slots.actions.push_back(
        {.saved = slot->second.saved, .input = slot->second.input, .exchange = taken % slots.exchanges});
    if (takes_exchange) ++taken;
    if (!is_forward) {
      free.push_back(slot->second.saved);
      if (action.stage > 0) free_inputs.push_back(slot->second.input);
      held.erase(slot);
    }
  }
  return slots;
}

}  // namespace parplan
