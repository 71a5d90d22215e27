#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/memory_verdict.h"
#include "planner/plan/plan.h"
#include "planner/plan/reasons.h"
#include "planner/search/node_group_arrangements.h"
#include "planner/search/suggest_request.h"
#include "planner/simulator/timeline.h"

namespace parplan {

// The result of a search: the best plan, complete, with the next best as its alternatives; or why
// there is none.
struct SuggestResult {
  std::optional<Plan> plan;
  SearchCounts counts;
  // Where there is no plan: what would make it fit, each checked by the same search.
  std::vector<Remedy> remedies;
  // And what the candidate lacks that needs the least memory on its devices.
  std::optional<Shortage> shortage = {};
};

// Carries out `parplan suggest`.
SuggestResult suggest(const SuggestRequest& request);

// Carries out `parplan simulate`: one given layout, all of whose degrees are fixed in
// `request.layout`. A ConfigError says why a layout is not legal; memory beyond the capacity is
// reported, not rejected. `timeline` receives every instruction of the step.
Plan simulate_layout(const SuggestRequest& request, Timeline* timeline = nullptr);

// Simulates a plan that was read from a file, unchanged.
StepResult simulate_plan(const OpGraph& graph, const Plan& plan, Timeline* timeline = nullptr);

}  // namespace parplan
