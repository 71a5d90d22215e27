#pragma once

#include "planner/program/program.h"

namespace parplan {

// Orders conflicting accesses of different streams within a Segment by events, and only those: sets
// `waits`, `records` and `events`.
void order_instructions(Segment& segment);

// The same among the calls of a Program, at the granularity of whole buffers.
void order_calls(Program& program);

}  // namespace parplan
