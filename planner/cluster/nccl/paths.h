#pragma once

#include <utility>
#include <vector>

#include "planner/cluster/nccl/system.h"

namespace parplan {

// A way through NCCL's system: (node, place of the link among the node's links), from the source
// on.
struct NcclPath {
  std::vector<std::pair<int, int>> links;
  float bandwidth = 0.0F;  // least over links, GB/s
  NcclDistance type = NcclDistance::unreachable;

  int hops() const { return static_cast<int>(links.size()); }
};

// The paths on which NCCL's search counts (src/graph/paths.cc): of the nearest class the widest, of
// those the shortest; then through the CPU where GPUs may not reach each other directly, through
// the nearest GPU to NICs beyond the PCIe switch (PXN), through the CPU to NICs without direct
// RDMA.
struct NcclPaths {
  std::vector<std::vector<NcclPath>> to;  // [target: GPU, NVSwitch, CPU or network][from]; empty for other targets
  // The NICs that each GPU uses in turn, by its place in NcclSystem::gpus: places in
  // NcclSystem::nets.
  std::vector<std::vector<int>> nets_of;
  std::vector<int> gpu_of;  // the GPU that each network is for; places in the lists, -1 for none

  const NcclPath& between(int from, int target) const { return to[target][from]; }
};

NcclPaths nccl_paths(const NcclSystem& system);

// The nearest of `candidates` from `from` (nodes), as places among the candidates: those of the
// greatest width, of these the nearest.
std::vector<int> nccl_nearest(const NcclPaths& paths, int from, const std::vector<int>& candidates);

}  // namespace parplan
