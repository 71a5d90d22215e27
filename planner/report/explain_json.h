#pragma once

#include "planner/base/json.h"
#include "planner/plan/reasons.h"
#include "planner/report/suggest_and_run_json.h"

namespace parplan {

// parplan.explain/1: what explain() says, as numbers (docs/json.md).
Json explain_json(const ReportInputs& inputs, const Plan& plan, const Reasons& reasons);

}  // namespace parplan
