#include "planner/graph/local_op.h"
#include "planner/program/local_size.h"

namespace parplan {
namespace {

LocalDim local_dim(const TensorDim& dim, const TensorLayout& layout, const BlockChoice& choice) {
  const std::int64_t size = local_size(dim, layout, choice);
  return {.size = size,
          .begin = size * shard_at(dim.dim, layout, choice),
          .whole = dim.size,
          .granule = dim.granule};
}

LocalDim local_width(const OpGraph& graph, const std::vector<TensorId>& ids, const TensorLayout& layout,
                     const BlockChoice& choice) {
  if (ids.empty() || graph.tensors[ids[0]].dims.empty()) return {};
  return local_dim(graph.tensors[ids[0]].dims.back(), layout, choice);
}

LocalParameter local_parameter(const OpGraph& graph, TensorId id, const BlockChoice& choice) {
  const std::vector<TensorDim>& dims = graph.tensors[id].dims;
  const ParameterPart part = local_part(graph, id, choice);
  LocalParameter local;
  local.rows = {.size = part.rows, .begin = part.row_begin, .whole = dims[0].size, .granule = dims[0].granule};
  if (dims.size() == 2)
    local.columns = {
        .size = part.columns, .begin = part.column_begin, .whole = dims[1].size, .granule = dims[1].granule};
  return local;
}

}  // namespace

OpShape local_shape(const OpGraph& graph, const Op& op, const TensorLayout& input, const BlockChoice& choice) {
  LocalOp local{.op = op,
                .sequence = local_dim({.dim = Dim::sequence, .size = graph.sequence}, input, choice),
                .batch = choice.layout.micro_batch,
                .input = local_width(graph, op.inputs, input, choice),
                .output = local_width(graph, op.outputs, input, choice),
                .parameters = {},
                .loss_weight = choice.loss_weight};
  for (const TensorId id : op.parameters) local.parameters.push_back(local_parameter(graph, id, choice));
  return shape_of(local);
}

}  // namespace parplan
