#pragma once

#include "planner/base/units.h"

namespace parplan {

// NCCL moves data by one of several protocols. `simple` copies large chunks and then raises a flag; `low_latency`
// (LL) stores a flag beside every four bytes, so that nothing waits for a fence, at half the bandwidth. LL128 is
// left out: whether it is on depends on link kinds that a GroupNetwork does not know.
//
// All constants: NVIDIA/nccl src/graph/tuning.cc at 5067397c (2.30.7), tables baseLatency and hwLatency. The hops
// of a GroupNetwork are hardware latencies; they stand for what NCCL counts per LL hop, and every other entry of
// hwLatency is kept as its excess over the ring's LL entry in the same row (NVLINK for hops inside a node, NET between).
struct NcclProtocol {
  Seconds ring_base;
  Seconds ring_intra_excess;
  Seconds ring_inter_excess;
  Seconds tree_base;
  Seconds tree_intra_excess;
  Seconds tree_inter_excess;
};

inline constexpr NcclProtocol low_latency = {
    .ring_base = Seconds(6.6e-6),
    .ring_intra_excess = Seconds(0.0),           // 0.6 - 0.6
    .ring_inter_excess = Seconds(0.0),           // 2.7 - 2.7
    .tree_base = Seconds(6.8e-6),
    .tree_intra_excess = Seconds(0.0),           // 0.6 - 0.6
    .tree_inter_excess = Seconds(2.3e-6),        // 5.0 - 2.7
};

inline constexpr NcclProtocol simple = {
    .ring_base = Seconds(8.4e-6),
    .ring_intra_excess = Seconds(2.8e-6),        // 3.4 - 0.6
    .ring_inter_excess = Seconds(11.3e-6),       // 14 - 2.7
    .tree_base = Seconds(8.4e-6),
    .tree_intra_excess = Seconds(3.4e-6),        // 4.0 - 0.6
    .tree_inter_excess = Seconds(11.3e-6),       // 14 - 2.7
};

}  // namespace parplan
