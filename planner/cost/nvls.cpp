#include "planner/cost/nvls.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "planner/cost/nccl_protocol.h"
#include "planner/cost/tree.h"

namespace parplan {
namespace {

struct Generation {
  double efficiency = 0.0;  // nvlsEfficiency
  Seconds base;             // besides a hop; NCCL's hwLatency is 25 us for both
  Bytes chunk_cost;
  int channels = 0;
  BytesPerSecond head_of_two_nodes;  // perChMaxNVLSTreeBws
  // As well; of Hopper 0.87 of NCCL's 45.5 GB/s, fitted: four nodes of p5en reach 310 GB/s for 4
  // GiB by this algorithm (stas00/ml-engineering at 744d01e1, network/README.md), 0.87 of what 45.5
  // give. 36 all-reduces on 4 to 32 nodes of p5 that are no part of that have a mean error of 9.7 %
  // with it and of 12.8 % with 45.5 (docs/accuracy.md).
  BytesPerSecond head_of_more_nodes;
};
constexpr Generation hopper = {.efficiency = 0.85,
                               .base = Seconds(31.9e-6),
                               .chunk_cost = Bytes(4740),
                               .channels = 16,
                               .head_of_two_nodes = BytesPerSecond(57.7e9),
                               .head_of_more_nodes = BytesPerSecond(39.6e9)};
constexpr Generation blackwell = {.efficiency = 0.74,
                                  .base = Seconds(28.6e-6),
                                  .chunk_cost = Bytes(14690),
                                  .channels = 24,
                                  .head_of_two_nodes = BytesPerSecond(96e9),
                                  .head_of_more_nodes = BytesPerSecond(80e9)};
const Generation& generation_of(const GroupNetwork& network) {
  return network.compute_capability < 100 ? hopper : blackwell;
}

// NCCL_MAX_NVLS_ARITY
constexpr int most_heads = 32;
int heads_of(const GroupNetwork& network) {
  return std::min(network.ranks / network.nodes, most_heads);
}

constexpr std::array chunks = {Bytes(16 << 10), Bytes(32 << 10), Bytes(64 << 10), Bytes(128 << 10)};

// What the switches take for what `bytes` stand for, in chunks.
Seconds added(const GroupNetwork& network, Bytes bytes, Bytes chunk) {
  const Generation& generation = generation_of(network);
  const double members = static_cast<double>(network.ranks) / network.nodes;
  const double share = static_cast<double>(chunk.count) / static_cast<double>((chunk + generation.chunk_cost).count);
  return (1.0 + 1.0 / members) * (bytes / (network.nvls_bandwidth * (generation.efficiency * share)));
}
// The chunks of all channels and heads: as much of the buffer is under way in each half of a pass.
Bytes at_once(const GroupNetwork& network, Bytes chunk) {
  return chunk * (heads_of(network) * generation_of(network).channels);
}

// NVLS tree's, as calcCollChunking takes them.
Bytes tree_chunk(const GroupNetwork& network, Bytes bytes) {
  if (bytes >= at_once(network, chunks[3]) * 4) return chunks[3];
  return bytes >= at_once(network, chunks[2]) ? chunks[2] : chunks[1];
}

bool has_switches(const GroupNetwork& network) {
  return network.nvls_bandwidth.value > 0.0 && network.ranks >= 2 * network.nodes;
}

}  // namespace

bool nvls_applies(InstructionKind kind, BackendKind backend) {
  return backend == BackendKind::cuda &&
         (kind == InstructionKind::all_reduce_sum || kind == InstructionKind::all_reduce_max);
}
bool nvls_available(const GroupNetwork& network) {
  return network.nodes == 1 && has_switches(network);
}
bool nvls_tree_available(const GroupNetwork& network) {
  return network.nodes > 1 && has_switches(network);
}

Seconds nvls_time(InstructionKind, Bytes bytes, const GroupNetwork& network) {
  Seconds least(std::numeric_limits<double>::infinity());
  for (const Bytes chunk : chunks) least = std::min(least, added(network, bytes + at_once(network, chunk), chunk));
  return network.intra_latency + generation_of(network).base + least;
}

Seconds nvls_tree_time(InstructionKind, Bytes bytes, const GroupNetwork& network) {
  constexpr Seconds inter_excess(18.2e-6);  // hwLatency NET of NVLSTree, 20.9 us, less the ring's LL
  const Generation& generation = generation_of(network);
  const bool two = network.nodes == 2;
  const double steps_up = std::log2(network.nodes);
  const BytesPerSecond of_heads =
      (two ? generation.head_of_two_nodes : generation.head_of_more_nodes) * static_cast<double>(heads_of(network));
  const Bytes chunk = tree_chunk(network, bytes);
  const auto filling = static_cast<std::int64_t>((1.0 + steps_up) * static_cast<double>(at_once(network, chunk).count));
  const Bytes through = bytes + Bytes(filling);
  const double bus = 2.0 * (network.ranks - 1.0) / network.ranks;
  const Seconds moved = std::max({added(network, through, chunk), bus * (through / of_heads),
                                  (two ? 1.0 : 2.0) * (through / network.uplink_bandwidth)});
  return generation.base + network.intra_latency + 2.0 * steps_up * (network.inter_latency + inter_excess) +
         moved / simple_tree_correction(bytes);
}

}  // namespace parplan
