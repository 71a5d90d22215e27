#include "planner/cost/shared_memory.h"

#include <algorithm>

namespace parplan {

bool direct_applies(InstructionKind kind, BackendKind backend) {
  return backend == BackendKind::cpu && kind != InstructionKind::kernel;
}

Seconds direct_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network) {
  const Seconds hop = std::max(network.intra_latency, network.inter_latency);
  if (kind == InstructionKind::send || kind == InstructionKind::receive) return hop + bytes / network.ring_bandwidth;
  const bool whole = kind == InstructionKind::broadcast || kind == InstructionKind::reduce_sum;
  const double passes = kind == InstructionKind::all_reduce_sum || kind == InstructionKind::all_reduce_max ? 2.0 : 1.0;
  // The first rank adds up or hands out whole buffers; all memory carries is what the others read.
  const double part = whole ? network.ranks - 1.0 : static_cast<double>(network.ranks - 1) / network.ranks;
  return passes * (hop + part * (bytes / network.ring_bandwidth));
}

}  // namespace parplan
