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

Seconds hops(const GroupNetwork& network, Seconds intra, Seconds inter) {
  const double per_node = static_cast<double>(network.ranks) / network.nodes;
  return 2.0 * ((per_node - 1.0) * intra + std::log2(network.nodes) * inter);
}

}  // namespace

bool tree_applies(InstructionKind kind, BackendKind backend) {
  return is_accelerator(backend) &&
         (kind == InstructionKind::all_reduce_sum || kind == InstructionKind::all_reduce_max);
}

bool tree_available(const GroupNetwork& network) {
  return measured_rings(network) == nullptr;
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

double simple_tree_correction(Bytes bytes) {
  return corrected(simple_correction, bytes);
}

}  // namespace parplan
