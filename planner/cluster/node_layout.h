#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/cluster/cluster.h"

namespace parplan {

// NCCL's figures for links that a file names without numbers: NVIDIA/nccl src/graph/topo.h and
// tuning.cc at 5067397c. Latencies are those of its LL protocol on rings, the least that a hop
// costs, divided among the links of a hop.
inline constexpr Seconds nvlink_hop_latency{0.6e-6};   // device to device, hwLatencies NVLINK Ring LL
inline constexpr Seconds pcie_link_latency{0.5e-6};    // two make a hop: PCI Ring LL 1.0 us
inline constexpr Seconds network_latency{0.7e-6};      // NIC to NIC; with four PCIe links NET Ring LL 2.7 us
inline constexpr BytesPerSecond socket_bandwidth{16e9};         // between sockets, AMD; Intel 10 (Skylake) to 40
inline constexpr BytesPerSecond within_socket_bandwidth{5000e9};  // LOC_BW: no limit
// PCIe, one way: lanes * {15, 30, 60, 120, 240, 480} / 80 GB/s for generations 1 to 6 (x16 of
// 3/4/5: 12/24/48).
BytesPerSecond pcie_bandwidth(int generation, int lanes);
// NICs reach 24 GB/s of 200 Gbit/s and 48 of 400: all-reduce on DGX A100 192 GB/s with eight NICs
// (NVIDIA/nccl issue 812), all-to-all on DGX H100 48 GB/s a GPU (NVIDIA GTC 2025, s72583).
inline constexpr double nic_reached_share = 0.96;

// A node described in a few words, as in a cluster.yaml.
enum class Intra {
  nvswitch,     // every device to one switch
  nvlink_mesh,  // every pair of devices directly
  pcie,         // every device to one host bridge
  memory,       // cores that share memory
};
struct NicLayout {
  int count = 0;
  BytesPerSecond line_rate;  // of one NIC
  // What one NIC was measured to reach; if absent, nic_reached_share of the line rate.
  std::optional<BytesPerSecond> reached = {};
};
struct NodeLayout {
  std::string name;
  int devices = 1;
  Intra intra{};
  std::optional<BytesPerSecond> bandwidth;  // of one link of `intra`; if absent, what the device's links reach
  std::optional<Seconds> latency;           // of one hop between devices
  std::optional<NicLayout> nics;
};

// The reason why such a node cannot exist, or nothing.
std::optional<std::string> problem_with(const NodeLayout& layout, const DeviceKind& device);
// NICs are behind PCIe switches, each with its share of the devices (as many switches as the
// smaller of the two numbers, which must divide the other), or at the host bridge with `pcie`.
NodeKind build_node(const NodeLayout& layout, const DeviceKind& device);

// Add vertices and links one by one; each vertex function returns the new vertex.
int add_vertex(NodeKind& node, std::string name, VertexKind kind);
void add_link(NodeKind& node, int a, int b, BytesPerSecond bandwidth, Seconds latency, std::string kind,
              std::optional<BytesPerSecond> line_rate = {});

// The node with some of its devices (local numbers), in this order; switches, NICs and their links
// stay.
NodeKind with_devices(const NodeKind& node, const std::vector<int>& devices);
NodeKind first_devices(const NodeKind& node, int devices);

}  // namespace parplan
