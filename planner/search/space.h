#pragma once

#include <cstdint>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/parallel_spec.h"

namespace parplan {

// Every legal combination on `devices` devices, in a fixed order, with stage cuts still empty: dp x
// tp x pp = devices; micro-batch sizes that divide the batch per data-parallel rank, from which
// gradient accumulation follows; ZeRO 0 to 3 where dp > 1; both schedules where pp > 1 (without a
// pipeline, micro-batches follow one another as in 1F1B); sequence parallelism where tp > 1;
// recompute none and full; and every order of the axes whose degree is above 1.
std::vector<ParallelSpec> enumerate_specs(const OpGraph& graph, const TrainingSpec& training, int devices,
                                          const LayoutRequest& request);
// The number of these.
std::int64_t count_specs(const OpGraph& graph, const TrainingSpec& training, int devices, const LayoutRequest& request);

}  // namespace parplan
