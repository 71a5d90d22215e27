#pragma once

#include <optional>
#include <span>

#include "planner/program/program.h"
#include "planner/simulator/simulate.h"

namespace parplan {

// A simulated step repeats itself from some micro-batch on: everything that happens for micro-batch
// m + period happens equally much later than for micro-batch m. Where that holds over a window
// which is longer than anything in the schedule reaches back (a stage holds at most as many
// micro-batches in flight as there are stages behind it, buffers between them take turns by two),
// it holds until the schedule ends its steady part: what happens next is decided by differences of
// these times alone.

// How much later, if all calls for micro-batches [first, first + window) of every stage and those a
// period after have it in common (to one part in 10^9 of it).
std::optional<double> steady_seconds(std::span<const Program> programs, std::span<const CallEnds> ends, int first,
                                     int window, int period);

}  // namespace parplan
