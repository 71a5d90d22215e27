#pragma once

#include "planner/cluster/mesh.h"
#include "planner/program/program.h"

namespace parplan {

// What the local communicator does (runtime/comm/local): ranks are threads of one process, and each
// reads the others' chunks straight from shared memory. A rank that has finished its part waits for
// the others once a pass.
//
//   passes         p = 1 (all-gather, reduce-scatter), 2 (all-reduce: each rank sums its chunk,
//   then reads the others') read           p (n-1) S/n bytes by each rank; send and receive: S by
//   the receiver time           p h + p (n-1) S / (n B);   send, receive: h + S / B      with h =
//   max(l, L)
//
// l and B of a measured cluster are fitted by the probe from all-reduces of several sizes with this
// same formula.
bool direct_applies(InstructionKind kind, BackendKind backend);
Seconds direct_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);

}  // namespace parplan
