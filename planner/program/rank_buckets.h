#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planner/program/bucket_layout.h"
#include "planner/program/lower.h"

namespace parplan {

// A bucket of one rank before it has buffers. `blocks` are those (of the whole graph) that use it:
// one, or for a tied parameter all its users on this rank.
struct RankBucket {
  std::string name;
  BucketLayout layout;
  std::vector<int> blocks;
  std::optional<TensorId> tied;
  bool frozen = false;             // neither gradients nor optimizer state
  DataShards shards;               // what of it is sharded over the data axis's group
  StateHomes homes;
  int shard_ranks = 1;             // of the group that shares it out: along replica_axes, or a part
  std::int64_t elements = 0;       // padded for the ranks that share it out
  std::vector<BucketUnit> units;
  std::int64_t shard_elements = 0;  // of this rank; the whole bucket without ZeRO, nothing of a master's replica
};

// Whether a block stands between the first and the last.
inline bool is_layer(const OpGraph& graph, int block) {
  return block > 0 && block + 1 < static_cast<int>(graph.blocks.size());
}

// Whether ranks along the axis hold different parts of parameters, or of their optimizer's state.
bool divides_state(const Placements& placements, Axis axis);

// Where the state of a tied parameter lies: its gradients add up over several blocks, and stay on
// the device.
constexpr StateHomes homes_of_tied(StateHomes homes) {
  homes.gradients = Home::device;
  return homes;
}

// A bucket's elements, padded so that the ranks that share it out have equal and aligned shards.
std::int64_t padded_elements(std::int64_t elements, int shard_ranks, const TrainingSpec& training);

// The buckets of the rank at `at` that holds these stages: one per block in order, then one per
// tied parameter in order of first use, then one per block that has frozen parameters of its own.
std::vector<RankBucket> rank_buckets(const Job& job, const std::vector<int>& stages, const Coordinates& at);

}  // namespace parplan
