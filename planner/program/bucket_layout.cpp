#include "planner/program/bucket_layout.h"
#include "planner/program/propagate.h"

#include <algorithm>
#include <utility>

#include "planner/base/error.h"

namespace parplan {
namespace {

constexpr std::int64_t alignment = 16;  // elements: 64 bytes in fp32

void extend(std::vector<BucketLayout::Range>& ranges, std::int64_t begin, std::int64_t end) {
  if (!ranges.empty() && ranges.back().end == begin) {
    ranges.back().end = end;
  } else {
    ranges.push_back({begin, end});
  }
}

// Whether each rank knows only the gradient of its own heads' share.
bool read_by_heads(const OpGraph& graph, TensorId parameter) {
  return std::ranges::any_of(graph.ops, [&](const Op& op) {
    return row_of(op.kind).sharding == ShardingRule::heads &&
           std::ranges::find(op.parameters, parameter) != op.parameters.end();
  });
}

// Whether each rank of the tensor axis knows only the gradient of its own tokens.
bool read_sharded_by_sequence(const OpGraph& graph, TensorId parameter, const BlockChoice& choice) {
  const Placement sharded = shard(Dim::sequence);
  const bool leaves = choice.layout.placements.residual.tp == sharded;
  if ((choice.entering.tp == sharded) == leaves) return leaves;
  // The placement changes within the block: the op that reads the parameter decides.
  for (const Block& block : graph.blocks)
    for (int i = block.first_op; i < block.last_op; ++i) {
      const Op& op = graph.ops[i];
      if (std::ranges::find(op.parameters, parameter) == op.parameters.end()) continue;
      const BlockPlacements placed = propagate(graph, block, choice);
      return std::ranges::any_of(placed.inputs[i - block.first_op],
                                 [&](const TensorLayout& input) { return input.tp == sharded; }) ||
             std::ranges::any_of(op.outputs, [&](TensorId id) { return placed.canonical[id].tp == sharded; });
    }
  return false;
}

}  // namespace

BlockParameters block_parameters(const OpGraph& graph, const Block& block) {
  const std::vector<TensorId>& tied = graph.tied;
  BlockParameters result;
  for (int i = block.first_op; i < block.last_op; ++i)
    for (TensorId id : graph.ops[i].parameters) {
      if (std::find(tied.begin(), tied.end(), id) != tied.end()) {
        PARPLAN_ASSERT(!result.tied || result.tied == id, block.name);
        result.tied = id;
      } else if (std::find(result.own.begin(), result.own.end(), id) == result.own.end()) {
        result.own.push_back(id);
      }
    }
  return result;
}

BucketLayout bucket_layout(const OpGraph& graph, const std::vector<TensorId>& parameters, const BlockChoice& choice) {
  BucketLayout layout;
  for (TensorId id : parameters) layout.parts.push_back(local_part(graph, id, choice));
  const auto decays = [&](const ParameterPart& part) { return graph.tensors[part.tensor].decays; };
  std::stable_sort(layout.parts.begin(), layout.parts.end(), [&](const ParameterPart& a, const ParameterPart& b) {
    return std::pair(a.tensor_replicated, !decays(a)) < std::pair(b.tensor_replicated, !decays(b));
  });
  for (ParameterPart& part : layout.parts) {
    part.bucket_offset = layout.elements;
    layout.elements += align_up(Bytes(part.rows * part.columns), alignment).count;
    if (decays(part)) extend(layout.decaying, part.bucket_offset, layout.elements);
    if (part.tensor_replicated) extend(layout.replicated, part.bucket_offset, layout.elements);
    if (part.tensor_replicated &&
        (read_sharded_by_sequence(graph, part.tensor, choice) || read_by_heads(graph, part.tensor)))
      extend(layout.tensor_partial, part.bucket_offset, layout.elements);
  }
  return layout;
}

}  // namespace parplan
