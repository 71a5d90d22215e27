#pragma once

#include <optional>
#include <string>

#include "planner/explain/explained_plan.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/plan.h"
#include "planner/plan/reasons.h"

namespace parplan {

// The prediction that the plan has now, where the file promises another: by 1e-6 of the time or
// more, in memory, or in bytes sent. The plan was then edited, or written by another version.
std::optional<StepResult> prediction_now(const OpGraph& graph, const Plan& plan);
// "the file promises ..., and this plan takes ...: it was edited, or written by another version of
// parplan".
std::string edited_note(const StepResult& promise, const StepResult& now);

// The plan with the prediction that it has now. A prediction that differs from the file's (by 1e-6
// of the time or more, in memory, or in bytes sent) means that the plan was edited or written by
// another version: a note says so, and the alternatives and counts of the file's search, which
// describe another plan, are dropped.
Plan simulated_anew(const OpGraph& graph, Plan plan, bool is_calibrated = false);

// Why the plan is as it is. The plan's prediction is that of `simulated_anew`. The reasons are the
// plan simulated stage by stage, the layouts one choice away, the best of each family, the guides'
// rules as numbers, and the search repeated with more and less of each resource.
Reasons find_reasons(const OpGraph& graph, const Plan& plan, const ReasonsOptions& options);

}  // namespace parplan
