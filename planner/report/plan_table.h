#pragma once

#include <string>

#include "planner/plan/plan.h"

namespace parplan {

// The ranked plans, best first, for people; with the cost of a step if there are prices, or if it
// is the objective. A line behind them says what their memory counts.
std::string write_table(const Plan& plan);

}  // namespace parplan
