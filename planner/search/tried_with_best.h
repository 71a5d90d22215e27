#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "planner/cost/cost_model.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/plan.h"
#include "planner/search/restrictions.h"
#include "planner/search/space.h"

namespace parplan {

// A plan of a search that was simulated.
struct BestLayout {
  const SearchedSpace& space;
  NetworkCache& networks;
  ParallelSpec layout;  // without its cut
  const StepTime& time;
  double behind = 1.0;  // its score, as a multiple of the best one
};

// What a space leaves out, since it would multiply the layouts, but for those of the best plans:
// all that were simulated, or that are ranked.
struct TriedRow {
  Choice choice{};  // not tried where the request has it
  std::string_view words;
  bool with_each = false;  // with all that were simulated, if short: variants differ in what it gains
  bool (*applies)(const SearchedSpace& space);  // by the engine, the request and the width of the space
  // A value of another choice that layouts must have, or a larger one; none: they need nothing.
  std::optional<std::pair<Choice, ChoiceValue>> needs;
  // The layouts to try, some of which may not be legal.
  std::vector<ParallelSpec> (*layouts)(const BestLayout& best);
};

// In the order in which they are tried: each with the plans until then.
std::span<const TriedRow> tried_rows();
// By the objective memory, nothing is.
bool is_tried(const TriedRow& row, const SearchedSpace& space);
// Those that are tried where layouts have what they need, after a semicolon.
std::string tried_in_words(const SearchedSpace& space, const Space::NamedValues& named);

}  // namespace parplan
