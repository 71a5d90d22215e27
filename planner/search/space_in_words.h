#pragma once

#include <string>

#include "planner/cluster/cluster.h"
#include "planner/graph/engine.h"
#include "planner/plan/layout_choices.h"
#include "planner/search/space_width.h"

namespace parplan {

// What a search looks at. `fewer`: also layouts that leave devices idle.
std::string space_in_words(const Cluster& cluster, const Engine& engine, const LayoutRequest& request,
                           const SpaceWidth& width, bool fewer);

}  // namespace parplan
