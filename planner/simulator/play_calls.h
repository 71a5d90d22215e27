#pragma once

#include "planner/simulator/simulation_state.h"

namespace parplan {

// Plays, of each rank, the calls before `calls_to_play`, as far as the ranks get by themselves. The
// step may be played on after that.
void play_on(Simulation& simulation);
// Plays all calls of all ranks, or those that are left. Throws InternalError, saying who waits for
// what, when the Programs block one another.
void play_calls(Simulation& simulation);

}  // namespace parplan
