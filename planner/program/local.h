#pragma once

#include <cstdint>
#include <vector>

#include "planner/cluster/device.h"
#include "planner/cluster/mesh.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/layout.h"
#include "planner/plan/placement.h"
#include "planner/program/program.h"

namespace parplan {

// What a block's Segments depend on besides the block itself.
struct BlockChoice {
  BlockLayout layout;
  TensorLayout entering;  // the placement of the activation that the block before passes on
  Coordinates at;         // of the rank, along the axes that blocks are sharded over
  DataType precision = DataType::fp32;
  BackendKind backend = BackendKind::cpu;
  double loss_weight = 1.0;  // of a token: 1 / tokens of the global batch
  bool fuse = true;          // replaces pairs of kernels by one (fusion.h)
  bool operator==(const BlockChoice&) const = default;
};

// How many shards a layout cuts a dim into, and which of them is this rank's.
int shards_of(Dim dim, const TensorLayout& layout, const BlockChoice& choice);
int shard_at(Dim dim, const TensorLayout& layout, const BlockChoice& choice);
// Local size of one dim. The vocabulary is padded to a multiple of the shards; every other dim
// splits evenly in whole granules (planner/parallel rejects all else before).
std::int64_t local_size(const TensorDim& dim, const TensorLayout& layout, const BlockChoice& choice);
std::int64_t local_elements(const Tensor& tensor, const TensorLayout& layout, const BlockChoice& choice);
// Bytes of an activation, statistic, tokens or loss tensor (its own type).
std::int64_t local_bytes(const Tensor& tensor, const TensorLayout& layout, const BlockChoice& choice);
DataType type_of(const Tensor& tensor, DataType precision);

// The part of a parameter that this rank holds over the tensor axis; the caller fills in the bucket
// fields.
ParameterPart local_part(const OpGraph& graph, TensorId parameter, const BlockChoice& choice);
TensorLayout layout_of_parameter(const OpGraph& graph, TensorId parameter, const Placements& placements);

// The layout of each tensor of a block: as its op produces it, and as every op but a partial sum's
// reducer sees it (Partial resolved to the residual's placement, statistics to Replicate).
struct BlockPlacements {
  std::vector<TensorLayout> produced;   // indexed by TensorId
  std::vector<TensorLayout> canonical;
  // The layouts that each op (by its index from the block's first) needs for each of its inputs.
  std::vector<std::vector<TensorLayout>> inputs;
};
BlockPlacements propagate(const OpGraph& graph, const Block& block, const BlockChoice& choice);

// The op's local size for the layout `input` of its first input (which `propagate` found that the
// op needs).
OpShape local_shape(const OpGraph& graph, const Op& op, const TensorLayout& input, const BlockChoice& choice);

}  // namespace parplan
