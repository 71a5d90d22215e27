#include "planner/program/local_size.h"

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

DataType type_of(const Tensor& tensor, DataType precision) {
  switch (tensor.role) {
    case TensorRole::tokens: return DataType::int32;
    case TensorRole::statistic:
    case TensorRole::loss: return DataType::fp32;
    case TensorRole::mask:
      return DataType::uint8;
    case TensorRole::activation:
    case TensorRole::parameter: return in_memory(precision);
  }
  return in_memory(precision);
}

std::span<const Axis> cutting_order(Dim dim) { return dim == Dim::kv_groups ? inner_axes_first : all_axes; }

ContextChunks chunks_of(std::int64_t sequence, const TensorLayout& layout, const BlockContext& context) {
  const int ranks = context.layout.degree.cp;
  if (ranks == 1 || layout.cp != shard(Dim::sequence) || context.layout.cp_method != ContextMethod::all_gather)
    return {};
  // The other axes cut the rank's own rows.
  TensorLayout others = layout;
  others.cp = replicate();
  const std::int64_t own = sequence / ranks, shards = shards_of(Dim::sequence, others, context);
  return {.ranks = ranks,
          .rank = context.at.cp,
          .size = own / 2,
          .first = own / shards * shard_at(Dim::sequence, others, context)};
}

int shards_of(Dim dim, const TensorLayout& layout, const BlockContext& context) {
  int shards = 1;
  for (const Axis axis : all_axes)
    if (layout[axis] == shard(dim)) shards *= context.layout.degree[axis];
  return shards;
}

int shard_at(Dim dim, const TensorLayout& layout, const BlockContext& context) {
  int at = 0;
  for (const Axis axis : cutting_order(dim))
    if (layout[axis] == shard(dim)) at = at * context.layout.degree[axis] + context.at[axis];
  return at;
}

std::int64_t local_size(const TensorDim& dim, const TensorLayout& layout, const BlockContext& context) {
  if (dim.dim == Dim::batch) return context.layout.micro_batch;
  const int shards = shards_of(dim.dim, layout, context);
  if (shards == 1) return dim.size;
  if (dim.dim == Dim::vocabulary) return ceil_div(dim.size, shards);
  const std::int64_t granules = dim.size / dim.granule;
  PARPLAN_ASSERT(granules % shards == 0,
                 fmt::format("{} {}s of {} over {} ranks", granules, name(dim.dim), dim.granule, shards));
  return granules / shards * dim.granule;
}

std::int64_t local_elements(const Tensor& tensor, const TensorLayout& layout, const BlockContext& context) {
  std::int64_t elements = 1;
  for (const TensorDim& dim : tensor.dims) elements *= local_size(dim, layout, context);
  return elements;
}

std::int64_t local_bytes(const Tensor& tensor, const TensorLayout& layout, const BlockContext& context) {
  return local_elements(tensor, layout, context) * size_of(type_of(tensor, context.precision));
}

TensorLayout layout_of_parameter(const OpGraph& graph, TensorId parameter, const Placements& placements) {
  const auto found = placements.parameters.find(name_in_block(graph.tensors[parameter].name));
  return found == placements.parameters.end() ? TensorLayout{} : found->second;
}

ParameterPart local_part(const OpGraph& graph, TensorId parameter, const BlockContext& context) {
  const Tensor& tensor = graph.tensors[parameter];
  const TensorLayout layout = layout_of_parameter(graph, parameter, context.layout.placements);
  PARPLAN_ASSERT(!tensor.dims.empty() && tensor.dims.size() <= 2, tensor.name);
  const Dim row = tensor.dims[0].dim;
  const bool is_matrix = tensor.dims.size() == 2;
  ParameterPart part;
  part.tensor = parameter;
  part.rows = local_size(tensor.dims[0], layout, context);
  part.columns = is_matrix ? local_size(tensor.dims[1], layout, context) : 1;
  part.row_begin = part.rows * shard_at(row, layout, context);
  if (is_matrix) part.column_begin = part.columns * shard_at(tensor.dims[1].dim, layout, context);
  return part;
}

}  // namespace parplan
