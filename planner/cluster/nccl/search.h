#pragma once

#include <vector>

#include "planner/cluster/nccl/system.h"

namespace parplan {

struct NcclSearchOptions {
  bool collnet = false;  // whether the network's switches reduce: the collnet graphs are sought too
  bool nvls =
      true;  // whether GPUs and driver multicast by NVSwitch (from compute capability 9.0 on); off: no such graph
};

// The channels that NCCL finds, algorithm by algorithm in the order in which it writes them (ring,
// tree, collnet direct, collnet chain, NVLS): its search of src/graph/search.cc, step by step and
// in single precision, so that what it tries first, what it gives up on and where it stops are the
// same. A graph that is not sought has no channels, no speeds and the distance LOC.
std::vector<NcclGraph> nccl_graphs(NcclSystem system, const NcclSearchOptions& options = {});

}  // namespace parplan
