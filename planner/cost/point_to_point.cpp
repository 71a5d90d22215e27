#include "planner/cost/point_to_point.h"

#include "planner/cost/nccl_protocol.h"

namespace parplan {

bool point_to_point_applies(InstructionKind kind, BackendKind backend) {
  return is_accelerator(backend) && (kind == InstructionKind::send || kind == InstructionKind::receive);
}

Seconds point_to_point_time(InstructionKind, Bytes bytes, const GroupNetwork& network) {
  return simple.ring_base + hop_of_a_transfer(network) + bytes / network.ring_bandwidth;
}

}  // namespace parplan
