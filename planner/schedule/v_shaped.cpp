#include "planner/schedule/v_shaped.h"

#include <algorithm>
#include <utility>

#include "planner/base/error.h"

namespace parplan {

VRankActions::VRankActions(int rank, int ranks) : stages_{rank, 2 * ranks - 1 - rank} {}

void VRankActions::append(Way way, Phase phase) {
  Counts& counts = counts_[at(way)];
  int* const count = phase == Phase::forward ? &counts.forwards : &counts.backwards;
  actions.push_back({stages_[at(way)], phase, (*count)++});
  if (phase == Phase::backward) counts.weights = counts.backwards;
}

void VRankActions::backward_inputs(Way way) {
  append(way, stages_[at(way)] == 0 ? Phase::backward : Phase::backward_inputs);
}

void VRankActions::backward_weights(Way way) {
  Counts& counts = counts_[at(way)];
  if (stages_[at(way)] > 0) actions.push_back({stages_[at(way)], Phase::backward_weights, counts.weights++});
}

Schedule v_shaped(std::vector<std::vector<Action>> ranks) {
  const int count = static_cast<int>(ranks.size());
  Schedule schedule{.rank_of_stage = {}, .ranks = std::move(ranks)};
  for (int stage = 0; stage < 2 * count; ++stage) schedule.rank_of_stage.push_back(v_rank(stage, count));
  return schedule;
}

Seconds v_shaped_least_time(Seconds /*total*/, Seconds computing, Seconds slowest, const PipelineShape& shape) {
  return shape.micro_batches * std::max(computing / shape.ranks, slowest);
}

// Rank r begins after r transfers: on average over the ranks, (p - 1) / 2.
Seconds least_v_shaped_time(Seconds all, Seconds transfer, const PipelineShape& shape) {
  return (shape.micro_batches * (all / shape.ranks) + 0.5 * (shape.ranks - 1) * transfer) * (1 - 1e-9);
}

}  // namespace parplan
