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

// Whether a stage's input lies in a buffer of its own.
bool has_input_apart(const Schedule& schedule, int stage, InputSlots inputs) {
  return stage > 0 && (inputs == InputSlots::one_more || hands_over(schedule, {stage - 1, Phase::forward, 0}));
}

}  // namespace

int input_buffers(const Schedule& schedule, int rank, InputSlots inputs) {
  int held = 0, most = 0, all = 0;
  for (const Action& action : schedule.ranks[rank]) {
    const std::optional<Flow> flow = flow_of(action.phase);
    if (!flow) continue;
    const bool is_forward = *flow == Flow::forward, is_apart = has_input_apart(schedule, action.stage, inputs);
    // What the stage before handed over is held since its forward.
    if (is_forward) {
      held += is_apart && sends(schedule, {action.stage - 1, Phase::forward, 0});
      held += hands_over(schedule, action);
      all += is_apart;
    }
    most = std::max(most, held);
    if (!is_forward && is_apart) --held;
  }
  return inputs == InputSlots::one_more ? std::min(most + 1, all) : most;
}

Slots play_slots(const Schedule& schedule, int rank, InputSlots inputs, int first_back) {
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
  const SlotsForWeights weights = slots_for_weights(actions);
  const int ranks = static_cast<int>(schedule.ranks.size());
  const int exchanges = ranks > 1 ? std::min(schedule.exchanges, micro_batches) : 1;
  const ExchangeWays ways = exchange_ways(is_v(schedule), rank, ranks, first_back);
  Slots slots{.saved = most_in_flight(actions),
              .head = has_head ? most_in_flight_of_last_stage(schedule) : 0,
              .inputs = input_buffers(schedule, rank, inputs),
              .outputs = exchanges * ways.outputs,
              .gradients = exchanges * ways.gradients,
              .for_weights = weights.saved,
              .left = weights.left,
              .actions = {}};
  FreeSlots saved(slots.saved), heads(slots.head), arriving(slots.inputs), for_weights(slots.for_weights),
      left(slots.left);
  std::map<std::pair<int, int>, ActionSlots> held;  // by stage and micro-batch
  // Handed over to a stage for a micro-batch: where its input is, and its gradient.
  std::map<std::pair<int, int>, int> inputs_there, gradients_there;
  std::array<std::array<int, 2>, 2> exchanged{};  // per flow and way
  for (const Action& action : actions) {
    const std::pair key{action.stage, action.micro_batch};
    const bool is_forward = action.phase == Phase::forward, has_parts = split.contains(action.stage);
    const bool is_apart = has_input_apart(schedule, action.stage, inputs),
               takes_head = has_head && action.stage == last_stage;
    if (is_forward) {
      ActionSlots& taken = held[key];
      taken.saved = saved.take(action);
      if (takes_head) taken.head = heads.take(action);
      if (const auto there = inputs_there.find(key); there != inputs_there.end()) {
        taken.input = there->second;
        inputs_there.erase(there);
      } else if (is_apart) {
        taken.input = arriving.take(action);
      }
      if (hands_over(schedule, action))
        taken.handed_over = inputs_there[{action.stage + 1, action.micro_batch}] = arriving.take(action);
      if (has_parts) taken.for_weights = for_weights.take(action);
    }
    const auto slot = held.find(key);
    PARPLAN_ASSERT(slot != held.end(), fmt::format("{} before its forward", write_action(action)));
    if (action.phase == Phase::backward_inputs) slot->second.left = left.take(action);
    ActionSlots& of_action = slots.actions.emplace_back(slot->second);
    if (const std::optional<Flow> flow = flow_of(action.phase); flow) {
      const int way =
          is_forward ? output_way(schedule, action.stage) : gradient_way(schedule, action.stage, first_back);
      const bool is_empty = !is_forward && action.stage < first_back;
      int& taken = exchanged[index_of(*flow)][static_cast<std::size_t>(way)];
      of_action.exchange = way * exchanges + taken % exchanges;
      if (const auto there = gradients_there.find(key); !is_forward && there != gradients_there.end()) {
        of_action.exchange = there->second;
        gradients_there.erase(there);
      } else if (!is_empty && (!is_forward || sends(schedule, action))) {
        ++taken;
      }
      if (!is_forward && action.stage > first_back && hands_over(schedule, action))
        gradients_there[{action.stage - 1, action.micro_batch}] = of_action.exchange;
      if (!is_forward) saved.free(slot->second.saved);
      if (!is_forward && takes_head) heads.free(slot->second.head);
      if (!is_forward && is_apart) arriving.free(slot->second.input);
    }
    if (action.phase == Phase::backward_weights) left.free(slot->second.left);
    if (action.phase != Phase::backward && action.phase != Phase::backward_weights) continue;
    if (has_parts) for_weights.free(slot->second.for_weights);
    held.erase(slot);
  }
  return slots;
}

}  // namespace parplan
