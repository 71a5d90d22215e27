#include "planner/program/propagate_placements.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/program/local_size.h"

namespace parplan {
namespace {

Placement resolved(Placement placement, TensorRole role, Placement residual) {
  if (!is_partial(placement)) return placement;
  return role == TensorRole::activation ? residual : replicate();
}

// What one op needs of its inputs over one axis, and the resulting placement of its outputs.
struct OpPlacements {
  std::vector<Placement> inputs;
  Placement output;
};

// Whether the axis can cut the groups of heads that the op computes with, inside the cuts of other
// axes: one that exchanges tokens for heads finds them cut by the weights.
bool can_exchange_heads(const OpGraph& graph, const Block& block, const Op& op, Axis axis, const BlockContext& context,
                        const TensorLayout& wanted) {
  const TensorDim& heads = graph.tensors[op.inputs[0]].dims.back();
  const auto is_cut_over = [&](Axis other) {
    if (wanted[other] == shard(Dim::kv_groups)) return true;
    for (int i = block.first_op; i < block.last_op; ++i)
      for (const TensorId id : graph.ops[i].parameters)
        if (layout_of_parameter(graph, id, context.layout.placements)[other] == shard(Dim::kv_groups)) return true;
    return false;
  };
  std::int64_t shards = context.layout.degree[axis];
  bool is_before = true;  // in the order in which axes cut them
  for (const Axis other : cutting_order(Dim::kv_groups)) {
    if (other == axis) {
      is_before = false;
    } else if (context.layout.degree[other] > 1 && is_cut_over(other)) {
      if (!is_before) return false;
      shards *= context.layout.degree[other];
    }
  }
  return heads.dim == Dim::kv_groups && heads.size / heads.granule % shards == 0;
}

// `wanted`: what the op needs of its first input over the axes before this one.
OpPlacements placements_of(const OpGraph& graph, const Block& block, const Op& op, std::vector<Placement> inputs,
                           Axis axis, const BlockContext& context, const TensorLayout& wanted) {
  const Placements& placements = context.layout.placements;
  OpPlacements result{.inputs = std::move(inputs), .output = {}};
  std::vector<Placement>& needed = result.inputs;
  if (!needed.empty()) result.output = needed[0];
  const Placement tokens = shard(Dim::sequence);
  const auto weight = [&] { return layout_of_parameter(graph, op.parameters[0], placements)[axis]; };
  switch (row_of(op.kind).sharding) {
    case ShardingRule::tokenwise:
      for (Placement& input : needed) input = needed[0];
      break;
    case ShardingRule::rows:
      for (Placement& input : needed)
        if (cuts_tokens(input)) input = replicate();
      result.output = needed[0];
      break;
    case ShardingRule::contraction: {
      const Placement cut = weight();
      if (cut.kind == PlacementKind::shard && cut.dim == graph.tensors[op.parameters[0]].dims[0].dim) {
        needed[0] = replicate();
        result.output = cut;
      } else if (cut.kind == PlacementKind::shard) {
        needed[0] = cut;
        result.output = partial_sum();
      } else {
        // Every rank holds the weight. It computes the tokens that the block passes on: blocks that
        // tie a weight pass on alike, so its gradients are partial sums in both or in neither.
        result.output = needed[0] = placements.residual[axis] == tokens ? tokens : replicate();
      }
      break;
    }
    case ShardingRule::lookup: {
      // With the whole table, each rank looks up the tokens that the residual keeps there.
      const bool is_cut = weight().kind == PlacementKind::shard;
      needed[0] = !is_cut && placements.residual[axis] == tokens ? tokens : replicate();
      result.output = is_cut ? partial_sum() : needed[0];
      break;
    }
    case ShardingRule::heads:
    case ShardingRule::head_sums:
      // Each rank keeps its queries, and gets at the keys and values of all (segment_context.cpp).
      if (axis == Axis::cp && needed[0] == tokens && keeps_queries(context.layout.cp_method)) {
        result.output = tokens;
        break;
      }
      // Tokens are exchanged for heads where the weights left them (Jacobs et al., "DeepSpeed
      // Ulysses", 2023).
      if (needed[0] == tokens && can_exchange_heads(graph, block, op, axis, context, wanted))
        needed[0] = shard(Dim::kv_groups);
      else if (needed[0].kind == PlacementKind::shard && needed[0].dim != Dim::kv_groups)
        needed[0] = replicate();
      // Probabilities and the values that they weigh are cut alike.
      for (std::size_t i = 1; i < needed.size(); ++i)
        if (const auto& dims = graph.tensors[op.inputs[i]].dims; !dims.empty() && dims.back().dim == Dim::kv_groups)
          needed[i] = needed[0];
      result.output = needed[0];
      if (row_of(op.kind).sharding == ShardingRule::head_sums && result.output.kind == PlacementKind::shard)
        result.output = partial_sum();
      break;
    // Logits are cut by their vocabulary, or by tokens as everything beside them then is, or not.
    case ShardingRule::vocabulary_max:
      if (needed[0] == shard(Dim::vocabulary)) result.output = partial_max();
      break;
    case ShardingRule::vocabulary_sum:
      if (needed[0] == tokens || needed[0] == on_first()) std::ranges::fill(needed, needed[0]);
      if (needed[0] == shard(Dim::vocabulary)) result.output = partial_sum();
      break;
    case ShardingRule::vocabulary_loss:
      if (needed[0] == tokens || needed[0] == on_first()) std::ranges::fill(needed, needed[0]);
      result.output = needed[0] == tokens ? partial_sum() : needed[0] == on_first() ? on_first() : replicate();
      break;
    case ShardingRule::none: PARPLAN_ASSERT(false, fmt::format("{} stands in a forward graph", name(op.kind)));
  }
  return result;
}

}  // namespace

std::optional<TensorId> logits_of(const OpGraph& graph, const Block& block) {
  for (int i = block.first_op; i < block.last_op; ++i) {
    if (row_of(graph.ops[i].kind).sharding != ShardingRule::vocabulary_max) continue;
    TensorId logits = graph.ops[i].inputs[0];
    for (int made = block.first_op; made < i; ++made)  // before a copy of them in fp32
      if (graph.ops[made].kind == OpKind::widen && graph.ops[made].outputs[0] == logits)
        logits = graph.ops[made].inputs[0];
    return logits;
  }
  return std::nullopt;
}

TensorLayouts::TensorLayouts(const OpGraph& graph, const Block& block) {
  TensorId last = -1;
  const auto include = [&](TensorId id) {
    first_ = last < 0 ? id : std::min(first_, id);
    last = std::max(last, id);
  };
  if (block.input) include(*block.input);
  for (int i = block.first_op; i < block.last_op; ++i) {
    std::ranges::for_each(graph.ops[i].inputs, include);
    std::ranges::for_each(graph.ops[i].outputs, include);
  }
  layouts_.resize(static_cast<std::size_t>(last - first_ + 1));
}

// Axes are independent: each is propagated by itself.
BlockPlacements propagate(const OpGraph& graph, const Block& block, const BlockContext& context) {
  BlockPlacements result;
  result.produced = TensorLayouts(graph, block);
  result.canonical = result.produced;
  for (int index = block.first_op; index < block.last_op; ++index)
    result.inputs.emplace_back(graph.ops[index].inputs.size());
  std::optional<TensorId> gathered;  // by the master
  if (context.layout.dp_method == DataMethod::master && context.master_computes_loss)
    gathered = logits_of(graph, block);
  for (const Axis axis : all_axes) {
    if (context.layout.degree[axis] == 1) continue;
    const Placement residual = context.layout.placements.residual[axis];
    if (block.input) {
      result.produced[*block.input][axis] = context.entering[axis];
      result.canonical[*block.input][axis] = context.entering[axis];
    }
    for (int index = block.first_op; index < block.last_op; ++index) {
      const Op& op = graph.ops[index];
      std::vector<Placement> inputs;
      for (const TensorId input : op.inputs) inputs.push_back(result.canonical[input][axis]);
      const TensorLayout wanted = op.inputs.empty() ? TensorLayout{} : result.inputs[index - block.first_op][0];
      const OpPlacements placed = placements_of(graph, block, op, std::move(inputs), axis, context, wanted);
      for (std::size_t i = 0; i < placed.inputs.size(); ++i) {
        result.inputs[index - block.first_op][i][axis] = placed.inputs[i];
        if (graph.tensors[op.inputs[i]].role == TensorRole::tokens)  // the data loader gives what is asked for
          result.canonical[op.inputs[i]][axis] = placed.inputs[i];
      }
      for (const TensorId id : op.outputs) {
        const TensorRole role = graph.tensors[id].role;
        result.produced[id][axis] = placed.output;
        result.canonical[id][axis] =
            axis == Axis::dp && id == gathered ? on_first() : resolved(placed.output, role, residual);
      }
    }
  }
  return result;
}

}  // namespace parplan
