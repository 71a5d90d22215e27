#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/parallel_spec.h"

namespace parplan {

// Recompute by number of layers (StageRecompute): a stage cannot recompute more layers than it has.
// Where stages have unlike numbers of them, some stage has to have so many; one with fewer
// recomputes all of its own, as in Megatron-LM.

// Whether some layers of a stage alone recompute.
bool recomputes_some_layers(const ParallelSpec& spec);
// The most layers that a stage surely has: of a layout that is not cut yet, in any of its cuts.
int most_layers_of_a_stage(const OpGraph& graph, const ParallelSpec& spec);
std::vector<int> legal_recompute_layers(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec,
                                        int most);
std::optional<std::string> illegal_recompute(const OpGraph& graph, const TrainingSpec& training,
                                             const ParallelSpec& spec);
void place_recompute(const OpGraph& graph, const ParallelSpec& spec, Placements& placements);

}  // namespace parplan
