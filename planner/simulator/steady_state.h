#pragma once

#include <optional>
#include <span>

#include "planner/program/program.h"
#include "planner/simulator/simulate.h"

namespace parplan {

// From some micro-batch on a simulated step repeats itself: on the ranks that decide its pace,
// everything for micro-batch m + period happens later than for micro-batch m by one and the same
// time, and nothing happens later than that anywhere. What happens is the latest of what it waits
// for, and a duration. So if that holds over a window that is longer than any dependency of the
// schedule (a stage holds at most as many micro-batches in flight as there are stages behind it,
// and buffers between ranks alternate by two), it holds until the schedule ends its steady part.
// The period is a multiple of the schedule's: where a step waits for slots of activations to be
// free again, it comes round with as many micro-batches as there are slots.
struct SteadyState {
  int period = 0;  // micro-batches
  Seconds later;
};

// The least period, a multiple of `period`, for which all calls of the bottleneck for micro-batches
// [end - window - period, end - period) and those a period later are apart by one time (to one part
// in 10^9), and no calls of another rank by more. Nothing where the window would begin before
// `first`, or with `every_rank` where another rank is slower by less. One Program and its ends for
// each rank of the pipeline.
std::optional<SteadyState> find_steady_state(std::span<const Program> programs, std::span<const CallEnds> ends,
                                             int first, int end, int window, int period,
                                             bool every_rank = false);

}  // namespace parplan
