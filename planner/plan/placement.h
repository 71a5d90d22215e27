#pragma once

#include <map>
#include <string>

#include "planner/graph/tensor.h"

namespace parplan {

// How a tensor lies over one mesh axis, in the sense of PyTorch DTensor; FlatShard cuts the
// flattened, padded bucket that a parameter belongs to (ZeRO, FSDP).
enum class PlacementKind { replicate, shard, flat_shard, partial_sum, partial_max };

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
constexpr bool is_partial(Placement p) {
  return p.kind == PlacementKind::partial_sum || p.kind == PlacementKind::partial_max;
}

// "Replicate", "Shard(kv_groups)", "FlatShard", "Partial(sum)". `parse_placement` throws
// ConfigError.
std::string write_placement(Placement placement);
Placement parse_placement(const std::string& text);

// The communication that takes a tensor from one placement to another over the same mesh axis. The
// gradient of a redistribution is the redistribution of the gradients backwards (all-gather <->
// reduce-scatter, all-reduce <-> none).
enum class Redistribution { none, all_reduce_sum, all_reduce_max, reduce_scatter, all_gather, slice, all_to_all };
const char* name(Redistribution redistribution);
// Throws InternalError for pairs without meaning (into Partial, out of FlatShard into Shard).
Redistribution redistribute(Placement from, Placement to);

// How the gradient of a tensor lies before any communication: Replicate and Partial(sum) are each
// other's, shards are their own. Throws InternalError for Partial(max), through which no gradient
// passes.
Placement gradient_placement(Placement placement);

// Where the tensors of a plan lie. Parameters are named without their block
// ("attention.qkv.weight", "embedding.weight"); every layer has the same placements. Absent means
// Replicate.
struct Placements {
  std::map<std::string, Placement> tensor_axis;    // parameters over tp
  Placement residual;                              // activations between ops over tp
  Placement parameters_data_axis;                  // over dp: Replicate or FlatShard
  Placement gradients_data_axis;
  Placement optimizer_data_axis;
  bool operator==(const Placements&) const = default;
};

// Which of a rank's persistent tensors are shards over the data axis: none where it has one rank.
struct DataShards {
  bool parameters = false;
  bool gradients = false;
  bool optimizer = false;
};
DataShards data_shards(const Placements& placements, int data_ranks);

// The name that `Placements::tensor_axis` uses: "layers.3.mlp.up.weight" -> "mlp.up.weight".
std::string name_in_block(const std::string& parameter);

}  // namespace parplan
