#include "planner/graph/local_op.h"

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

LocalDim whole(const TensorDim& dim) {
  return {.size = dim.size, .whole = dim.size, .granule = dim.granule};
}
LocalDim whole_width(const OpGraph& graph, const std::vector<TensorId>& ids) {
  if (ids.empty() || graph.tensors[ids[0]].dims.empty()) return {};
  return whole(graph.tensors[ids[0]].dims.back());
}

}  // namespace

OpShape shape_of(const LocalOp& local) {
  const OpRow& row = row_of(local.op.kind);
  PARPLAN_ASSERT(row.localize != nullptr, fmt::format("{} stands in a forward graph", row.name));
  OpShape shape = local.op.attributes;
  shape.rows = local.rows;
  shape.bias = false;
  row.localize(local, shape);
  return shape;
}

const Tensor& first_operand(const OpGraph& graph, const Op& op) {
  return graph.tensors[op.inputs.empty() ? op.outputs.front() : op.inputs.front()];
}

std::int64_t positions_of(const OpGraph& graph, const Op& op) {
  for (const TensorDim& dim : first_operand(graph, op).dims)
    if (dim.dim == Dim::sequence) return dim.size;
  return graph.sequence;
}

LocalOp whole(const OpGraph& graph, const Op& op) {
  LocalOp local{.op = op,
                .rows = tokens_of(first_operand(graph, op), [](const TensorDim& dim) { return dim.size; }),
                .sequence = {.size = positions_of(graph, op), .whole = positions_of(graph, op)},
                .input = whole_width(graph, op.inputs),
                .output = whole_width(graph, op.outputs),
                .parameters = {}};
  for (const TensorId id : op.parameters) {
    const std::vector<TensorDim>& dims = graph.tensors[id].dims;
    PARPLAN_ASSERT(!dims.empty() && dims.size() <= 2, graph.tensors[id].name);
    local.parameters.push_back(
        {.rows = whole(dims[0]), .columns = dims.size() == 2 ? whole(dims[1]) : LocalDim{}});
  }
  return local;
}

}  // namespace parplan
