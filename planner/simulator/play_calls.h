#pragma once

#include "planner/simulator/simulation_state.h"

namespace parplan {

// Plays all calls of all ranks. Throws InternalError, saying who waits for what, when the Programs
// block one another.
void play_calls(Simulation& simulation);

}  // namespace parplan
