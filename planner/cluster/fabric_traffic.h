#pragma once

#include <optional>
#include <vector>

#include "planner/cluster/cluster.h"

namespace parplan {

// The network above the NICs, as a mesh of `ranks` ranks fills it (rank r is device r of the
// cluster).

// Ranks along one axis: groups of `degree` ranks, `stride` apart, in blocks of stride * degree
// ranks.
struct AxisLayout {
  int ranks = 1;
  int stride = 1;
  int degree = 1;
};

// The number of groups of the axis that have members both inside and outside of the ranks [first,
// last). A ring that visits its members in the order of their ranks leaves such a range once, and
// enters it once.
int groups_leaving(const AxisLayout& axis, int first, int last);

// The number of ranks in [first, last) on one of the stages `from` and `to` whose partner on the
// other stage is outside.
int ranks_leaving(const AxisLayout& axis, int from, int to, int first, int last);

// A block of a level: its ranks, and the sum of the NICs of its nodes, whether they hold ranks or
// not.
struct FabricBlock {
  int first = 0;
  int last = 0;   // one past its last rank
  int nodes = 0;  // that hold ranks
  BytesPerSecond nics;
};

// The blocks of `nodes_per_block` consecutive nodes that hold ranks; one stands for all that look
// alike to the axis (equal nodes, equal positions of ranks in their blocks).
std::vector<FabricBlock> blocks_of(const Cluster& cluster, const AxisLayout& axis, int nodes_per_block);

}  // namespace parplan
