#include "planner/cost/tree.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "planner/cost/nccl_protocol.h"
#include "planner/cost/nvlink_rings.h"

namespace parplan {
namespace {

// Entry i is for buffers of at least 64 * 2^i bytes: 64 B to 512 MiB. NVIDIA/nccl
// src/graph/tuning.cc, treeCorrectionFactor.
using Correction = std::array<double, 24>;
constexpr Correction low_latency_correction = {1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5,
                                               0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0};
constexpr Correction simple_correction = {0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5,
                                          0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9};

// tuning.cc corrects by log2 of the size in units of 64 bytes, rounded down, and only within the
// table.
double corrected(const Correction& correction, Bytes bytes) {
  const int digits = std::bit_width(static_cast<std::uint64_t>(bytes.count) >> 6);  // binary; 0 below 64 bytes
  return digits > 0 && digits <= static_cast<int>(correction.size()) ? correction[digits - 1] : 1.0;
}

// A tree, whose ranks send up and down at once, reaches this share of a ring's cap in LL128:
// all-reduces of 64 MiB to 256 MiB over 8, 16 and 32 nodes of aws-p5 add 82 to 94 GB/s a direction
// (crazyguitar/aws-gpu-communication-benchmark at fd167f97, data/nccl_all_reduce.csv), 170 GB/s of
// both, where rings on NVLink have a cap of 252.
constexpr double tree_share_of_cap = 2.0 / 3.0;

// The bytes of a chunk of a tree's channel in LL128, as calcCollChunking takes them
// (src/enqueue.cc): at most what a step of the buffer holds, 614,400 bytes (120 words of 640
// threads), 15 in 16 of it data. It counts whole levels of a tree, rounded down.
std::int64_t low_latency_128_chunk(Bytes bytes, const GroupNetwork& network) {
  const double per_node = static_cast<double>(network.ranks) / network.nodes;
  const int levels = std::bit_width(static_cast<unsigned>(network.nodes)) - 1;
  const double steps = 1.0 + levels + 0.1 * per_node;
  std::int64_t chunk = 576'000;
  const auto few = [&](double of_a_step) {
    return static_cast<double>(bytes.count / (assumed_channels * chunk)) < steps * of_a_step / per_node;
  };
  while (few(64.0) && chunk > 131072) chunk /= 2;
  while (few(16.0) && chunk > 32768) chunk /= 2;
  return chunk;
}

// Whether there are trees that take a protocol, on one node or between nodes.
bool takes(const GroupNetwork& network, bool Protocols::*protocol) {
  return network.nodes == 1 ? measured_rings(network) == nullptr : network.tree_protocols.*protocol;
}

Seconds hops(const GroupNetwork& network, Seconds intra, Seconds inter) {
  const double per_node = static_cast<double>(network.ranks) / network.nodes;
  return 2.0 * ((per_node - 1.0) * intra + std::log2(network.nodes) * inter);
}

}  // namespace

bool tree_applies(InstructionKind kind, BackendKind backend) {
  return is_accelerator(backend) &&
         (kind == InstructionKind::all_reduce_sum || kind == InstructionKind::all_reduce_max);
}

Seconds tree_simple_time(InstructionKind, Bytes bytes, const GroupNetwork& network) {
  const BytesPerSecond bandwidth = network.tree_bandwidth * 0.92;
  return simple.tree_base +
         hops(network, tree_hop_inside(network, simple), network.inter_latency + simple.tree_inter_excess) +
         2.0 * (bytes / (bandwidth * corrected(simple_correction, bytes)));
}

Seconds tree_low_latency_time(InstructionKind, Bytes bytes, const GroupNetwork& network) {
  const BytesPerSecond bandwidth = std::min(network.tree_bandwidth * (0.92 / 3.8), low_latency_cap(network));
  return low_latency.tree_base +
         hops(network, tree_hop_inside(network, low_latency), network.inter_latency + low_latency.tree_inter_excess) +
         2.0 * (bytes / (bandwidth * corrected(low_latency_correction, bytes)));
}

bool tree_simple_available(const GroupNetwork& network) {
  return takes(network, &Protocols::simple);
}

bool tree_low_latency_available(const GroupNetwork& network) {
  return takes(network, &Protocols::low_latency);
}

bool tree_low_latency_128_available(const GroupNetwork& network) {
  return has_low_latency_128_between_nodes(network, network.tree_protocols);
}

Seconds tree_low_latency_128_time(InstructionKind, Bytes bytes, const GroupNetwork& network) {
  const NvlinkRings& rings = *generation_of_rings(network);
  const BytesPerSecond bandwidth = std::min(network.tree_bandwidth * (0.92 * low_latency_128_tree_share),
                                            rings.low_latency_128_cap * tree_share_of_cap);
  const Seconds between = network.inter_latency + low_latency_128.tree_inter_excess;
  const double filling = 2.0 * std::log2(network.nodes) * static_cast<double>(low_latency_128_chunk(bytes, network));
  return rings.low_latency_128.base + hops(network, tree_hop_inside(network, low_latency_128), between) +
         Seconds(2.0 * (static_cast<double>(bytes.count) + filling * assumed_channels) / bandwidth.value);
}

double simple_tree_correction(Bytes bytes) {
  return corrected(simple_correction, bytes);
}

}  // namespace parplan
