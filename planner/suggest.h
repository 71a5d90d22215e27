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

// search_arrangements within the memory that the cluster's headroom leaves; where nothing fits
// there, within all of it, and without what the engine's allocator would keep, if that is needed:
// such plans are tight (memory_verdict). Where nothing fits at all, the result is that of the
// latter. The cluster of the result has the same headroom.
ArrangedResult search_with_headroom(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                    const LayoutRequest& layout, const SearchOptions& options,
                                    const PrecisionOf& precision_of = nullptr);

// Carries out `parplan suggest`.
SuggestResult suggest(const SuggestRequest& request);

// Carries out `parplan simulate`: one given layout, all of whose degrees are fixed in
// `request.layout`. A ConfigError says why a layout is not legal; memory beyond the capacity is
// reported, not rejected. `timeline` receives every instruction of the step.
Plan simulate_layout(const SuggestRequest& request, Timeline* timeline = nullptr);

// Simulates a plan that was read from a file, unchanged.
StepResult simulate_plan(const OpGraph& graph, const Plan& plan, Timeline* timeline = nullptr);

}  // namespace parplan
