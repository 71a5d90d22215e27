#pragma once

#include <optional>
#include <span>

#include "planner/program/program.h"
#include "planner/simulator/simulate.h"

namespace parplan {

// From some micro-batch on a simulated step repeats itself: everything for micro-batch m + period
// happens later than for micro-batch m by one and the same time. If that holds over a window that
// is longer than any dependency of the schedule (a stage holds at most as many micro-batches in
// flight as there are stages behind it, and buffers between ranks alternate by two), it holds until
// the schedule ends its steady part: what happens next depends on differences of these times alone.

// That time, if all calls of every stage on every rank for micro-batches [first, first + window)
// and those a period later share it (to one part in 10^9). One Program and its ends for each rank
// of the pipeline.
std::optional<Seconds> steady_seconds(std::span<const Program> programs, std::span<const CallEnds> ends, int first,
                                      int window, int period);

}  // namespace parplan
