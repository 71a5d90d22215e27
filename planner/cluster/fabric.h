#pragma once

#include <optional>
#include <vector>

#include "planner/cluster/cluster.h"

namespace parplan {

// What lies above the NICs, as a mesh of `ranks` ranks fills it (rank r is device r of the
// cluster).

// Ranks along one axis: groups of `degree` ranks, `stride` apart, in blocks of stride * degree
// ranks.
struct AxisLayout {
  int ranks = 1;
  int stride = 1;
  int degree = 1;
};

// Of the ranks [first, last), how many groups of the axis have members there and elsewhere too. A
// ring that visits its members in the order of their ranks leaves such a range once, and enters it
// once.
int groups_leaving(const AxisLayout& axis, int first, int last);

// Of the ranks [first, last), how many of the stages `from` and `to` have their partner in the
// other stage elsewhere.
int ranks_leaving(const AxisLayout& axis, int from, int to, int first, int last);

// A block of a level: its ranks, and what the NICs of its nodes carry together, whether they hold
// ranks or not.
struct FabricBlock {
  int first = 0;
  int last = 0;  // behind its last rank
  int nodes = 0;
  BytesPerSecond nics;
};

// The blocks of `nodes_per_block` nodes in a row that hold ranks; of those that look alike to the
// axis (equal nodes, equal places of ranks in their blocks) one.
std::vector<FabricBlock> blocks_of(const Cluster& cluster, const AxisLayout& axis, int nodes_per_block);

}  // namespace parplan
