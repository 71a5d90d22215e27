#pragma once

#include <string>

#include "planner/plan/plan.h"
#include "planner/plan/reasons.h"

namespace parplan {

// One line on what the search did and how sure the result is.
std::string explain_search(const SearchCounts& search);
// A line with the space that it searched; empty where that is unknown.
std::string explain_space(const SearchCounts& search);

// For people, from the plan alone: where time and memory go, what the runner-up loses on, what
// binds, what the search rejected and how sure it is.
std::string explain(const Plan& plan);

// The same with all that was found out about it: stage by stage, the critical path, what binds and
// what more of it would give, layouts one choice away, the best of each family, the guides' rules
// as numbers, more and less of everything, and how sure the order is.
std::string explain(const Plan& plan, const Reasons& reasons);

// What binds, and what the runner-up loses on.
std::string explain_briefly(const Plan& plan);

}  // namespace parplan
