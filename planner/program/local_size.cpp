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
    case TensorRole::quantized: return DataType::uint8;
    case TensorRole::activation:
    case TensorRole::parameter: return in_memory(precision);
  }
  return in_memory(precision);
}

std::span<const Axis> cutting_order(Dim dim) { return dim == Dim::kv_groups ? inner_axes_first : all_axes; }

ContextChunks chunks_of(std::int64_t sequence, const TensorLayout& layout, const BlockContext& context) {
  const int ranks = context.layout.degree.cp;
  if (ranks == 1 || layout.cp != shard(Dim::sequence) || !keeps_queries(context.layout.cp_method))
    return {};
  // Groups that exchange tokens for heads hold two chunks together, and share out their rows in
  // order. The other axes cut the rank's own rows.
  TensorLayout others = layout;
  others.cp = replicate();
  const int sharers = context.layout.cp_ulysses;
  const std::int64_t own = sequence / ranks, shards = shards_of(Dim::sequence, others, context);
  return {.ranks = ranks / sharers,
          .rank = context.at.cp / sharers,
          .size = own * sharers / 2,
          .first = context.at.cp % sharers * own + own / shards * shard_at(Dim::sequence, others, context)};
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
  if (dim.dim == Dim::batch) {
    if (layout.dp != on_first()) return context.layout.micro_batch;
    return context.at.dp == 0 ? context.layout.degree.dp * context.layout.micro_batch : 0;
  }
  const int shards = shards_of(dim.dim, layout, context);
  if (dim.dim == Dim::vocabulary) return ceil_div(dim.size, shards * dim.multiple) * dim.multiple;
  if (shards == 1) return dim.size;
  PARPLAN_ASSERT(divides_into(dim, shards), fmt::format("{} {}s of {} ({} parts) over {} ranks", dim.granules(),
                                                        name(dim.dim), dim.granule, dim.parts, shards));
  const std::int64_t sharers = shards_of_granule(dim, shards);
  if (sharers > 1) return (dim.granule - dim.shared) / sharers + dim.shared;
  return dim.granules() / shards * dim.granule;
}

std::int64_t local_begin(const TensorDim& dim, const TensorLayout& layout, const BlockContext& context) {
  const std::int64_t at = shard_at(dim.dim, layout, context);
  const std::int64_t sharers = shards_of_granule(dim, shards_of(dim.dim, layout, context));
  if (sharers == 1) return local_size(dim, layout, context) * at;
  return dim.granule * (at / sharers) + (dim.granule - dim.shared) / sharers * (at % sharers);
}

std::int64_t local_elements(const Tensor& tensor, const TensorLayout& layout, const BlockContext& context) {
  std::int64_t elements = 1;
  for (const TensorDim& dim : tensor.dims) elements *= local_size(dim, layout, context);
  return elements;
}

bool softmax_is_apart(const Tensor& probabilities, const TensorLayout& layout, const BlockContext& context) {
  if (!probabilities.softmax || context.scratch_apart) return false;
  // A row of a query and a sample holds the scores of each head with all keys.
  const std::int64_t sequence = probabilities.dims.front().size;
  const std::int64_t heads_and_samples = local_elements(probabilities, layout, context) / (sequence * sequence);
  return !is_half(in_memory(context.precision)) || !probabilities.softmax->serves(heads_and_samples, sequence);
}

std::int64_t local_bytes(const Tensor& tensor, const TensorLayout& layout, const BlockContext& context) {
  const DataType type = type_of(tensor, context.precision);
  const std::int64_t elements = local_elements(tensor, layout, context);
  if (is_half(type) && softmax_is_apart(tensor, layout, context))
    return elements * (size_of(DataType::fp32) + tensor.softmax->narrowed);
  return elements * size_of(type);
}

TensorLayout layout_of_parameter(const OpGraph& graph, TensorId parameter, const Placements& placements) {
  const auto found = placements.parameters.find(name_in_block(graph.tensors[parameter].name));
  return found == placements.parameters.end() ? TensorLayout{} : found->second;
}

ParameterPart local_part(const OpGraph& graph, TensorId parameter, const BlockContext& context) {
  const Tensor& tensor = graph.tensors[parameter];
  const TensorLayout layout = layout_of_parameter(graph, parameter, context.layout.placements);
  PARPLAN_ASSERT(!tensor.dims.empty() && tensor.dims.size() <= 2, tensor.name);
  const bool is_matrix = tensor.dims.size() == 2;
  ParameterPart part;
  part.tensor = parameter;
  part.rows = local_size(tensor.dims[0], layout, context);
  part.columns = is_matrix ? local_size(tensor.dims[1], layout, context) : 1;
  part.row_begin = local_begin(tensor.dims[0], layout, context);
  if (is_matrix) part.column_begin = local_begin(tensor.dims[1], layout, context);
  return part;
}

std::vector<ParameterPart> local_rectangles(const OpGraph& graph, TensorId parameter, const BlockContext& context) {
  const TensorLayout layout = layout_of_parameter(graph, parameter, context.layout.placements);
  const TensorDim& row = graph.tensors[parameter].dims[0];
  const std::int64_t sharers = shards_of_granule(row, shards_of(row.dim, layout, context));
  ParameterPart own = local_part(graph, parameter, context);
  if (graph.tensors[parameter].dims.size() == 2) {
    const TensorDim& column = graph.tensors[parameter].dims[1];
    PARPLAN_ASSERT(column.shared == 0 || shards_of_granule(column, shards_of(column.dim, layout, context)) == 1,
                   fmt::format("columns of {} are copies", graph.tensors[parameter].name));
  }
  if (sharers == 1 || row.shared == 0) return {own};
  PARPLAN_ASSERT(shards_of(row.dim, layout, context) == context.layout.degree.tp,
                 fmt::format("{} is cut over the tensor axis alone", graph.tensors[parameter].name));
  ParameterPart copied = own;
  copied.rows = row.shared;
  copied.row_begin = row.granule * (shard_at(row.dim, layout, context) / sharers) + row.granule - row.shared;
  copied.copies = static_cast<int>(sharers);
  own.rows -= row.shared;
  return own.rows > 0 ? std::vector{own, copied} : std::vector{copied};
}

}  // namespace parplan
