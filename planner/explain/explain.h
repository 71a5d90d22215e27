#pragma once

#include "planner/explain/inquiry.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/explanation.h"
#include "planner/plan/plan.h"

namespace parplan {

// The plan with the prediction that it has now. Where that is not the file's (another time by 1e-6
// of it or more, other memory), the plan was edited, or written by another version: a note says so,
// and the alternatives and counts of its search, which speak of another, are gone.
Plan simulated_anew(const OpGraph& graph, Plan plan);

// Why the plan is as it is, its prediction being simulated_anew: the plan simulated stage by stage,
// layouts one choice away, the best of each family, the rules of the guides as numbers, and the
// search made anew with more and less of everything.
Reasons find_reasons(const OpGraph& graph, const Plan& plan, const ReasonsOptions& options);

}  // namespace parplan
