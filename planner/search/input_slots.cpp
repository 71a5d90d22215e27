#include "planner/search/input_slots.h"

#include <algorithm>
#include <utility>

#include "planner/plan/layout_choices.h"
#include "planner/schedule/schedules.h"

namespace parplan {

WithInputSlot with_input_slot(CandidateMaker& maker, const Candidate& candidate, std::span<const CostModel> models,
                              const TrainingSpec& training, Objective objective) {
  ParallelSpec spec = candidate.spec;
  if (!row_of(Choice::input_slots).applies(spec) || micro_batches(spec, training) == 1 ||
      std::ranges::none_of(models, [](const CostModel& of) { return !of.execution.posts_sends(); }))
    return {.spec = std::move(spec)};
  spec.input_slots = InputSlots::one_more;
  const Bound bound = maker.estimator().bound(spec, maker.placements_of(spec), forms_of(row_of(spec.schedule)));
  const bool takes_more = objective == Objective::memory && bound.memory.peak() > candidate.bound.memory.peak();
  const bool lacks_room = bound.spare < Bytes(0) || takes_more;
  return {.spec = lacks_room ? candidate.spec : std::move(spec), .lacks_room = lacks_room};
}

// Equal steps differ by rounding (planner/search/simulate_spec.h).
bool needs_input_slot(Seconds with, Seconds without) {
  return with < without * (1 - 1e-9);
}

}  // namespace parplan
