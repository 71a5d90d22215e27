#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "planner/cluster/axis.h"
#include "planner/graph/tensor.h"
#include "planner/plan/memory_home.h"

namespace parplan {

// How a tensor is placed over one mesh axis, in the sense of PyTorch DTensor; FlatShard cuts the
// flattened, padded bucket that a parameter belongs to (ZeRO, FSDP). Over the data axis,
// activations are Replicate, each rank's of its own samples, or First: the axis's first rank has
// those of all ranks, one rank's after another's, and the others have none.
enum class PlacementKind : std::uint8_t { replicate, shard, flat_shard, partial_sum, partial_max, first };

struct Placement {
  PlacementKind kind = PlacementKind::replicate;
  Dim dim{};  // of `shard`
  auto operator<=>(const Placement&) const = default;
};

constexpr Placement replicate() { return {}; }
constexpr Placement shard(Dim dim) { return {PlacementKind::shard, dim}; }
constexpr Placement flat_shard() { return {PlacementKind::flat_shard, {}}; }
constexpr Placement partial_sum() { return {PlacementKind::partial_sum, {}}; }
constexpr Placement partial_max() { return {PlacementKind::partial_max, {}}; }
constexpr Placement on_first() { return {PlacementKind::first, {}}; }
// Each rank has tokens of its own.
constexpr bool cuts_tokens(Placement p) { return p.kind == PlacementKind::shard && counts_tokens(p.dim); }
constexpr bool is_partial(Placement p) {
  return p.kind == PlacementKind::partial_sum || p.kind == PlacementKind::partial_max;
}

// "Replicate", "Shard(kv_groups)", "FlatShard", "Partial(sum)", "First". `parse_placement` throws
// ConfigError.
std::string write_placement(Placement placement);
Placement parse_placement(const std::string& text);

// How a tensor is placed over every axis of the mesh; Replicate is the default.
using TensorLayout = PerAxis<Placement>;
constexpr bool is_partial(const TensorLayout& layout) {
  for (const Axis axis : all_axes)
    if (is_partial(layout[axis])) return true;
  return false;
}

// The communication that takes a tensor from one placement to another over the same mesh axis. The
// gradient of a redistribution is the reverse redistribution of the gradients (all-gather <->
// reduce-scatter, all-reduce <-> none, gather <-> scatter).
enum class Redistribution {
  none,
  all_reduce_sum,
  all_reduce_max,
  reduce_scatter,
  all_gather,
  slice,
  all_to_all,
  gather,
  scatter
};
const char* name(Redistribution redistribution);
// Throws InternalError for pairs without meaning (into Partial, out of FlatShard into Shard).
Redistribution redistribute(Placement from, Placement to);

// The same over every axis: what has to be done, axis by axis, innermost first.
struct RedistributionStep {
  Axis axis{};
  Redistribution redistribution{};
  bool operator==(const RedistributionStep&) const = default;
};
std::vector<RedistributionStep> redistribute(const TensorLayout& from, const TensorLayout& to);

// How the gradient of a tensor is placed before any communication: Replicate and Partial(sum) are
// each other's gradient placements, a shard is its own. Throws InternalError for Partial(max),
// through which no gradient passes.
Placement gradient_placement(Placement placement);

// Where each rank keeps its part of the state of parameters. What a block computes with for a
// while (gathered parameters, gradients to be reduced) is on the device.
struct StateHomes {
  Home parameters{};
  Home gradients{};
  Home optimizer{};  // moments and master copies
  auto operator<=>(const StateHomes&) const = default;
};

// How the state of parameters is placed.
struct StateLayout {
  TensorLayout parameters;  // Replicate or FlatShard over an axis
  TensorLayout gradients;
  TensorLayout optimizer;
  StateHomes homes = {};
  auto operator<=>(const StateLayout&) const = default;
};

// The placements of a block's tensors.
struct Placements {
  // Parameters by their name in the block ("attention.qkv.weight", "embedding.weight"); every layer
  // has the same layouts. Absent: Replicate.
  std::map<std::string, TensorLayout, std::less<>> parameters;
  TensorLayout residual;  // activations between ops
  StateLayout state;
  auto operator<=>(const Placements&) const = default;
};

// Which of a rank's persistent tensors are shards over the ranks of the data axis and the context
// axis, which hold the same parameters: none where this is one rank.
struct DataShards {
  bool parameters = false;
  bool gradients = false;
  bool optimizer = false;
};
DataShards data_shards(const Placements& placements, int replicas);

// The name that `Placements::parameters` uses: "layers.3.mlp.up.weight" -> "mlp.up.weight".
std::string_view name_in_block(std::string_view parameter);

}  // namespace parplan
