#include "planner/cost/ring.h"

#include <algorithm>

#include "planner/cost/nccl_protocol.h"

namespace parplan {
namespace {

bool reduces_all(InstructionKind kind) {
  return kind == InstructionKind::all_reduce_sum || kind == InstructionKind::all_reduce_max;
}

Seconds ring_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network, const NcclProtocol& protocol,
                  double hop_factor, BytesPerSecond bandwidth) {
  const int passes = reduces_all(kind) ? 2 : 1;
  const double steps = passes * (network.ranks - 1);
  const double between_nodes = passes * (network.nodes - 1);
  const Seconds hops = (steps - between_nodes) * (network.intra_latency + protocol.ring_intra_excess) +
                       between_nodes * (network.inter_latency + protocol.ring_inter_excess);
  return protocol.ring_base + hops * hop_factor + (bytes / bandwidth) * (steps / network.ranks);
}

}  // namespace

bool ring_applies(InstructionKind kind, BackendKind backend) {
  return is_accelerator(backend) &&
         (reduces_all(kind) || kind == InstructionKind::all_gather || kind == InstructionKind::reduce_scatter);
}

Seconds ring_simple_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network) {
  const double hop_factor = reduces_all(kind) && network.nodes > 1 ? 1.4 : 1.0;
  return ring_time(kind, bytes, network, simple, hop_factor, network.ring_bandwidth);
}

Seconds ring_low_latency_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network) {
  BytesPerSecond bandwidth = network.ring_bandwidth * 0.5;
  if (network.nodes == 2) bandwidth = std::min(bandwidth, BytesPerSecond(39e9));
  if (network.nodes > 2) bandwidth = std::min(bandwidth, BytesPerSecond(20.4e9));
  return ring_time(kind, bytes, network, low_latency, 1.0, bandwidth);
}

}  // namespace parplan
