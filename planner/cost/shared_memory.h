#pragma once

#include "planner/cluster/group_network.h"
#include "planner/program/program.h"

namespace parplan {

// The local communicator (runtime/comm/local): ranks are threads of one process, and each reads the
// others' chunks directly from shared memory. A rank that has finished its part waits for the
// others once per pass.
//
//   passes         p = 1, or 2 (all-reduce: each rank sums its chunk, then reads the others')
//   read           p (n-1) S/n bytes by each rank; broadcast, reduce: (n-1) S by all together; send
//                  and receive: S by the receiver
//   time           p h + p (n-1) S / (n B); broadcast, reduce: h + (n-1) S / B; send, receive: h +
//                  S / B; with h = max(l, L)
//
// In a measured cluster, the probe fits l and B to all-reduces of several sizes with this formula.
bool direct_applies(InstructionKind kind, BackendKind backend);
Seconds direct_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);

}  // namespace parplan
