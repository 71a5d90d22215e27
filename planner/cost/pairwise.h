#pragma once

#include "planner/cluster/group_network.h"
#include "planner/program/program.h"

namespace parplan {

// NCCL's all-to-all: each rank sends S/n bytes to every other one, all at once (ncclSend and
// ncclRecv in one group of calls).
//
//   steps          1
//   on the wire    (n-1) S/n bytes out of each rank, the least possible
//   leaving a node from each of its n/N ranks (N-1)/N S bytes; where a ring crosses between nodes
//                  once, for all ranks of the node, here every rank does by itself
//   time           base + h + S/B max((n-1)/n, n/N (N-1)/N)      with h = L' between nodes, else l'
//
// base, l' and L' are those of a transfer (point_to_point.h). A GroupNetwork holds the rate of a
// ring: over several nodes the node's way out carries one ring at B, and therefore all bytes that
// the node's ranks send to other nodes at B; what stays inside is never more. On nodes of eight
// H100 with a ring of 360 GB/s, each GPU sends 45 GB/s to other nodes; 48 were measured on DGX
// H100, where the GPU's NIC sets the limit.
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
