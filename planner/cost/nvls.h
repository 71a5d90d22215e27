#pragma once

#include "planner/cluster/group_network.h"
#include "planner/program/program.h"

namespace parplan {

// NCCL's all-reduces by NVLink SHARP: switches add what members of a node send, and copy the sum to
// all of them. N' = n/N members in a node are the heads: each has 1/N' of the buffer added by
// reading it from all (multimem.ld_reduce) and has the sum written to all (multimem.st).
//
//   on the wire    S out of each member while the others' parts are added, and S/N' of sums; as
//                  much in: (1 + 1/N') S one way, where a ring sends 2(n-1)/n S
//   V'             nvls_bandwidth times NCCL's nvlsEfficiency, 0.85 for Hopper, 0.74 for Blackwell
//                  (tuning.cc): with it, 2(n-1)/n S/t is at most 490 GB/s on eight H100 (480
//                  measured; 460 on seven, 420 on five: NVIDIA/nccl issue 1455), 831 on eight B200
//                  (838)
//   chunks         of c = 16, 32, 64 or 128 KiB: NCCL takes larger ones for larger buffers
//                  (calcCollChunking, src/enqueue.cc). A chunk costs as much as k bytes more, and
//                  until the first of all channels have gone through the switches, F = c N'
//                  channels are under way
//   NVLS           one node: base + l + (1 + 1/N') (S + F) (c + k)/(c V'), with the c that takes
//                  the least
//   NVLS tree      several: heads are joined between nodes by double binary trees, all at once, and
//                  the slowest decides: the switches; the NICs, through which 2 S (S with two
//                  nodes) leave a node; and heads, none of which carries more than tuning.cc's
//                  perChMaxNVLSTreeBws. Each level of the tree has F under way, too: base + l +
//                  2 log2 N hops + the slowest's time for S + (1 + log2 N) F, at tuning.cc's
//                  correction by size for trees
//
// Channels are NCCL's (NVLS_NCHANNELS_SM90, _SM100_NVL, src/transport/nvls.cc); NVLink SHARP begins
// with compute capability 9.0. For all-gather and reduce-scatter rings are faster, by NCCL's own
// numbers. Base and k are fitted with the constants of nvlink_rings.h, to the same measurements.
bool nvls_applies(InstructionKind kind, BackendKind backend);
bool nvls_available(const GroupNetwork& network);
bool nvls_tree_available(const GroupNetwork& network);
Seconds nvls_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);
Seconds nvls_tree_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);

}  // namespace parplan
