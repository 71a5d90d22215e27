#pragma once

#include <cstdint>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/parallel_spec.h"

namespace parplan {

// Every legal combination of the values of space_rows() on `devices` devices, in a fixed order,
// with stage cuts still empty.
std::vector<ParallelSpec> enumerate_specs(const OpGraph& graph, const TrainingSpec& training, int devices,
                                          const LayoutRequest& request);
// The number of these.
std::int64_t count_specs(const OpGraph& graph, const TrainingSpec& training, int devices, const LayoutRequest& request);

}  // namespace parplan
