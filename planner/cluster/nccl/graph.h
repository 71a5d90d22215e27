#pragma once

#include <vector>

namespace parplan {

// Limits in NCCL's sources: LOC_BW in GB/s, MAXCHANNELS.
inline constexpr float nccl_no_limit = 5000.0F;
inline constexpr int nccl_most_channels = 64;

// The distance between two ends of a node, best first, in NCCL's terms (NVIDIA/nccl
// src/include/graph.h at 5067397c).
enum class NcclDistance {
  local,            // LOC: within a GPU
  nvlink,           // NVL
  nvlink_bridge,    // NVB: NVLink through a third GPU
  chip_to_chip,     // C2C
  one_switch,       // PIX: at most one PCIe switch
  switches,         // PXB: several PCIe switches, no host bridge
  chip_and_pcie,    // P2C: C2C to the CPU, PCIe to the NIC
  other_gpu,        // PXN: NVLink to the GPU nearest to the NIC, then its PCIe
  host_bridge,      // PHB
  sockets,          // SYS
  network,          // NET
  unreachable,      // DIS
};
const char* name(NcclDistance distance);  // "LOC", "NVL", ...

enum class NcclPattern { balanced_tree = 1, split_tree = 2, tree = 3, ring = 4, nvls = 5, collnet_direct = 6 };

// The `id` of each graph in NCCL's files.
enum class NcclAlgorithm { ring = 0, tree = 1, collnet_chain = 2, nvls = 3, collnet_direct = 4 };
const char* name(NcclAlgorithm algorithm);  // "ring", "tree", "collnet chain", ...

// One channel inside a node: GPUs in the order in which data passes them (NVLS: the head alone),
// and the networks where it enters and leaves the node (empty with one node). Both are NCCL's
// `dev`.
struct NcclChannel {
  std::vector<int> gpus;
  std::vector<int> nets;
  bool operator==(const NcclChannel&) const = default;
};

// The channels of one algorithm and the bandwidth of each of them, in GB/s.
struct NcclGraph {
  NcclAlgorithm algorithm{};
  NcclPattern pattern{};
  int cross_nic = 0;  // 0: a channel comes from and goes to the same rail; 2: pairs of channels swap NICs
  float speed_intra = 0.0F;
  float speed_inter = 0.0F;
  float latency_inter = 0.0F;  // us
  NcclDistance type_intra{};   // the greatest distance between its GPUs
  NcclDistance type_inter{};   // ... from their NICs
  bool same_channels = false;  // whether all channels have the order of the first one
  std::vector<NcclChannel> channels;
  bool operator==(const NcclGraph&) const = default;

  double bandwidth_intra() const {
    return static_cast<double>(channels.size()) * static_cast<double>(speed_intra);
  }  // GB/s
  double bandwidth_inter() const { return static_cast<double>(channels.size()) * static_cast<double>(speed_inter); }
};

}  // namespace parplan
