#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"

namespace parplan {

// Pipeline parallelism: the graph's blocks in runs, one run a stage. It splits time, not tensors, so it sets no placement.
std::vector<int> legal_pipeline_degrees(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec,
                                        int most);
std::optional<std::string> illegal_pipeline(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec);
void place_pipeline(const OpGraph& graph, const ParallelSpec& spec, Placements& placements);

// Blocks per stage, none empty, such that the costliest stage is as cheap as can be, and among those cuts the sum of
// squares least (so that slack is spread; ties go to shorter early stages). `1 <= stages <= block_cost.size()`.
std::vector<int> cut_stages(std::span<const double> block_cost, int stages);

// The default cut, where no cost model is at hand: blocks weighted by the multiply-adds of their matrix products
// (an embedding look-up has none, the head has its vocabulary).
std::vector<int> even_stages(const OpGraph& graph, int stages);

}  // namespace parplan
