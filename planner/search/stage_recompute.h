#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "planner/graph/engine.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"
#include "planner/simulator/estimate.h"

// What the stages of a layout recompute. The stages of a rank recompute alike: their saved
// activations take turns in the same slots.

namespace parplan {

// Whether stages may differ in what they recompute: if the engine has that, and nothing is given.
bool may_mix(const LayoutRequest& request, const Engine& engine);
// What each stage of a layout may recompute, as long as the layout lives. `mixes`: whether stages
// may differ in that.
std::span<const Recompute> recomputes_of(const ParallelSpec& spec, const Engine& engine, bool mixes);

// All choices of the stages are candidates where they are few enough.
inline constexpr std::size_t most_choices = 64;
// Whether those of so many ranks are.
bool lists_choices(int ranks, const Engine& engine);
// What stages may recompute under the engine, but for all of them the same.
std::vector<std::vector<StageRecompute>> recompute_choices(const ParallelSpec& spec, const Engine& engine);

// A layout with its cut, in which the stages of each rank recompute the least that lets it fit;
// nothing where that does not help.
std::optional<ParallelSpec> recomputing_where_needed(Estimator& estimator, const OpGraph& graph,
                                                     const TrainingSpec& training, const Placements& placements,
                                                     const ParallelSpec& spec);

// A layout with its cut and without recompute, in which each rank recomputes so that its stages
// fit: as few of the first layers of each as that takes, by the rule that adds the least time, one
// for all stages of the rank. Nothing where a rank has no room in any way, or no stage is left that
// recomputes some of its layers alone.
std::optional<ParallelSpec> recomputing_fewest_layers(Estimator& estimator, const OpGraph& graph,
                                                      const TrainingSpec& training, const Placements& placements,
                                                      const ParallelSpec& spec);

}  // namespace parplan
