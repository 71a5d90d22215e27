#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"

namespace parplan {

// Megatron's tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): parameters are cut along
// attention heads, the inner width of the feed-forward layer, and the vocabulary (padded, so any
// degree is possible); with sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) the
// activations in between are cut along the sequence.
std::vector<int> legal_tensor_degrees(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec,
                                      int most);
std::optional<std::string> illegal_tensor(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec);
bool allows_tensor(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec);
void place_tensor(const OpGraph& graph, const ParallelSpec& spec, Placements& placements);

}  // namespace parplan
