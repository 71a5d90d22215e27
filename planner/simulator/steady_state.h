#pragma once

#include <optional>

#include "planner/base/units.h"
#include "planner/plan/step_details.h"
#include "planner/plan/step_result.h"
#include "planner/simulator/repeating_step.h"

namespace parplan {

// In the middle of a long step, after some time, everything happens later than its counterpart a
// period before by one and the same time. How far a rank has come is counted in forwards: a call's
// number is that of the last forward that its rank began before it, of whichever stage. Calls wait
// for calls of their own rank, and meet those of others, that are equally far back wherever the
// middle repeats itself. If, on every rank, all that calls of the numbers [end - window, end) do is
// apart from their counterparts by one time, and the window is longer than any of them reaches
// back, then the same holds for all that follow in the middle, one after the other, however long it
// is made: what happens next depends on differences of these times alone.
struct SteadyState {
  int period = 0;  // forwards
  Seconds later;
};

// How far calls in the middle reach, in forwards; 0 and more.
struct Reach {
  int back = 0;
  int ahead = 0;  // to partners that have come further
};
// Nothing where calls of the middle meet others than neighbours in the pipeline, or ranks hold
// unequally many stages.
std::optional<Reach> reach_of(const RepeatingStep& step);

// The least period, a multiple of `period`, for which the calls of the numbers [end - window, end)
// are apart from those before by one time (to one part in 10^9). Nothing where these are not all
// played, or the counterparts of `end` would begin before `first`. In forwards.
std::optional<SteadyState> find_steady_state(const Simulation& step, int first, int end, int window, int period);

// A step that was played until it was steady, or to its end.
struct ExtendedStep {
  StepResult result;
  int micro_batches = 0;              // that were played
  std::optional<SteadyState> steady;  // nothing where all of it was played
};
// Plays the step of `micro_batches`, which are more than the shortest step's by whole periods of
// it: until it is steady, and then the end. The periods in between take the time of one, and send
// what one does, each. Equal to the step in full up to rounding. Calls in `step` are apart, and
// crossings noted, where `details` are asked for.
ExtendedStep play_until_steady(const RepeatingStep& step, int micro_batches, StepDetails* details = nullptr);

}  // namespace parplan
