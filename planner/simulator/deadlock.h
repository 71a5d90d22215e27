#pragma once

#include "planner/simulator/simulation_state.h"

namespace parplan {

// Throws InternalError: which call at the head of each stream waits for what.
[[noreturn]] void report_deadlock(const Simulation& simulation);

}  // namespace parplan
