#pragma once

#include <string>

#include "planner/plan/plan.h"
#include "planner/plan/reasons.h"

namespace parplan {

// What the rules of thumb of training guides come to for the plan; empty where none says anything.
std::string rules_of_thumb(const Plan& plan, const Reasons& reasons);

}  // namespace parplan
