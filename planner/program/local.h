#pragma once

#include <cstdint>
#include <vector>

#include "planner/cluster/device.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/placement.h"
#include "planner/program/program.h"

namespace parplan {

// What a block's Segments depend on besides the block itself.
struct BlockChoice {
  Placements placements;
  int tensor_ranks = 1;
  int tensor_rank = 0;
  std::int64_t micro_batch = 1;
  bool recompute = false;          // keep the block's input only, run its forward again before the backward
  DataType precision = DataType::fp32;
  BackendKind backend = BackendKind::cpu;
  double loss_weight = 1.0;        // of a token: 1 / tokens of the global batch
  bool fuse = true;                // put pairs of kernels into one (fusion.h)
  bool operator==(const BlockChoice&) const = default;
};

// Local size of one dim under a placement over the tensor axis. The vocabulary is padded to a
// multiple of the ranks; every other dim splits evenly in whole granules (planner/parallel refuses
// the rest before).
std::int64_t local_size(const TensorDim& dim, Placement placement, const BlockChoice& choice);
std::int64_t local_elements(const Tensor& tensor, Placement placement, const BlockChoice& choice);
// Bytes of an activation, statistic, tokens or loss tensor (its own type).
std::int64_t local_bytes(const Tensor& tensor, Placement placement, const BlockChoice& choice);
DataType type_of(const Tensor& tensor, DataType precision);

// The part of a parameter that this rank holds over the tensor axis; bucket fields are left to the
// caller.
ParameterPart local_part(const OpGraph& graph, TensorId parameter, const BlockChoice& choice);
Placement placement_of_parameter(const OpGraph& graph, TensorId parameter, const Placements& placements);

// Where each tensor of a block lies over the tensor axis: as its op produces it, and as every op
// but a partial sum's reducer sees it (Partial resolved to the residual's placement, statistics to
// Replicate).
struct BlockPlacements {
  std::vector<Placement> produced;   // indexed by TensorId
  std::vector<Placement> canonical;
  std::vector<std::vector<Placement>> inputs;  // per op (index from the block's first), per input: what it needs
};
BlockPlacements propagate(const OpGraph& graph, const Block& block, const BlockChoice& choice);

// The op's local size, when its first input lies as `input` says (what `propagate` found that the
// op needs).
OpShape local_shape(const OpGraph& graph, const Op& op, Placement input, const BlockChoice& choice);

}  // namespace parplan
