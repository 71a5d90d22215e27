#include "planner/program/activation_slots.h"

#include <array>
#include <deque>
#include <map>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"

namespace parplan {

Slots play_slots(const Schedule& schedule, int rank) {
  const std::vector<Action>& actions = schedule.ranks[rank];
  int micro_batches = 0;
  for (const Action& action : actions) micro_batches = std::max(micro_batches, action.micro_batch + 1);
  Slots slots{.saved = most_in_flight(actions),
              .exchanges = exchange_buffers(static_cast<int>(schedule.ranks.size()), micro_batches),
              .actions = {}};
  std::deque<int> free(static_cast<std::size_t>(slots.saved));
  std::iota(free.begin(), free.end(), 0);
  std::map<std::pair<int, int>, int> held;  // by stage and micro-batch
  std::array<int, 2> exchanged{};           // per phase
  for (const Action& action : actions) {
    const std::pair key{action.stage, action.micro_batch};
    const bool is_forward = action.phase == Phase::forward;
    if (is_forward) {
      PARPLAN_ASSERT(!free.empty(), fmt::format("no slot of {} is free for {}", slots.saved, write_action(action)));
      held[key] = free.front();
      free.pop_front();
    }
    const auto slot = held.find(key);
    PARPLAN_ASSERT(slot != held.end(), fmt::format("{} before its forward", write_action(action)));
    const bool takes_exchange = !is_forward || sends(schedule, action);
    int& taken = exchanged[index_of(action.phase)];
    slots.actions.push_back({.saved = slot->second, .exchange = taken % slots.exchanges});
    if (takes_exchange) ++taken;
    if (!is_forward) {
      free.push_back(slot->second);
      held.erase(slot);
    }
  }
  return slots;
}

}  // namespace parplan
