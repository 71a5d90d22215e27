#include "planner/program/local.h"

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

std::int64_t local_size(const TensorDim& dim, Placement placement, const BlockChoice& choice) {
  if (dim.dim == Dim::batch) return choice.micro_batch;
  if (placement.kind != PlacementKind::shard || placement.dim != dim.dim) return dim.size;
  if (dim.dim == Dim::vocabulary) return ceil_div(dim.size, choice.tensor_ranks);
  const std::int64_t granules = dim.size / dim.granule;
  PARPLAN_ASSERT(granules % choice.tensor_ranks == 0,
                 fmt::format("{} {}s of {} over {} ranks", granules, name(dim.dim), dim.granule, choice.tensor_ranks));
  return granules / choice.tensor_ranks * dim.granule;
}

std::int64_t local_elements(const Tensor& tensor, Placement placement, const BlockChoice& choice) {
  std::int64_t elements = 1;
  for (const TensorDim& dim : tensor.dims) elements *= local_size(dim, placement, choice);
  return elements;
}

std::int64_t local_bytes(const Tensor& tensor, Placement placement, const BlockChoice& choice) {
  return local_elements(tensor, placement, choice) * size_of(type_of(tensor, choice.precision));
}

Placement placement_of_parameter(const OpGraph& graph, TensorId parameter, const Placements& placements) {
  const auto found = placements.tensor_axis.find(name_in_block(graph.tensors[parameter].name));
  return found == placements.tensor_axis.end() ? replicate() : found->second;
}

ParameterPart local_part(const OpGraph& graph, TensorId parameter, const BlockChoice& choice) {
  const Tensor& tensor = graph.tensors[parameter];
  const Placement placement = choice.tensor_ranks > 1 ? placement_of_parameter(graph, parameter, choice.placements)
                                                      : replicate();
  PARPLAN_ASSERT(!tensor.dims.empty() && tensor.dims.size() <= 2, tensor.name);
  ParameterPart part;
  part.tensor = parameter;
  part.rows = local_size(tensor.dims[0], placement, choice);
  part.columns = tensor.dims.size() == 2 ? local_size(tensor.dims[1], placement, choice) : 1;
  const bool shards_rows = placement.kind == PlacementKind::shard && placement.dim == tensor.dims[0].dim;
  const bool shards_columns =
      placement.kind == PlacementKind::shard && tensor.dims.size() == 2 && placement.dim == tensor.dims[1].dim;
  if (shards_rows) part.row_begin = part.rows * choice.tensor_rank;
  if (shards_columns) part.column_begin = part.columns * choice.tensor_rank;
  part.tensor_replicated = choice.tensor_ranks > 1 && !shards_rows && !shards_columns;
  return part;
}

namespace {

Placement resolved(Placement placement, TensorRole role, Placement residual) {
  if (!is_partial(placement)) return placement;
  return role == TensorRole::activation ? residual : replicate();
}

}  // namespace

BlockPlacements propagate(const OpGraph& graph, const Block& block, const BlockChoice& choice) {
  BlockPlacements result;
  result.produced.assign(graph.tensors.size(), replicate());
  result.canonical.assign(graph.tensors.size(), replicate());
  const Placement residual = choice.tensor_ranks > 1 ? choice.placements.residual : replicate();
  if (block.input >= 0) {
    result.produced[block.input] = residual;
    result.canonical[block.input] = residual;
  }
  for (int index = block.first_op; index < block.last_op; ++index) {
    const Op& op = graph.ops[index];
    std::vector<Placement> needed;
    for (TensorId input : op.inputs) needed.push_back(result.canonical[input]);
    Placement output = needed.empty() ? replicate() : needed[0];
    switch (row_of(op.kind).sharding) {
      case ShardingRule::tokenwise:
        for (Placement& input : needed) input = needed[0];
        break;
      case ShardingRule::contraction: {
        const Placement weight =
            choice.tensor_ranks > 1 ? placement_of_parameter(graph, op.parameters[0], choice.placements) : replicate();
        const Tensor& tensor = graph.tensors[op.parameters[0]];
        if (weight.kind == PlacementKind::shard && weight.dim == tensor.dims[0].dim) {
          needed[0] = replicate();
          output = weight;
        } else if (weight.kind == PlacementKind::shard) {
          needed[0] = weight;
          output = partial_sum();
        }
        break;
      }
      case ShardingRule::lookup: {
        const Placement table =
            choice.tensor_ranks > 1 ? placement_of_parameter(graph, op.parameters[0], choice.placements) : replicate();
        needed[0] = replicate();
        output = table.kind == PlacementKind::shard ? partial_sum() : replicate();
        break;
      }
      case ShardingRule::heads:
      case ShardingRule::head_sums:
        if (needed[0].kind == PlacementKind::shard && needed[0].dim != Dim::kv_groups) needed[0] = replicate();
        output = needed[0];
        if (row_of(op.kind).sharding == ShardingRule::head_sums && output.kind == PlacementKind::shard)
          output = partial_sum();
        break;
      case ShardingRule::vocabulary_max:
        output = needed[0].kind == PlacementKind::shard ? partial_max() : replicate();
        break;
      case ShardingRule::vocabulary_sum:
        output = needed[0].kind == PlacementKind::shard ? partial_sum() : replicate();
        break;
      case ShardingRule::vocabulary_loss:
        output = replicate();
        break;
      case ShardingRule::none:
        PARPLAN_ASSERT(false, fmt::format("{} stands in a forward graph", name(op.kind)));
    }
    for (TensorId id : op.outputs) {
      const TensorRole role = graph.tensors[id].role;
      result.produced[id] = role == TensorRole::loss ? replicate() : output;
      result.canonical[id] =
          resolved(result.produced[id], role, residual);
    }
    result.inputs.push_back(std::move(needed));
  }
  return result;
}

}  // namespace parplan
