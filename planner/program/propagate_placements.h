#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/placement.h"
#include "planner/program/block_context.h"

namespace parplan {

// A layout for every tensor that a block's ops read or write (parameters aside).
class TensorLayouts {
 public:
  TensorLayouts() = default;
  TensorLayouts(const OpGraph& graph, const Block& block);  // all Replicate
  TensorLayout& operator[](TensorId id) { return layouts_[static_cast<std::size_t>(id - first_)]; }
  const TensorLayout& operator[](TensorId id) const { return layouts_[static_cast<std::size_t>(id - first_)]; }

 private:
  TensorId first_ = 0;  // the ids of a block are close to each other
  std::vector<TensorLayout> layouts_;
};

// The layout of each tensor of a block: as its op produces it, and as every op but a partial sum's
// reducer sees it (Partial resolved to the residual's placement, statistics to Replicate).
struct BlockPlacements {
  TensorLayouts produced;
  TensorLayouts canonical;
  // The layouts that each op (by its index from the block's first) needs for each of its inputs.
  std::vector<std::vector<TensorLayout>> inputs;
};
// What the block's loss is computed from; nothing where it computes none.
std::optional<TensorId> logits_of(const OpGraph& graph, const Block& block);

BlockPlacements propagate(const OpGraph& graph, const Block& block, const BlockContext& context);

}  // namespace parplan
