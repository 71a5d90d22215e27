#pragma once

#include <vector>

#include "planner/plan/step_details.h"
#include "planner/simulator/simulation_state.h"

namespace parplan {

// The work on the critical path of a step that was played with notes of its crossings.
std::vector<CriticalWork> critical_path(const Simulation& simulation);

}  // namespace parplan
