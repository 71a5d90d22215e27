#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"

namespace parplan {

// Data parallelism: every rank along dp trains whole micro-batches of its own share of the global
// batch, with everything replicated and gradients summed (ZeRO changes the placements, in its own
// file).
std::vector<int> legal_data_degrees(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec,
                                    int most);
std::optional<std::string> illegal_data(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec);
void place_data(const OpGraph& graph, const ParallelSpec& spec, Placements& placements);

}  // namespace parplan
