#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/plan.h"
#include "planner/search/search.h"
#include "planner/search/space.h"

namespace parplan {

struct SuggestRequest {
  const OpGraph* graph = nullptr;  // built for training.sequence_length
  std::string model_text;          // the model.yaml that the plan carries
  std::string model_name;
  Cluster cluster;
  TrainingSpec training;
  LayoutRequest layout;
  SearchOptions options;
};

// What a search gave: the best plan, complete, with the next best as its alternatives; or why there is none.
struct SuggestResult {
  std::optional<Plan> plan;
  SearchCounts counts;
  std::vector<std::string> changes;  // without a plan: what would make it fit, each checked by the same search
};

// The flow of `parplan suggest`.
SuggestResult suggest(const SuggestRequest& request);

// The flow of `parplan simulate`: one given layout, all of whose degrees are fixed in `request.layout`. ConfigError says
// why a layout is not legal; memory beyond the capacity is reported, not refused. With `trace`, the Chrome trace.
Plan simulate_layout(const SuggestRequest& request, std::string* trace = nullptr);

// Simulates a plan that was read from a file, as it stands.
StepResult simulate_plan(const OpGraph& graph, const Plan& plan, std::string* trace = nullptr);

}  // namespace parplan
