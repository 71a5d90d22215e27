#pragma once

#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/placement.h"
#include "planner/program/block_choice.h"

namespace parplan {

// The layout of each tensor of a block: as its op produces it, and as every op but a partial sum's
// reducer sees it (Partial resolved to the residual's placement, statistics to Replicate).
struct BlockPlacements {
  std::vector<TensorLayout> produced;   // indexed by TensorId
  std::vector<TensorLayout> canonical;
  // The layouts that each op (by its index from the block's first) needs for each of its inputs.
  std::vector<std::vector<TensorLayout>> inputs;
};
BlockPlacements propagate(const OpGraph& graph, const Block& block, const BlockChoice& choice);

}  // namespace parplan
