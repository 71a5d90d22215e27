#pragma once

#include <string>

#include "planner/plan/plan.h"
#include "planner/plan/reasons.h"

// The plan beside other layouts, and beside the plans for more or less of a resource. Each table is
// empty where the reasons have nothing for it.
namespace parplan {

std::string neighbour_table(const Plan& plan, const Reasons& reasons);    // layouts one choice away
std::string family_table(const Plan& plan, const Reasons& reasons);       // the best of each family
std::string twice_table(const Plan& plan, const Reasons& reasons);        // with twice of each resource
std::string sensitivity_table(const Plan& plan, const Reasons& reasons);  // with a little more and less

}  // namespace parplan
