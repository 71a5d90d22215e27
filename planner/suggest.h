#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/plan.h"
#include "planner/plan/reasons.h"
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
  // To look for what would make it fit, where the caller can give them: the graph for sequences of
  // another length, the cluster with another number of devices of the same kind (nothing where
  // there is none).
  std::function<OpGraph(std::int64_t sequence_length)> graph_of_length;
  std::function<std::optional<Cluster>(int devices)> cluster_of;
};

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
