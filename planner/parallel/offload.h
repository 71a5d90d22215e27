#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"

namespace parplan {

// ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840): the optimizer's state, with the parameters in
// fp32, is in host memory. Reduced gradients are copied there while the backward goes on, the
// host's processor updates this rank's shard, and the parameters are copied back.
std::vector<int> legal_offloads(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec, int most);
std::optional<std::string> illegal_offload(const OpGraph& graph, const TrainingSpec& training,
                                           const ParallelSpec& spec);
void place_offload(const OpGraph& graph, const ParallelSpec& spec, Placements& placements);

}  // namespace parplan
