#pragma once

#include <vector>

namespace parplan {

// How far apart two ends of a node are, best first, in NCCL's words (NVIDIA/nccl
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

// What NCCL's files call the graphs: the `id` of each.
enum class NcclAlgorithm { ring = 0, tree = 1, collnet_chain = 2, nvls = 3, collnet_direct = 4 };
const char* name(NcclAlgorithm algorithm);  // "ring", "tree", "collnet chain", ...

// One channel inside a node: GPUs in the order in which data passes them (NVLS: the head alone),
// and where it comes from the network and goes back to it (empty inside one node). Both by NCCL's
// `dev`.
struct NcclChannel {
  std::vector<int> gpus;
  std::vector<int> nets;
  bool operator==(const NcclChannel&) const = default;
};

// The channels of one algorithm and what each of them moves, in GB/s.
struct NcclGraph {
  NcclAlgorithm algorithm{};
  NcclPattern pattern{};
  int cross_nic = 0;          // 0: a channel comes from and goes to the same rail; 2: pairs of channels swap NICs
  float speed_intra = 0.0F;
  float speed_inter = 0.0F;
  float latency_inter = 0.0F;  // us
  NcclDistance type_intra{};   // the farthest that its GPUs are apart
  NcclDistance type_inter{};   // ... from their NICs
  bool same_channels = false;  // all channels have the first one's order
  std::vector<NcclChannel> channels;
  bool operator==(const NcclGraph&) const = default;

  double bandwidth_intra() const {
    return static_cast<double>(channels.size()) * static_cast<double>(speed_intra);
  }  // GB/s
  double bandwidth_inter() const { return static_cast<double>(channels.size()) * static_cast<double>(speed_inter); }
};

}  // namespace parplan
