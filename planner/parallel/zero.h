#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"

namespace parplan {

// ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): over the data-parallel ranks, stage 1 shards
// the optimizer's state, stage 2 the gradients too, stage 3 the parameters too. Hybrid sharding
// (`dp_shard`; FSDP's HYBRID_SHARD, arXiv:2304.11277; MiCS, arXiv:2205.00119) shards over groups of
// these ranks only, and sums what shards hold over the groups once a step.
std::vector<int> legal_zero_stages(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec,
                                   int most);
std::optional<std::string> illegal_zero(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec);
void place_zero(const OpGraph& graph, const ParallelSpec& spec, Placements& placements);

}  // namespace parplan
