#include "planner/cost/ring.h"

#include <algorithm>

#include "planner/cost/nccl_protocol.h"

namespace parplan {
namespace {

bool reduces_all(InstructionKind kind) {
  return kind == InstructionKind::all_reduce_sum || kind == InstructionKind::all_reduce_max;
}

// From this size on every channel of every rank has a piece of 64 bytes. A GroupNetwork does not
// hold the number of channels; 16 is the result of NCCL's search for nodes with eight NICs. Below
// this buffer low latency is faster at most rates, so little depends on it.
Bytes plateau_begin(const GroupNetwork& network) {
  constexpr std::int64_t channels = 16;
  return Bytes(64 * channels * network.ranks);
}

Seconds ring_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network, const NcclProtocol& protocol,
                  double latency_factor, BytesPerSecond bandwidth) {
  const int passes = reduces_all(kind) ? 2 : 1;
  const double steps = passes * (network.ranks - 1);
  const double between_nodes = passes * (network.nodes - 1);
  Seconds inside = ring_hop_inside(network, protocol);
  if (network.nodes > 1) inside = std::max(inside, protocol.ring_network_overhead);
  // With one rank per node tuning.cc takes the tree's row between nodes.
  const Seconds between = network.inter_latency +
                          (network.ranks == network.nodes ? protocol.tree_inter_excess : protocol.ring_inter_excess);
  const Seconds latency = protocol.ring_base + (steps - between_nodes) * inside + between_nodes * between;
  return latency * latency_factor + (bytes / bandwidth) * (steps / network.ranks);
}

}  // namespace

bool ring_applies(InstructionKind kind, BackendKind backend) {
  return is_accelerator(backend) &&
         (reduces_all(kind) || kind == InstructionKind::all_gather || kind == InstructionKind::reduce_scatter);
}

Seconds ring_simple_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network) {
  const bool on_plateau = reduces_all(kind) && network.nodes > 1 && bytes >= plateau_begin(network);
  const double plateau = network.compute_capability != 0 && network.compute_capability < 80 ? 1.9 : 1.4;
  return ring_time(kind, bytes, network, simple, on_plateau ? plateau : 1.0, network.ring_bandwidth);
}

Seconds ring_low_latency_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network) {
  const BytesPerSecond bandwidth = std::min(network.ring_bandwidth * 0.5, low_latency_cap(network));
  return ring_time(kind, bytes, network, low_latency, 1.0, bandwidth);
}

}  // namespace parplan
