#pragma once

#include <functional>
#include <optional>

#include "planner/explain/explained_plan.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/reasons.h"
#include "planner/search/candidates.h"
#include "planner/search/layout_floors.h"

namespace parplan {

// The layouts to choose among: on exactly so many devices, by a request.
struct Among {
  int devices = 1;
  LayoutRequest request;
  std::function<bool(const ParallelSpec&)> of_degrees;  // whether some layout of these degrees is one of them
  std::function<bool(const ParallelSpec&)> layout;      // whether one is, but for the order of its axes
  std::function<bool(const ParallelSpec&)> in_order;    // and by that; empty: whatever it is
};
struct BestAmong {
  std::optional<Rival> rival;  // nothing where there are no layouts, or none beats what was to be beaten
  // False where `most_simulated` ended the search before the bounds did, or where another cut of a
  // layout may be better.
  bool certified = true;
};
// The floors of all layouts on the maker's cluster, for several searches among them.
LayoutFloors floors_of(const ExplainedPlan& explained, CandidateMaker& maker);
// The best of these layouts that fits, found with as many simulations as the bounds leave open;
// where none fits, the layout that needs the least memory. The cluster is the maker's, as that of
// `floors`. With a score to beat, only a layout that does.
BestAmong best_among(const ExplainedPlan& explained, CandidateMaker& maker, LayoutFloors& floors, const Among& among,
                     std::optional<Score> to_beat = {});

}  // namespace parplan
