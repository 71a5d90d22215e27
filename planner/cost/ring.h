#pragma once

#include "planner/cluster/mesh.h"
#include "planner/program/program.h"

namespace parplan {

// Ring all-gather, reduce-scatter and all-reduce as NCCL runs them.
//
// The buffer is cut into n chunks. In each of n-1 steps every rank sends one chunk of S/n bytes to its neighbour:
// after n-1 steps every rank has every chunk (all-gather), or one chunk's sum (reduce-scatter). An all-reduce is a
// reduce-scatter and then an all-gather.
//
//   steps          k = n-1 (all-gather, reduce-scatter), 2(n-1) (all-reduce)
//   on the wire    k S/n bytes out of each rank, which is the least possible (Patarasuk and Yuan, JPDC 2009)
//   hops           i = N-1, 2(N-1) of the steps cross between nodes (0 when N = 1), the others stay inside
//   time           base + (k - i) l' + i L' + k S / (n B')
//
// simple: B' = B; l', L' and base of the protocol (nccl_protocol.h); hops of an all-reduce over several nodes count
//   1.4 times, the constant of tuning.cc for sm_80 and later.
// low_latency: B' = B/2, half of every eight bytes being flag, and over several nodes at most 39 GB/s (2 nodes) or
//   20.4 GB/s: llMaxBw, row Volta, which tuning.cc takes for every GPU there.
//   Inside a node the cap depends on the GPU (39 to 282 GB/s) and is left out.
// Source: NVIDIA/nccl src/graph/tuning.cc, ncclTopoTuneModel and ncclTopoGetAlgoTime; against measurements, see
// docs/cost-model.md.
bool ring_applies(InstructionKind kind, BackendKind backend);
Seconds ring_simple_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);
Seconds ring_low_latency_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);

}  // namespace parplan
