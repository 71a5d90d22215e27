#pragma once

#include "planner/base/json.h"
#include "planner/plan/explanation.h"
#include "planner/report/command_json.h"

namespace parplan {

// parplan.explain/1: what explain() says, as numbers (docs/json.md).
Json explain_json(const ReportInputs& inputs, const Plan& plan, const Reasons& reasons);

}  // namespace parplan
