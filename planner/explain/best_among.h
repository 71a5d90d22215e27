#pragma once

#include <optional>
#include <span>

#include "planner/explain/explained_plan.h"
#include "planner/plan/reasons.h"
#include "planner/search/candidates.h"

namespace parplan {

struct BestAmong {
  Rival rival;
  bool certified = true;  // false where `most_simulated` ended the search before the bounds did
};
// The best of these layouts that fits, found with as many simulations as the bounds leave open;
// where none fits, the layout that needs the least memory. The cluster is the maker's.
std::optional<BestAmong> best_among(const ExplainedPlan& explained, CandidateMaker& maker,
                                    std::span<const ParallelSpec> specs);

}  // namespace parplan
