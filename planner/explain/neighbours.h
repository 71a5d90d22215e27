#pragma once

#include <vector>

#include "planner/explain/explained_plan.h"
#include "planner/plan/reasons.h"

namespace parplan {

// The legal layouts one choice away, those that fit simulated.
std::vector<Neighbour> find_neighbours(const ExplainedPlan& explained);

}  // namespace parplan
