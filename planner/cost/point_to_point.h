#pragma once

#include "planner/cluster/group_network.h"
#include "planner/program/program.h"

namespace parplan {

// From ncclSend to ncclRecv: one hop of a ring.
//
//   steps          1
//   on the wire    S bytes
//   time           base + h + S / B      with h = L' between nodes, else l'
//
// base, l' and L' are those of the Simple protocol (nccl_protocol.h): tuning.cc has no row for
// point-to-point; the kernel and the protocol are those of a ring's step.
bool point_to_point_applies(InstructionKind kind, BackendKind backend);
Seconds point_to_point_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);

}  // namespace parplan
