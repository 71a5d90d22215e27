#include "planner/cost/point_to_point.h"

#include "planner/cost/nccl_protocol.h"

namespace parplan {

bool point_to_point_applies(InstructionKind kind, BackendKind backend) {
  return is_accelerator(backend) && (kind == InstructionKind::send || kind == InstructionKind::receive);
}

Seconds point_to_point_time(InstructionKind, Bytes bytes, const GroupNetwork& network) {
  const Seconds hop = network.nodes > 1 ? network.inter_latency + simple.ring_inter_excess
                                        : ring_hop_inside(network, simple);
  return simple.ring_base + hop + bytes / network.ring_bandwidth;
}

}  // namespace parplan
