#pragma once

#include <cstdint>
#include <limits>

#include "planner/cluster/group_network.h"
#include "planner/cost/nvlink_rings.h"

namespace parplan {

// NCCL moves data by one of several protocols. `simple` copies large chunks and then raises a flag;
// `low_latency` (LL) stores a flag beside every four bytes, so that nothing waits for a fence, at
// half the bandwidth; LL128 one beside every 120 bytes, where links deliver 128 bytes whole. Which
// of them rings and trees take between nodes, the network says (Network::ring_protocols).
//
// All constants: NVIDIA/nccl src/graph/tuning.cc at 5067397c (2.30.7), tables baseLatency and
// hwLatency. The hops of a GroupNetwork are hardware latencies; they stand for NCCL's latencies of
// an LL hop, and every other entry of hwLatency is kept as its excess over the ring's LL entry in
// the same row (NVLINK or PCI for hops inside a node, NET between).
//
// For a ring that leaves the node, a hop inside it takes at least the time in which the CPU's
// network thread serves a transfer (getNetOverhead: 2 us where all hosts have AMD's processors,
// else 1 us; three times as much for Simple). Where it was measured, that counts instead.
struct NcclProtocol {
  Seconds ring_base;
  Seconds ring_intra_excess;       // on NVLink
  Seconds ring_pcie_excess{};      // inside a node, where a hop leaves NVLink
  Seconds ring_inter_excess;
  Seconds ring_network_overhead;   // with processors that are not AMD's
  Seconds tree_base{};
  Seconds tree_intra_excess;
  Seconds tree_pcie_excess{};
  Seconds tree_inter_excess;
};

// The time of one hop inside a node under a protocol.
inline Seconds ring_hop_inside(const GroupNetwork& network, const NcclProtocol& protocol) {
  return network.intra_latency + (network.nvlink ? protocol.ring_intra_excess : protocol.ring_pcie_excess);
}
inline Seconds tree_hop_inside(const GroupNetwork& network, const NcclProtocol& protocol) {
  return network.intra_latency + (network.nvlink ? protocol.tree_intra_excess : protocol.tree_pcie_excess);
}

inline constexpr NcclProtocol low_latency = {
    .ring_base = Seconds(6.6e-6),
    .ring_intra_excess = Seconds(0.0),           // 0.6 - 0.6
    .ring_pcie_excess = Seconds(0.0),            // 1.0 - 1.0
    .ring_inter_excess = Seconds(0.0),           // 2.7 - 2.7
    .ring_network_overhead = Seconds(1e-6),
    .tree_base = Seconds(6.8e-6),
    .tree_intra_excess = Seconds(0.0),           // 0.6 - 0.6
    .tree_pcie_excess = Seconds(0.0),            // 1.0 - 1.0
    .tree_inter_excess = Seconds(2.3e-6),        // 5.0 - 2.7
};

// The least that a hop inside a node takes in a ring over several nodes. What was measured is that
// of LL.
inline Seconds ring_network_overhead(const GroupNetwork& network, const NcclProtocol& protocol) {
  if (network.post_overhead > Seconds(0.0))
    return network.post_overhead * (protocol.ring_network_overhead / low_latency.ring_network_overhead);
  return protocol.ring_network_overhead * (network.amd_hosts ? 2.0 : 1.0);
}

// LL128 on NVLink, from compute capability 7.0 on, and between nodes. No hop is over PCIe, and its
// trees have the base of rings inside NVLink (nvlink_rings.h).
inline constexpr NcclProtocol low_latency_128 = {
    .ring_base = Seconds(14e-6),
    .ring_intra_excess = Seconds(1.3e-6),        // 1.9 - 0.6
    .ring_inter_excess = Seconds(1.3e-6),        // 4.0 - 2.7
    .ring_network_overhead = Seconds(1e-6),
    .tree_intra_excess = Seconds(0.65e-6),       // 1.25 - 0.6
    .tree_inter_excess = Seconds(5.8e-6),        // 8.5 - 2.7
};
// The channels of rings and trees. A GroupNetwork does not hold their number; 16 is the result of
// NCCL's search for nodes with eight NICs.
inline constexpr std::int64_t assumed_channels = 16;

// The part of a message that is data, 120 of 128 bytes, which tuning.cc counts as 0.92 in rings and
// as it is in trees over nodes.
inline constexpr double low_latency_128_share = 0.92;
inline constexpr double low_latency_128_tree_share = 120.0 / 128.0;
// Whether rings or trees over several nodes that take `protocols` have it.
inline bool has_low_latency_128_between_nodes(const GroupNetwork& network, const Protocols& protocols) {
  return network.nodes > 1 && protocols.low_latency_128 && generation_of_rings(network) != nullptr;
}

inline constexpr NcclProtocol simple = {
    .ring_base = Seconds(8.4e-6),
    .ring_intra_excess = Seconds(2.8e-6),        // 3.4 - 0.6
    .ring_pcie_excess = Seconds(4.7e-6),         // 5.7 - 1.0
    .ring_inter_excess = Seconds(11.3e-6),       // 14 - 2.7
    .ring_network_overhead = Seconds(3e-6),
    .tree_base = Seconds(8.4e-6),
    .tree_intra_excess = Seconds(3.4e-6),        // 4.0 - 0.6
    .tree_pcie_excess = Seconds(3.0e-6),         // 4.0 - 1.0
    .tree_inter_excess = Seconds(11.3e-6),       // 14 - 2.7
};

// The time of the one hop from ncclSend to ncclRecv.
inline Seconds hop_of_a_transfer(const GroupNetwork& network) {
  return network.nodes > 1 ? network.inter_latency + simple.ring_inter_excess : ring_hop_inside(network, simple);
}

// llMaxBws of tuning.cc: the most that low latency reaches in a ring or a tree. In one node it
// depends on the GPUs; across nodes on the CPUs. It is infinite where the GPUs are unknown.
inline BytesPerSecond low_latency_cap(const GroupNetwork& network) {
  if (network.nodes > 2) return BytesPerSecond(network.amd_hosts ? 19.0e9 : 20.4e9);
  if (network.nodes == 2) return BytesPerSecond(network.amd_hosts ? 22.5e9 : 39e9);
  if (network.compute_capability == 0) return BytesPerSecond(std::numeric_limits<double>::infinity());
  if (network.compute_capability < 80) return BytesPerSecond(39e9);
  if (network.compute_capability < 90) return BytesPerSecond(87.7e9);
  return BytesPerSecond(network.compute_capability < 100 ? 141e9 : 282e9);
}

}  // namespace parplan
