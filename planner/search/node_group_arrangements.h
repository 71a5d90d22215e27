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

// On heterogeneous nodes a plan may use a subset of the groups, and another order: the first ranks,
// and with them the first stages, are on the first group. The list has the cluster in its own order
// first, then up to three groups in every subset and order; with more groups, the first of them in
// their own order, and each alone. It has only the cluster itself where blocks of nodes in a row
// share switches: their order is then given by the network.
std::vector<Cluster> arrangements(const Cluster& cluster);

// Why what a given offload uses of the hosts, or of their drives, cannot be timed on the first
// devices, as many as the given degrees say, or else on all; nothing where it can.
std::optional<std::string> lacks_homes(const Cluster& cluster, const LayoutRequest& request);

// The precision of a training on a cluster, where nobody gave one.
using PrecisionOf = std::function<DataType(const Cluster& cluster)>;

struct ArrangedResult {
  // The groups of the best plan, in their order: the whole cluster where they are the first of it
  // and train in its precision.
  Cluster cluster;
  DataType precision;  // in which they train
  // The best plan, on these, and behind it the best of all arrangements, within the limits of one
  // search (SearchOptions::top, top_each); those on others say on which. The counts are of all
  // arrangements together. `smallest` is on the first groups of the unchanged cluster: in the
  // precision of all of its devices, or, if no layout was looked at in that, in these groups' own.
  SearchResult found;
  // What the candidate takes that needs the least memory among those that fit, of those that were
  // made in any arrangement; nothing where none fits.
  std::optional<Bytes> least_that_fits;
  // The best plan on the unchanged cluster, in the precision of all of its devices, if it has any
  // and `cluster` is another.
  std::optional<RankedPlan> as_stands;
};

// `search` on every arrangement, unless `options.fewer_devices` is off: each plan is looked at on
// the groups that it uses, which train in the precision that `precision_of` gives their devices,
// or, without that, in the training's. An arrangement that lacks the homes of a given offload is
// left out; throws ConfigError where all do. Where no candidate is to be simulated, arrangements
// behind the first in which one fits are not looked at.
ArrangedResult search_arrangements(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                   const LayoutRequest& request, const SearchOptions& options,
                                   const PrecisionOf& precision_of = nullptr);

}  // namespace parplan
