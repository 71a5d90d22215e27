#pragma once

#include <string>

#include "planner/cluster/cluster.h"
#include "planner/graph/engine.h"
#include "planner/plan/layout_choices.h"
#include "planner/search/space.h"
#include "planner/search/space_width.h"

namespace parplan {

// What a search looks at: degrees, devices, and the values of choices that layouts differ in.
// `fewer`: also layouts that leave devices idle.
std::string space_in_words(const Cluster& cluster, const Engine& engine, const LayoutRequest& request,
                           const SpaceWidth& width, bool fewer, const Space::NamedValues& named);

}  // namespace parplan
