#pragma once

#include <vector>

#include "planner/cluster/routes.h"

namespace parplan {

// Rings that together use what links there are between devices directly: NCCL's channels on meshes
// where NVLinks join some pairs only, such as the hybrid cube of a DGX-1 (its search,
// src/graph/search.cc, lays six on eight V100: three, each both ways). As many as the links carry,
// all of the rate of the narrowest link; a ring for which links have room twice stands twice. Each
// is an order of `members`, from the first of them on, in which data goes around.
//
// Empty where two links are no ring (fewer than three members), where members are not joined by
// such links or all equally (any layout does, or all pairs do better), and where there are too many
// orders to go through (over `most_rings`).
inline constexpr std::size_t most_rings = 4096;
std::vector<std::vector<int>> disjoint_rings(const NodeRoutes& routes, const std::vector<int>& members);

}  // namespace parplan
