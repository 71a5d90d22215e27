#pragma once

#include <string>

#include "planner/plan/plan.h"

namespace parplan {

// What keeps a plan from being faster.
enum class Constraint { compute, communication, bubble, memory };
const char* name(Constraint constraint);

// Memory, where the plan fills most of the device or pays for room by recomputing; else the largest of computation (with the optimizer),
// exposed communication and bubble.
Constraint binding_constraint(const Plan& plan);

// One line on what the search did and how sure the result is.
std::string explain_search(const SearchCounts& search);

// For people, from the plan alone: where time and memory go, what the runner-up loses on, what binds, what the
// search rejected and how sure it is.
std::string explain(const Plan& plan);

}  // namespace parplan
