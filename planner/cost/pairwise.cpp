#include "planner/cost/pairwise.h"

#include <algorithm>

#include "planner/cost/nccl_protocol.h"

namespace parplan {

bool pairwise_applies(InstructionKind kind, BackendKind backend) {
  return is_accelerator(backend) && kind == InstructionKind::all_to_all;
}

Seconds pairwise_time(InstructionKind, Bytes bytes, const GroupNetwork& network) {
  const double ranks = network.ranks, nodes = network.nodes;
  const double to_others = (ranks - 1) / ranks;
  const double out_of_a_node = ranks / nodes * (nodes - 1) / nodes;
  const Seconds hop = hop_of_a_transfer(network);
  return simple.ring_base + hop + (bytes / network.ring_bandwidth) * std::max(to_others, out_of_a_node);
}

}  // namespace parplan
