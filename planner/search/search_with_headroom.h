#pragma once

#include <functional>

#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/objective.h"
#include "planner/search/node_group_arrangements.h"
#include "planner/search/search.h"

namespace parplan {

// Where a search looks for plans: within which memory, and under which engine.
struct SearchRoom {
  const Cluster& cluster;
  const TrainingSpec& training;
  bool is_last = true;  // nothing else is looked at where nothing fits
};

// `search` within the memory that the cluster's headroom leaves; where nothing fits there, within
// all of it, and without what the engine's allocator would keep. Plans of the latter are tight
// (memory_verdict), and are as they are simulated with what it keeps, in the order of `objective`.
// Where nothing fits at all, the result is that of the latter. The cluster of the result has the
// same headroom.
ArrangedResult search_with_headroom(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                    Objective objective,
                                    const std::function<ArrangedResult(const SearchRoom& room)>& search);

// search_arrangements in this way; with a score to beat, within the headroom alone.
ArrangedResult search_with_headroom(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                    const LayoutRequest& layout, const SearchOptions& options,
                                    const PrecisionOf& precision_of = nullptr);

}  // namespace parplan
