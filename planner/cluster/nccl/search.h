#pragma once

#include <vector>

#include "planner/cluster/nccl/system.h"

namespace parplan {

struct NcclSearchOptions {
  bool collnet = false;  // whether the network's switches reduce: the collnet graphs are then searched for, too
  // Whether GPUs and driver multicast by NVSwitch (from compute capability 9.0 on); without it
  // there is no such graph.
  bool nvls = true;
};

// The channels that NCCL finds, algorithm by algorithm in the order in which it writes them (ring,
// tree, collnet direct, collnet chain, NVLS). This repeats the search of its src/graph/search.cc
// step by step and in single precision, so that it tries the same candidates first, gives up on the
// same ones and stops at the same place. A graph that is not searched for has no channels, no
// speeds and the distance LOC.
std::vector<NcclGraph> nccl_graphs(NcclSystem system, const NcclSearchOptions& options = {});

}  // namespace parplan
