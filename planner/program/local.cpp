#include "planner/program/local.h"

#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

DataType type_of(const Tensor& tensor, DataType precision) {
  switch (tensor.role) {
    case TensorRole::tokens: return DataType::int32;
    case TensorRole::statistic:
    case TensorRole::loss: return DataType::fp32;
    case TensorRole::activation:
    case TensorRole::parameter: return in_memory(precision);
  }
  return in_memory(precision);
}

int shards_of(Dim dim, const TensorLayout& layout, const BlockChoice& choice) {
  int shards = 1;
  for (const Axis axis : all_axes)
    if (layout[axis] == shard(dim)) shards *= choice.layout.degree[axis];
  return shards;
}

int shard_at(Dim dim, const TensorLayout& layout, const BlockChoice& choice) {
  int at = 0;
  for (const Axis axis : all_axes)
    if (layout[axis] == shard(dim)) at = at * choice.layout.degree[axis] + choice.at[axis];
  return at;
}

std::int64_t local_size(const TensorDim& dim, const TensorLayout& layout, const BlockChoice& choice) {
  if (dim.dim == Dim::batch) return choice.layout.micro_batch;
  const int shards = shards_of(dim.dim, layout, choice);
  if (shards == 1) return dim.size;
  if (dim.dim == Dim::vocabulary) return ceil_div(dim.size, shards);
  const std::int64_t granules = dim.size / dim.granule;
  PARPLAN_ASSERT(granules % shards == 0,
                 fmt::format("{} {}s of {} over {} ranks", granules, name(dim.dim), dim.granule, shards));
  return granules / shards * dim.granule;
}

std::int64_t local_elements(const Tensor& tensor, const TensorLayout& layout, const BlockChoice& choice) {
  std::int64_t elements = 1;
  for (const TensorDim& dim : tensor.dims) elements *= local_size(dim, layout, choice);
  return elements;
}

std::int64_t local_bytes(const Tensor& tensor, const TensorLayout& layout, const BlockChoice& choice) {
  return local_elements(tensor, layout, choice) * size_of(type_of(tensor, choice.precision));
}

TensorLayout layout_of_parameter(const OpGraph& graph, TensorId parameter, const Placements& placements) {
  const auto found = placements.parameters.find(name_in_block(graph.tensors[parameter].name));
  return found == placements.parameters.end() ? TensorLayout{} : found->second;
}

ParameterPart local_part(const OpGraph& graph, TensorId parameter, const BlockChoice& choice) {
  const Tensor& tensor = graph.tensors[parameter];
  const TensorLayout layout = layout_of_parameter(graph, parameter, choice.layout.placements);
  PARPLAN_ASSERT(!tensor.dims.empty() && tensor.dims.size() <= 2, tensor.name);
  const Dim row = tensor.dims[0].dim;
  const bool is_matrix = tensor.dims.size() == 2;
  ParameterPart part;
  part.tensor = parameter;
  part.rows = local_size(tensor.dims[0], layout, choice);
  part.columns = is_matrix ? local_size(tensor.dims[1], layout, choice) : 1;
  part.row_begin = part.rows * shard_at(row, layout, choice);
  if (is_matrix) part.column_begin = part.columns * shard_at(tensor.dims[1].dim, layout, choice);
  const bool is_cut = layout.tp == shard(row) || (is_matrix && layout.tp == shard(tensor.dims[1].dim));
  part.tensor_replicated = choice.layout.degree.tp > 1 && !is_cut;
  return part;
}

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

OpPlacements placements_of(const OpGraph& graph, const Op& op, std::vector<Placement> inputs, Axis axis,
                           const Placements& placements) {
  OpPlacements result{.inputs = std::move(inputs), .output = {}};
  std::vector<Placement>& needed = result.inputs;
  if (!needed.empty()) result.output = needed[0];
  const auto weight = [&] { return layout_of_parameter(graph, op.parameters[0], placements)[axis]; };
  switch (row_of(op.kind).sharding) {
    case ShardingRule::tokenwise:
      for (Placement& input : needed) input = needed[0];
      break;
    case ShardingRule::contraction: {
      const Placement cut = weight();
      if (cut.kind == PlacementKind::shard && cut.dim == graph.tensors[op.parameters[0]].dims[0].dim) {
        needed[0] = replicate();
        result.output = cut;
      } else if (cut.kind == PlacementKind::shard) {
        needed[0] = cut;
        result.output = partial_sum();
      }
      break;
    }
    case ShardingRule::lookup:
      needed[0] = replicate();
      result.output = weight().kind == PlacementKind::shard ? partial_sum() : replicate();
      break;
    case ShardingRule::heads:
    case ShardingRule::head_sums:
      if (needed[0].kind == PlacementKind::shard && needed[0].dim != Dim::kv_groups) needed[0] = replicate();
      result.output = needed[0];
      if (row_of(op.kind).sharding == ShardingRule::head_sums && result.output.kind == PlacementKind::shard)
        result.output = partial_sum();
      break;
    case ShardingRule::vocabulary_max:
      result.output = needed[0].kind == PlacementKind::shard ? partial_max() : replicate();
      break;
    case ShardingRule::vocabulary_sum:
      result.output = needed[0].kind == PlacementKind::shard ? partial_sum() : replicate();
      break;
    case ShardingRule::vocabulary_loss: result.output = replicate(); break;
    case ShardingRule::none: PARPLAN_ASSERT(false, fmt::format("{} stands in a forward graph", name(op.kind)));
  }
  return result;
}

}  // namespace

// Axes are independent: each is propagated by itself.
BlockPlacements propagate(const OpGraph& graph, const Block& block, const BlockChoice& choice) {
  BlockPlacements result;
  result.produced.resize(graph.tensors.size());
  result.canonical.resize(graph.tensors.size());
  for (int index = block.first_op; index < block.last_op; ++index)
    result.inputs.emplace_back(graph.ops[index].inputs.size());
  for (const Axis axis : all_axes) {
    if (choice.layout.degree[axis] == 1) continue;
    const Placement residual = choice.layout.placements.residual[axis];
    if (block.input) {
      result.produced[*block.input][axis] = choice.entering[axis];
      result.canonical[*block.input][axis] = choice.entering[axis];
    }
    for (int index = block.first_op; index < block.last_op; ++index) {
      const Op& op = graph.ops[index];
      std::vector<Placement> inputs;
      for (const TensorId input : op.inputs) inputs.push_back(result.canonical[input][axis]);
      const OpPlacements placed = placements_of(graph, op, std::move(inputs), axis, choice.layout.placements);
      for (std::size_t i = 0; i < placed.inputs.size(); ++i)
        result.inputs[index - block.first_op][i][axis] = placed.inputs[i];
      for (const TensorId id : op.outputs) {
        const TensorRole role = graph.tensors[id].role;
        const Placement output = role == TensorRole::loss ? replicate() : placed.output;
        result.produced[id][axis] = output;
        result.canonical[id][axis] = resolved(output, role, residual);
      }
    }
  }
  return result;
}

}  // namespace parplan
