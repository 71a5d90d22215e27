#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/cluster/nccl/graph.h"
#include "planner/cluster/nccl/xml_files.h"

namespace parplan {

enum class NcclNodeType { gpu, pcie_switch, nvswitch, cpu, nic, net };

// A link out of a node, in one direction. The types are the distances local, nvlink, chip_to_chip,
// one_switch (any PCIe), sockets and network. Bandwidths are GB/s in single precision, as in NCCL,
// whose search compares what rounding leaves.
struct NcclLink {
  NcclDistance type{};
  float bandwidth = 0.0F;
  int to = 0;
};

struct NcclNode {
  NcclNodeType type{};
  std::int64_t id = 0;
  std::vector<NcclLink> links;  // widest first, the link up to the CPU last
  // GPUs only; networks have `dev`, too.
  int dev = 0;
  int rank = 0;
  int compute_capability = 0;
  bool direct_rdma = false;
  // Networks only: the links out of the node.
  std::uint64_t asic = 0;
  int port = 0;
  float bandwidth = 0.0F;
  float latency = 0.0F;
  bool collectives = false;
  std::optional<int> rail = {};
  std::optional<int> plane = {};
  // CPUs only.
  CpuArchitecture architecture{};
  CpuVendor vendor{};
  // PCIe switches only: vendor, device and subsystem.
  std::uint64_t device = 0;
};

// NCCL's view of a node before it looks for channels (src/graph/topo.cc): all NVSwitches are one, a
// CPU is a NUMA node, Broadcom's two-level PCIe switches are flattened.
struct NcclSystem {
  std::vector<NcclNode> nodes;
  std::vector<int> gpus;  // in the order of the file
  std::vector<int> switches;
  std::vector<int> nvswitches;
  std::vector<int> cpus;
  std::vector<int> nics;
  std::vector<int> nets;
  bool several_nodes = false;  // whether channels go through the network
};

// GPUs without a rank are left out, as in NCCL; so are NICs without <net>.
NcclSystem nccl_system(const NcclTopology& topology);

// NCCL's view of a node that parplan knows from elsewhere. NodeKind names no CPU: it counts as one
// for which NCCL has no rules. Where the node has no host bridge, all PCIe ends at one CPU. Throws
// ConfigError for devices of unknown compute capability (import.h has the table) and for nodes
// without GPUs.
NcclSystem nccl_system(const NodeKind& node, const DeviceKind& device);

}  // namespace parplan
