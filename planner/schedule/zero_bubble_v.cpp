#include "planner/schedule/zero_bubble_v.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/schedule/v_shaped.h"

namespace parplan {
namespace {

std::vector<Action> actions_of(int rank, const PipelineShape& shape) {
  constexpr auto down = VRankActions::Way::down, back = VRankActions::Way::back;
  const int ranks = shape.ranks, micro_batches = std::max(shape.micro_batches, 2 * ranks - 1);
  VRankActions run(rank, ranks);
  const auto run_backward = [&](VRankActions::Way way) {
    run.backward_inputs(way);
    run.backward_weights(way);
  };
  // Forwards until the first activation comes back, then both ways by turns.
  for (int i = 0; i < 2 * (ranks - rank) - 1; ++i) run.forward(down);
  for (int i = 0; i < rank; ++i) {
    run.forward(back);
    run.forward(down);
  }
  for (int i = 0; i < ranks - rank; ++i) {
    run.forward(back);
    run_backward(back);
  }
  while (run.forwards(back) < micro_batches) {
    if (run.forwards(down) < micro_batches) run.forward(down);
    run_backward(down);
    run.forward(back);
    run_backward(back);
  }
  // Weight gradients wait until the ranks before have the last gradients that they wait for.
  for (int i = 0; i < rank; ++i) {
    run.backward_inputs(down);
    run.backward_inputs(back);
  }
  for (int i = 0; i < ranks - rank; ++i) run_backward(down);
  while (run.weights(back) < micro_batches) run.backward_weights(back);
  while (run.weights(down) < micro_batches) run.backward_weights(down);
  std::erase_if(run.actions, [&](const Action& action) { return action.micro_batch >= shape.micro_batches; });
  return std::move(run.actions);
}

}  // namespace

Schedule zero_bubble_v_actions(const PipelineShape& shape) {
  PARPLAN_ASSERT(
      shape.ranks >= 2 && shape.stages == 2 * shape.ranks && shape.micro_batches >= 1,
      fmt::format("{} stages on {} ranks, {} micro-batches", shape.stages, shape.ranks, shape.micro_batches));
  std::vector<std::vector<Action>> ranks;
  for (int rank = 0; rank < shape.ranks; ++rank) ranks.push_back(actions_of(rank, shape));
  return v_shaped(std::move(ranks));
}

// All forwards on the way down, and those of the way back before the first gradient, where fewer
// micro-batches than fill the pipeline make a rank run them first.
int zero_bubble_v_in_flight(int rank, const PipelineShape& shape) {
  const int micro_batches = shape.micro_batches;
  return std::min(2 * shape.ranks, micro_batches + std::min(rank + 1, micro_batches));
}

// Its gradients follow its forward at once.
int zero_bubble_v_last_stage_in_flight(const PipelineShape& /*shape*/) {
  return 1;
}

// A rank's list for more micro-batches than fill the pipeline goes on as it began.
SlotsForWeights zero_bubble_v_for_weights(int rank, const PipelineShape& shape) {
  PipelineShape filled = shape;
  filled.micro_batches = std::min(shape.micro_batches, 4 * shape.ranks);
  return slots_for_weights(actions_of(rank, filled));
}

}  // namespace parplan
