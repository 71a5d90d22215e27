#pragma once

#include <string>

#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/layout_choices.h"

namespace parplan {

// What a search looks at, and what it leaves out. `fewer`: also layouts that leave devices idle.
std::string space_in_words(const OpGraph& graph, const Cluster& cluster, const Engine& engine,
                           const LayoutRequest& request, bool fewer);

}  // namespace parplan
