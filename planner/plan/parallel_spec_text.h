#pragma once

#include <string>
#include <vector>

#include "planner/plan/parallel_spec.h"

namespace parplan {

// "dp2 tp4+sp pp2 zero1 mb1 1f1b recompute tp-dp-pp": degrees above 1 and whatever differs from the
// plainest choice.
std::string layout_text(const ParallelSpec& spec);
// Layers per stage, embedding and head not counted; and as text: "6,6".
std::vector<int> layers_of_stages(const ParallelSpec& spec);
// Layers of each rank of the pipeline, over its stages.
std::vector<int> layers_of_ranks(const ParallelSpec& spec);
std::string stage_layers(const ParallelSpec& spec);
// "full,full,none".
std::string stage_recompute(const ParallelSpec& spec);

}  // namespace parplan
