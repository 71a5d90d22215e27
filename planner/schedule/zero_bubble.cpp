#include "planner/schedule/zero_bubble.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

Schedule zero_bubble_h1_actions(const PipelineShape& shape) {
  const int stages = shape.stages, micro_batches = shape.micro_batches;
  PARPLAN_ASSERT(stages >= 1 && micro_batches >= 1,
                 fmt::format("{} stages, {} micro-batches", stages, micro_batches));
  std::vector<std::vector<Action>> ranks(static_cast<std::size_t>(stages));
  for (int s = 0; s < stages; ++s) {
    std::vector<Action>& actions = ranks[s];
    const int warm_up = std::min(stages - 1 - s, micro_batches);
    for (int m = 0; m < warm_up; ++m) actions.push_back({s, Phase::forward, m});
    for (int m = 0; m < micro_batches; ++m) {
      if (warm_up + m < micro_batches) actions.push_back({s, Phase::forward, warm_up + m});
      if (!runs_backward_in_parts(ScheduleKind::zero_bubble_h1, s)) {
        actions.push_back({s, Phase::backward, m});
        continue;
      }
      actions.push_back({s, Phase::backward_inputs, m});
      if (m >= s) actions.push_back({s, Phase::backward_weights, m - s});
    }
    for (int m = std::max(micro_batches - s, 0); m < micro_batches && s > 0; ++m)
      actions.push_back({s, Phase::backward_weights, m});
  }
  return one_stage_a_rank(std::move(ranks));
}

// Some stage has at least the mean of the work, and each does its own. The time of a micro-batch on
// its way through all stages is no bound: weight gradients are not on it.
Seconds zero_bubble_h1_least_time(Seconds /*total*/, Seconds computing, Seconds slowest, const PipelineShape& shape) {
  return shape.micro_batches * std::max(computing / shape.ranks, slowest);
}

// Stage s begins after s transfers: on average over the stages, (p - 1) / 2.
Seconds least_zero_bubble_h1_time(Seconds all, Seconds transfer, const PipelineShape& shape) {
  return (shape.micro_batches * (all / shape.ranks) + 0.5 * (shape.ranks - 1) * transfer) * (1 - 1e-9);
}

int zero_bubble_h1_in_flight(int rank, const PipelineShape& shape) {
  return std::min(shape.ranks - rank, shape.micro_batches);
}

SlotsForWeights zero_bubble_h1_for_weights(int rank, const PipelineShape& shape) {
  if (!runs_backward_in_parts(ScheduleKind::zero_bubble_h1, rank)) return {};
  return {.saved = std::min(shape.ranks, shape.micro_batches), .left = std::min(rank + 1, shape.micro_batches)};
}

}  // namespace parplan
