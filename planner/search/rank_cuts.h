#pragma once

#include <optional>
#include <span>

#include "planner/graph/op_graph.h"
#include "planner/parallel/cut_stages.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"
#include "planner/simulator/estimate.h"

namespace parplan {

// The cut of a layout whose slowest rank computes the least, among those that fit their devices;
// nothing where none fits. Each rank chooses from `recomputes` for all of its stages. For layouts
// whose ranks hold several stages, or whose backwards run in two parts: what a rank holds follows
// from the number of its blocks, which its stages share evenly. Blocks but the first and the last
// that differ all count as the slowest of them, and a run of them as the one that takes the most
// memory: where these differ, a cut that fits may be missed.
std::optional<StageCut> fastest_cut_of_ranks(Estimator& estimator, const OpGraph& graph, const ParallelSpec& spec,
                                             const Placements& placements, const PipelineShape& shape,
                                             std::span<const Recompute> recomputes);

}  // namespace parplan
