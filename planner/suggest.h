#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/explanation.h"
#include "planner/plan/plan.h"
#include "planner/search/request.h"

namespace parplan {

// What a search gave: the best plan, complete, with the next best as its alternatives; or why there
// is none.
struct SuggestResult {
  std::optional<Plan> plan;
  SearchCounts counts;
  std::vector<Remedy> remedies;  // without a plan: what would make it fit, each checked by the same search
};

// The flow of `parplan suggest`.
SuggestResult suggest(const SuggestRequest& request);

// The flow of `parplan simulate`: one given layout, all of whose degrees are fixed in
// `request.layout`. ConfigError says why a layout is not legal; memory beyond the capacity is
// reported, not refused. With `trace`, the Chrome trace.
Plan simulate_layout(const SuggestRequest& request, std::string* trace = nullptr);

// Simulates a plan that was read from a file, as it stands.
StepResult simulate_plan(const OpGraph& graph, const Plan& plan, std::string* trace = nullptr);

}  // namespace parplan
