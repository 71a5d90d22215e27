#pragma once

#include <optional>
#include <span>

#include "planner/explain/inquiry.h"
#include "planner/plan/explanation.h"
#include "planner/search/candidates.h"

namespace parplan {

struct BestAmong {
  Rival rival;
  bool certified = true;  // false where `most_simulated` ended the search before the bounds did
};
// The best of these layouts that fits, by as many simulations as bounds leave open; where none
// fits, the one that needs least memory. On the maker's cluster.
std::optional<BestAmong> best_among(const Inquiry& inquiry, CandidateMaker& maker,
                                    std::span<const ParallelSpec> specs);

}  // namespace parplan
