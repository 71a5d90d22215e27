#pragma once

#include <optional>
#include <span>

#include "planner/explain/best_among.h"
#include "planner/explain/explained_plan.h"
#include "planner/plan/reasons.h"
#include "planner/search/candidates.h"

namespace parplan {

// The rules of thumb of training guides as numbers for this plan; `neighbours` are the plan's.
// `across_nodes`: what a search among all layouts with tensor parallelism across nodes has found
// (Families), where there was one.
Guide find_guide(const ExplainedPlan& explained, CandidateMaker& maker, std::span<const Neighbour> neighbours,
                 const std::optional<BestAmong>& across_nodes = {});

}  // namespace parplan
