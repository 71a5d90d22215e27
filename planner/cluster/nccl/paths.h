#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "planner/cluster/nccl/system.h"

namespace parplan {

// A path through NCCL's system: (node, index of the link among the node's links), from the source
// on.
struct NcclPath {
  std::vector<std::pair<int, int>> links;
  float bandwidth = 0.0F;  // least over links, GB/s
  NcclDistance type = NcclDistance::unreachable;

  int hops() const { return static_cast<int>(links.size()); }
};

// The paths that NCCL's search uses (src/graph/paths.cc): the nearest class, then the widest, then
// the shortest; after that through the CPU where GPUs may not reach each other directly, through
// the nearest GPU to NICs beyond the PCIe switch (PXN), and through the CPU to NICs without direct
// RDMA.
struct NcclPaths {
  std::vector<std::vector<NcclPath>> to;  // [target: GPU, NVSwitch, CPU or network][from]; empty for other targets
  // The NICs that each GPU uses in turn, by its index in NcclSystem::gpus: indices into
  // NcclSystem::nets.
  std::vector<std::vector<int>> nets_of;
  std::vector<std::optional<int>> gpu_of;  // the GPU that each network is for: index in the list

  const NcclPath& between(int from, int target) const { return to[target][from]; }
};

NcclPaths nccl_paths(const NcclSystem& system);

// The nearest of `candidates` from `from` (nodes), as indices of the candidates: those with the
// greatest width, and of these the nearest.
std::vector<int> nccl_nearest(const NcclPaths& paths, int from, const std::vector<int>& candidates);

}  // namespace parplan
