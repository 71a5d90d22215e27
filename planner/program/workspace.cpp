#include "planner/program/workspace.h"

#include <algorithm>

#include "planner/program/scales.h"

namespace parplan {

Bytes workspace_bytes(OpKind kind, const OpShape& shape, BackendKind backend) {
  const OpRow& row = row_of(kind);
  const auto workspace = backend == BackendKind::cpu ? row.cpu_workspace : row.cuda_workspace;
  return workspace ? workspace(shape) : Bytes(0);
}

Bytes norm_scratch_bytes(const TrainingSpec& training, BackendKind backend) {
  return computes_norm(training) ? workspace_bytes(OpKind::sum_squares, {}, backend) : Bytes(0);
}

Bytes step_scratch_bytes(const TrainingSpec& training, const OpGraph& graph, BackendKind backend) {
  const Bytes norm = norm_scratch_bytes(training, backend);
  if (!reduces_scales(training)) return norm;
  const int products = products_in_fp8(graph, {0, static_cast<int>(graph.blocks.size())});
  return std::max(norm, Bytes(magnitudes_of_pass(products, Phase::forward) * size_of(DataType::fp32)));
}

}  // namespace parplan
