#pragma once

#include "planner/cluster/group_network.h"
#include "planner/program/program.h"

namespace parplan {

// NCCL's double binary tree all-reduce: two trees over the nodes, each carrying half of the buffer,
// with a chain through the ranks of a node; a reduction up and a broadcast down.
//
//   steps          2((n/N - 1) + log2 N)
//   on the wire    2 S bytes out of each inner rank, once up and once down; leaves of one tree are
//                  inner in the other (Sanders, Speck, Traeff, "Two-tree algorithms for full
//                  bandwidth broadcast, reduction and scan", 2009)
//   time           base + 2((n/N - 1) l' + log2(N) L') + 2 S / (T' c(S))
//   simple         T' = 0.92 T
//   low_latency    T' = 0.92 T / 3.8, at most low_latency_cap
//   LL128          over several nodes: T' = 0.92 T 120/128, at most two thirds of the cap that
//                  rings inside NVLink have, c = 1; base is these rings', and S has 2 log2 N chunks
//                  of all channels more, which fill the pipeline
//
// c(S) is tuning.cc's treeCorrectionFactor, measured by NVIDIA: the share of its bandwidth that a
// tree reaches at S bytes. The tree wins where the ring's 2(n-1) hops take longer than its
// transfer: many ranks, small buffers. Source: NVIDIA/nccl src/graph/tuning.cc. The further factor
// 0.85 for plain tree patterns is not applied.
bool tree_applies(InstructionKind kind, BackendKind backend);
// Inside NVLink whose rings were measured (nvlink_rings.h), trees are left out: a chain has a
// ring's hops, and carries less. Across nodes the network says which protocols its trees take: none
// in Simple on EFA of p5 (aws-ofi-nccl, src/tuner/nccl_ofi_regions.cpp), where all-reduces of 64 to
// 256 MiB over 16 and 32 nodes take 1.7 to 1.8 times what tuning.cc expects of it.
bool tree_simple_available(const GroupNetwork& network);
bool tree_low_latency_available(const GroupNetwork& network);
Seconds tree_simple_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);
Seconds tree_low_latency_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);
// Across nodes, where base and cap of LL128 inside NVLink are known.
bool tree_low_latency_128_available(const GroupNetwork& network);
Seconds tree_low_latency_128_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network);

// The share of its bandwidth that a tree in the Simple protocol reaches at S bytes.
double simple_tree_correction(Bytes bytes);

}  // namespace parplan
