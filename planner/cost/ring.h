#pragma once

#include "planner/cluster/group_network.h"
#include "planner/program/program.h"

namespace parplan {

// What a rank sends of the buffer S of its group's collective, at most: in a ring, in one node or
// over several. From the first rank to all others, and from these to it, a buffer goes through all.
double sent_share(InstructionKind kind, int ranks);

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
//   hops           i = min(N, n-1), twice as many of an all-reduce, cross between nodes for the
//                  rank to which most do (0 when N = 1), the others stay inside; tuning.cc counts
//                  N-1, aws-ofi-nccl's model (src/tuner/nccl_ofi_model.cpp) N
//   time           f (base + (k - i) l' + i L') + k S / (n B'); broadcast, reduce: with S / B'
//
// l', L' and base are the protocol's (nccl_protocol.h). Across nodes l' is at least the protocol's
// network overhead.
//   simple         B' = B. f is 1.4 for an all-reduce across nodes of at least 64 bytes per channel
//                  and rank, the constant of tuning.cc for sm_80 and later and for unknown GPUs,
//                  1.9 below; otherwise f is 1
//   low_latency    f = 1; B' = B/2, since half of every eight bytes is a flag, and at most
//                  low_latency_cap
//   LL128          f = 1; B' = 0.92 B. Across nodes base is that of rings inside NVLink, B' at most
//                  their cap (nvlink_rings.h), and the time is base + sqrt(hops^2 + sending^2):
//                  lines pass on as they come, so that hops and sending overlap. All-gathers of 2
//                  to 32 nodes of p5 (tests/golden/other_collectives.csv) take 10.5 us a step up
//                  to shards of 256 KiB and go over to the cap without a bend: 12, 14.5, 19 and 32
//                  us at 1, 2, 4 and 8 MiB, here 11, 13, 19 and 35
// Inside NVLink, where measured (nvlink_rings.h): base, l' and the caps of B' are those measured,
// and Simple takes S / (n C) more, in which each rank copies its own part.
// Source: NVIDIA/nccl src/graph/tuning.cc, ncclTopoTuneModel and ncclTopoGetAlgoTime; for
// measurements see docs/cost-model.md.
bool ring_applies(InstructionKind kind, BackendKind backend);
// Across nodes: where the network's rings take the protocol.
bool ring_simple_available(const GroupNetwork& network);
bool ring_low_latency_available(const GroupNetwork& network);
Seconds ring_simple_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);
Seconds ring_low_latency_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);
// From compute capability 7.0 on inside NVLink; across nodes where the network's rings take it and
// its base and cap inside NVLink are known.
bool ring_low_latency_128_available(const GroupNetwork& network);
Seconds ring_low_latency_128_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);

}  // namespace parplan
