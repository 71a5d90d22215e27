#include "planner/cost/pairwise.h"

#include <algorithm>

#include "planner/cost/nccl_protocol.h"
#include "planner/cost/nvlink_rings.h"

namespace parplan {

bool pairwise_applies(InstructionKind kind, BackendKind backend) {
  return is_accelerator(backend) && kind == InstructionKind::all_to_all;
}

bool first_rank_applies(InstructionKind kind, BackendKind backend) {
  return is_accelerator(backend) && (kind == InstructionKind::gather || kind == InstructionKind::scatter);
}

Seconds first_rank_time(InstructionKind, Bytes bytes, const GroupNetwork& network) {
  const double of_others = (network.ranks - 1.0) / network.ranks;
  return simple.ring_base + hop_of_a_transfer(network) + of_others * (bytes / network.ring_bandwidth);
}

Seconds pairwise_time(InstructionKind, Bytes bytes, const GroupNetwork& network) {
  const double ranks = network.ranks, nodes = network.nodes;
  const double to_others = (ranks - 1) / ranks;
  if (const NvlinkRings* measured = measured_rings(network)) {
    constexpr std::int64_t low_latency_most = 16384;
    const Seconds base =
        bytes.count <= low_latency_most * network.ranks ? measured->pairs_low_latency_base : measured->pairs_base;
    return base + (network.intra_latency - measured_link_latency) +
           to_others * (bytes / (network.ring_bandwidth * measured->pairs_share)) +
           (bytes / measured->pairs_copy) / ranks;
  }
  const double out_of_a_node = ranks / nodes * (nodes - 1) / nodes;
  const Seconds hop = hop_of_a_transfer(network);
  return simple.ring_base + hop + (bytes / network.ring_bandwidth) * std::max(to_others, out_of_a_node);
}

}  // namespace parplan
