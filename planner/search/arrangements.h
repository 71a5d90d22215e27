#pragma once

#include <optional>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/plan.h"
#include "planner/search/search.h"
#include "planner/search/space.h"

namespace parplan {

// Of unlike nodes a plan may take some alone, and in another order: the first ranks, and with them
// the first stages, are on the first group. The cluster as it stands first, then up to three groups
// in every choice and order; of more each alone. Nothing but the cluster itself where blocks of
// nodes in a row share switches: then their order is where they stand.
std::vector<Cluster> arrangements(const Cluster& cluster);

struct ArrangedResult {
  Cluster cluster;                      // the groups that the plans take, in their order
  SearchResult found;                   // on these; the counts are of all arrangements together
  std::optional<RankedPlan>
      as_stands;  // the best on the cluster as it stands, where another arrangement has a better one and it has any
};

// `search` on every arrangement, unless `options.fewer_devices` is off; the first of those that
// have the best plan.
ArrangedResult search_arrangements(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                   const LayoutRequest& request, const SearchOptions& options);

}  // namespace parplan
