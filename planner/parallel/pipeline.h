#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"

namespace parplan {

// Pipeline parallelism: the graph's blocks in runs, one run per stage. It splits time, not tensors,
// so it sets no placement.
std::vector<int> legal_pipeline_degrees(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec,
                                        int most);
std::optional<std::string> illegal_pipeline(const OpGraph& graph, const TrainingSpec& training,
                                            const ParallelSpec& spec);
void place_pipeline(const OpGraph& graph, const ParallelSpec& spec, Placements& placements);

}  // namespace parplan
