#pragma once

#include <string>

#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout_choices.h"
#include "planner/search/space_width.h"

namespace parplan {

// What a search looks at: degrees, devices, and the values of choices that layouts differ in, but
// for those that follow from the degrees. `fewer`: also layouts that leave devices idle.
std::string space_in_words(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                           const LayoutRequest& request, const SpaceWidth& width, bool fewer);

}  // namespace parplan
