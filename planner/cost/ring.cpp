#include "planner/cost/ring.h"

#include <algorithm>
#include <cmath>

#include "planner/cost/nccl_protocol.h"
#include "planner/cost/nvlink_rings.h"

namespace parplan {
namespace {

bool reduces_all(InstructionKind kind) {
  return kind == InstructionKind::all_reduce_sum || kind == InstructionKind::all_reduce_max;
}

// From the first rank to all others, or from these to it, as one long pipeline.
bool goes_through(InstructionKind kind) {
  return kind == InstructionKind::broadcast || kind == InstructionKind::reduce_sum;
}

// From this size on every channel of every rank has a piece of 64 bytes. Below it low latency is
// faster at most rates, so little depends on it.
Bytes plateau_begin(const GroupNetwork& network) {
  return Bytes(64 * assumed_channels * network.ranks);
}

// One node, hops of `inside` each.
Seconds inside_node(InstructionKind kind, Bytes bytes, const GroupNetwork& network, Seconds base, Seconds inside,
                    BytesPerSecond bandwidth) {
  const double steps = (reduces_all(kind) ? 2.0 : 1.0) * (network.ranks - 1);
  return base + steps * inside + (bytes / bandwidth) * sent_share(kind, network.ranks);
}
Seconds measured_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network,
                      const NvlinkRings::Protocol& measured, BytesPerSecond bandwidth) {
  const Seconds inside = network.intra_latency + (measured.hop - measured_link_latency);
  return inside_node(kind, bytes, network, measured.base, inside, bandwidth);
}

Seconds hops_around(InstructionKind kind, const GroupNetwork& network, const NcclProtocol& protocol) {
  const int passes = reduces_all(kind) ? 2 : 1;
  const double steps = passes * (network.ranks - 1);
  // A rank waits for all hops of its ring but one, and for some rank that one is inside a node.
  // tuning.cc counts one hop less between nodes, aws-ofi-nccl's model as many as here.
  const double between_nodes = network.nodes == 1 ? 0.0 : passes * std::min(network.nodes, network.ranks - 1);
  Seconds inside = ring_hop_inside(network, protocol);
  if (network.nodes > 1) inside = std::max(inside, ring_network_overhead(network, protocol));
  // With one rank per node tuning.cc takes the tree's row between nodes.
  const Seconds between = network.inter_latency +
                          (network.ranks == network.nodes ? protocol.tree_inter_excess : protocol.ring_inter_excess);
  return (steps - between_nodes) * inside + between_nodes * between;
}

Seconds ring_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network, const NcclProtocol& protocol,
                  double latency_factor, BytesPerSecond bandwidth) {
  const Seconds latency = protocol.ring_base + hops_around(kind, network, protocol);
  return latency * latency_factor + (bytes / bandwidth) * sent_share(kind, network.ranks);
}

}  // namespace

double sent_share(InstructionKind kind, int ranks) {
  return goes_through(kind) ? 1.0 : (reduces_all(kind) ? 2.0 : 1.0) * (ranks - 1) / ranks;
}

bool ring_applies(InstructionKind kind, BackendKind backend) {
  return is_accelerator(backend) &&
         (reduces_all(kind) || goes_through(kind) || kind == InstructionKind::all_gather ||
          kind == InstructionKind::reduce_scatter);
}

bool ring_simple_available(const GroupNetwork& network) {
  return network.nodes == 1 || network.ring_protocols.simple;
}

Seconds ring_simple_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network) {
  if (const NvlinkRings* rings = measured_rings(network))
    return measured_time(kind, bytes, network, rings->simple, network.ring_bandwidth) +
           (goes_through(kind) ? Seconds(0.0) : (bytes / rings->copy) / network.ranks);
  const bool on_plateau = reduces_all(kind) && network.nodes > 1 && bytes >= plateau_begin(network);
  const double plateau = network.compute_capability != 0 && network.compute_capability < 80 ? 1.9 : 1.4;
  return ring_time(kind, bytes, network, simple, on_plateau ? plateau : 1.0, network.ring_bandwidth);
}

bool ring_low_latency_available(const GroupNetwork& network) {
  return network.nodes == 1 || network.ring_protocols.low_latency;
}

Seconds ring_low_latency_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network) {
  const BytesPerSecond half = network.ring_bandwidth * 0.5;
  if (const NvlinkRings* rings = measured_rings(network))
    return measured_time(kind, bytes, network, rings->low_latency, std::min(half, rings->low_latency_cap));
  return ring_time(kind, bytes, network, low_latency, 1.0, std::min(half, low_latency_cap(network)));
}

bool ring_low_latency_128_available(const GroupNetwork& network) {
  if (network.nodes > 1) return has_low_latency_128_between_nodes(network, network.ring_protocols);
  return network.nvlink && network.compute_capability >= 70;
}

Seconds ring_low_latency_128_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network) {
  const BytesPerSecond data = network.ring_bandwidth * low_latency_128_share;
  if (const NvlinkRings* rings = measured_rings(network))
    return measured_time(kind, bytes, network, rings->low_latency_128, std::min(data, rings->low_latency_128_cap));
  if (network.nodes == 1)
    return inside_node(kind, bytes, network, low_latency_128.ring_base, ring_hop_inside(network, low_latency_128),
                       data);
  const NvlinkRings& rings = *generation_of_rings(network);
  const Seconds hops = hops_around(kind, network, low_latency_128);
  const Seconds sending = (bytes / std::min(data, rings.low_latency_128_cap)) * sent_share(kind, network.ranks);
  return rings.low_latency_128.base + Seconds(std::hypot(hops.value, sending.value));
}

}  // namespace parplan
