#pragma once

#include "planner/cluster/group_network.h"
#include "planner/program/program.h"

namespace parplan {

// Ring all-gather, reduce-scatter, all-reduce, broadcast and reduce as NCCL runs them.
//
// The buffer is cut into n chunks. In each of n-1 steps every rank sends one chunk of S/n bytes to
// its neighbour: after n-1 steps every rank has every chunk (all-gather), or one chunk's sum
// (reduce-scatter). An all-reduce is a reduce-scatter and then an all-gather.
//
// A broadcast goes around from the first rank to the last in small pieces, one behind the other,
// and a reduce the other way round: S bytes pass each link, after n-1 hops of the first piece.
//
//   steps          k = n-1 (all others), 2(n-1) (all-reduce)
//   on the wire    k S/n bytes out of each rank, the least possible (Patarasuk and Yuan, JPDC 2009)
//   hops           i = N-1, 2(N-1) of the steps cross between nodes (0 when N = 1), the others stay
//                  inside
//   time           f (base + (k - i) l' + i L') + k S / (n B'); broadcast, reduce: with S / B'
//
// l', L' and base are the protocol's (nccl_protocol.h). Across nodes l' is at least the protocol's
// network overhead.
//   simple         B' = B. f is 1.4 for an all-reduce across nodes of at least 64 bytes per channel
//                  and rank, the constant of tuning.cc for sm_80 and later and for unknown GPUs,
//                  1.9 below; otherwise f is 1
//   low_latency    f = 1; B' = B/2, since half of every eight bytes is a flag, and at most
//                  low_latency_cap
//   LL128          f = 1; B' = 0.92 B
// Inside NVLink, where measured (nvlink_rings.h): base, l' and the caps of B' are those measured,
// and Simple takes S / (n C) more, in which each rank copies its own part.
// Source: NVIDIA/nccl src/graph/tuning.cc, ncclTopoTuneModel and ncclTopoGetAlgoTime; for
// measurements see docs/cost-model.md.
bool ring_applies(InstructionKind kind, BackendKind backend);
Seconds ring_simple_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);
Seconds ring_low_latency_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);
Seconds ring_low_latency_128_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);

}  // namespace parplan
