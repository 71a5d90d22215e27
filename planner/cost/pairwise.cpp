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
  const Seconds hop = hop_of_a_transfer(network);
  const Seconds inside = (bytes / network.ring_bandwidth) * to_others;
  if (network.nodes == 1) return simple.ring_base + hop + inside;
  // Each rank's transfers to the other nodes, one after another: nothing runs beside the first part
  // of a transfer, which is copied to the buffer that the NIC reads before it goes out.
  const double others = ranks - ranks / nodes;
  const double out = static_cast<double>(bytes.count) / ranks;
  const double first_part = std::min(out, static_cast<double>(network.transfer_chunk.count));
  const BytesPerSecond of_a_rank = network.uplink_bandwidth * (nodes / ranks);
  const Seconds leaving(others * (out + first_part) / of_a_rank.value);
  return simple.ring_base + hop + std::max(inside, leaving);
}

}  // namespace parplan
