#pragma once

#include <optional>
#include <vector>

#include "planner/plan/step_details.h"
#include "planner/plan/step_result.h"
#include "planner/simulator/simulation_state.h"
#include "planner/simulator/timeline.h"

namespace parplan {

// What a step that has been played shows.

// The rank that computes longest; of several, the one that finishes last, and of those the first.
const PlayedRank& bottleneck_of(const Simulation& simulation);
// The parts of a rank's time, until its last work ends.
StepTime time_of(const PlayedRank& rank);
// The parts until the end of a call on the stream of computation; nothing where something else
// computes at the same time.
std::optional<StepTime> time_until(const PlayedRank& rank, int call);
StepResult result_of(const Simulation& simulation);
std::vector<RankResult> rank_results(const Simulation& simulation);
void write(const Simulation& simulation, Timeline& timeline);

}  // namespace parplan
