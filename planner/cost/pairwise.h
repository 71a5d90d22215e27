#pragma once

#include "planner/cluster/group_network.h"
#include "planner/program/program.h"

namespace parplan {

// NCCL's all-to-all: each rank sends S/n bytes to every other one, all at once (ncclSend and
// ncclRecv in one group of calls).
//
//   steps          1
//   on the wire    (n-1) S/n bytes out of each rank, the least possible
//   leaving a node from each of its n/N ranks n - n/N transfers of s = S/n bytes; where a ring
//                  crosses between nodes once, for all ranks of the node, here every rank does by
//                  itself, at its part of the NICs, R = U N/n (U: uplink_bandwidth)
//   time           base + h + max((n-1)/n S/B, (n - n/N) (s + min(s, c)) / R)
//
// h is L' between nodes, else l'; base, l' and L' are those of a transfer (point_to_point.h). c is
// the part in which a transfer leaves a node (transfer_chunk): its first is copied to a buffer
// before the NIC takes it, and nothing else runs meanwhile. On 2 to 32 nodes of aws-p5 a transfer
// takes the same time whatever the number of nodes: 7, 20, 64 and 203 us at 128 KiB, 512 KiB, 2 MiB
// and 8 MiB (tests/golden/other_collectives.csv), here 5.5, 22, 55 and 186; over InfiniBand on
// eight nodes of eight H800, 5.3 to 6.0 us at 128 KiB (NVIDIA/nccl#1531).
// Inside NVLink, where measured (nvlink_rings.h): base + l - 0.6 us + (n-1)/n S/(u B) + S/(n C),
// with the share u of the links' rate, and C with which a rank copies its own part; LL's base where
// no rank sends more than 16 KiB to another (NCCL_P2P_LL_THRESHOLD, src/enqueue.cc).
bool pairwise_applies(InstructionKind kind, BackendKind backend);
Seconds pairwise_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);

// A gather or scatter is half of an all-to-all, to or from the first rank alone: base + h +
// (n-1)/n S/B. NCCL's is such sends and receives; PyTorch's DataParallel copies one part after
// another between devices, over the same links.
bool first_rank_applies(InstructionKind kind, BackendKind backend);
Seconds first_rank_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);

}  // namespace parplan
