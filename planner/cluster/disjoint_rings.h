#pragma once

#include <vector>

#include "planner/cluster/routes.h"

namespace parplan {

// Rings that together use the direct links between devices: NCCL's channels on meshes where NVLinks
// join some pairs only, such as the hybrid cube of a DGX-1 (its search, src/graph/search.cc, lays
// six rings on eight V100: three, each both ways). The result has as many rings as the links carry,
// all at the rate of the narrowest link; a ring that the links carry twice is listed twice. Each is
// an order of `members`, starting from the first of them, in which data goes around.
//
// The result is empty where two links are no ring (fewer than three members), where members are not
// joined by such links or are all joined equally (any layout does, or all pairs do better), and
// where there are too many orders to examine (over `most_rings`).
inline constexpr std::size_t most_rings = 4096;
std::vector<std::vector<int>> disjoint_rings(const NodeRoutes& routes, const std::vector<int>& members);

}  // namespace parplan
