#pragma once

#include <optional>
#include <span>
#include <vector>

#include "planner/simulator/play_list.h"
#include "planner/simulator/simulate.h"
#include "planner/simulator/simulation_state.h"

namespace parplan {

// From some micro-batch on a simulated step repeats itself: everything for micro-batch m + period
// happens later than for micro-batch m by one and the same time. If that holds over a window that
// is longer than any dependency of the schedule (a stage holds at most as many micro-batches in
// flight as there are stages behind it, and buffers between ranks alternate by two), it holds until
// the schedule ends its steady part: what happens next depends on differences of these times alone.
// The period is a multiple of the schedule's: where a step waits for slots of activations to be
// free again, it comes round with as many micro-batches as there are slots.
struct SteadyState {
  int period = 0;  // micro-batches
  Seconds later;
};

// The least period, a multiple of `period`, for which all calls on every rank for micro-batches
// [end - window - period, end - period) and those a period later are apart by one time (to one part
// in 10^9). Nothing where the window would begin before `first`. One list and its ends for each
// rank of the pipeline.
std::optional<SteadyState> find_steady_state(std::span<const PlayList> lists, std::span<const CallEnds> ends, int first,
                                             int end, int window, int period);

// A step that was played to see whether it becomes steady.
struct SteadyStep {
  StepResult result;
  std::vector<CommunicationVolume> sent;  // by rank
  std::optional<SteadyState> steady;
  // What each further period adds to the parts of the step's time, and to what each rank sends;
  // nothing where that does not show, since the bottleneck computes on two streams at once.
  struct Period {
    StepTime time;
    std::vector<CommunicationVolume> sent;
  };
  std::optional<Period> of_period;
};
SteadyStep play_until_steady(Simulation step, int first, int end, int window, int period);

}  // namespace parplan
