#pragma once

#include <span>

#include "planner/cost/cost_model.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/objective.h"
#include "planner/plan/parallel_spec.h"
#include "planner/search/candidates.h"

namespace parplan {

// A candidate stands for the same with one more buffer for arriving activations (InputSlots), too:
// it has the same lower bound, which counts no wait for a buffer, and is never slower. That one is
// to be simulated where it fits (for the objective memory: where it needs no more).
struct WithInputSlot {
  ParallelSpec spec;
  bool lacks_room = false;  // for the buffer, so that `spec` has none
};
WithInputSlot with_input_slot(CandidateMaker& maker, const Candidate& candidate, std::span<const CostModel> models,
                              const TrainingSpec& training, Objective objective);

// Whether a step that takes `with` in `with_input_slot` is faster than without the buffer.
bool needs_input_slot(Seconds with, Seconds without);

}  // namespace parplan
