#pragma once

#include <span>

#include "planner/explain/explained_plan.h"
#include "planner/plan/reasons.h"
#include "planner/search/candidates.h"

namespace parplan {

// The rules of thumb of training guides as numbers for this plan; `neighbours` are the plan's.
Guide find_guide(const ExplainedPlan& explained, CandidateMaker& maker, std::span<const Neighbour> neighbours);

}  // namespace parplan
