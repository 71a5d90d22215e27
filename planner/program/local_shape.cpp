#include <algorithm>

#include "planner/graph/local_op.h"
#include "planner/program/local_size.h"

namespace parplan {
namespace {

LocalDim local_dim(const TensorDim& dim, const TensorLayout& layout, const BlockContext& context) {
  const std::int64_t sharers = shards_of_granule(dim, shards_of(dim.dim, layout, context));
  return {.size = local_size(dim, layout, context),
          .begin = local_begin(dim, layout, context),
          .whole = dim.size,
          .granule = dim.granule,
          .sharers = sharers,
          .share = shard_at(dim.dim, layout, context) % sharers};
}

// Which positions the rows have: consecutive ones, or those of this rank's chunks.
void set_positions(const OpGraph& graph, const TensorLayout& layout, const BlockContext& context, LocalOp& local) {
  const std::int64_t positions = positions_of(graph, local.op);
  local.sequence = local_dim({.dim = Dim::sequence, .size = positions}, layout, context);
  local.chunks = chunks_of(positions, layout, context);
  if (local.chunks.any()) local.sequence.begin = 0;
}

LocalDim local_width(const OpGraph& graph, const std::vector<TensorId>& ids, const TensorLayout& layout,
                     const BlockContext& context) {
  if (ids.empty() || graph.tensors[ids[0]].dims.empty()) return {};
  return local_dim(graph.tensors[ids[0]].dims.back(), layout, context);
}

LocalParameter local_parameter(const OpGraph& graph, TensorId id, const BlockContext& context) {
  const std::vector<TensorDim>& dims = graph.tensors[id].dims;
  const ParameterPart part = local_part(graph, id, context);
  LocalParameter local;
  local.rows = {.size = part.rows, .begin = part.row_begin, .whole = dims[0].size, .granule = dims[0].granule};
  if (dims.size() == 2)
    local.columns = {
        .size = part.columns, .begin = part.column_begin, .whole = dims[1].size, .granule = dims[1].granule};
  return local;
}

}  // namespace

OpShape local_shape(const OpGraph& graph, const Op& op, const TensorLayout& input, const BlockContext& context) {
  LocalOp local{.op = op,
                .rows = tokens_of(first_operand(graph, op),
                                  [&](const TensorDim& dim) { return local_size(dim, input, context); }),
                .sequence = {},
                .chunks = {},
                .batch = context.layout.micro_batch,
                .input = local_width(graph, op.inputs, input, context),
                .output = local_width(graph, op.outputs, input, context),
                .parameters = {},
                .loss_weight = context.loss_weight};
  set_positions(graph, input, context, local);
  for (const TensorId id : op.parameters) local.parameters.push_back(local_parameter(graph, id, context));
  OpShape shape = shape_of(local);
  if (!op.outputs.empty() && softmax_is_apart(graph.tensors[op.outputs[0]], input, context)) {
    shape.apart = true;
    shape.in_half = is_half(in_memory(context.precision));
  }
  if (context.fp8 != Fp8Casts::none && may_be_fp8(graph, op)) shape.fp8 = context.fp8;
  return shape;
}

}  // namespace parplan
