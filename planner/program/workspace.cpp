#include "planner/program/workspace.h"

namespace parplan {

Bytes workspace_bytes(OpKind kind, const OpShape& shape, BackendKind backend) {
  const OpRow& row = row_of(kind);
  const auto workspace = backend == BackendKind::cpu ? row.cpu_workspace : row.cuda_workspace;
  return workspace ? workspace(shape) : Bytes(0);
}

Bytes step_scratch_bytes(const TrainingSpec& training, BackendKind backend) {
  return computes_norm(training) ? workspace_bytes(OpKind::sum_squares, {}, backend) : Bytes(0);
}

}  // namespace parplan
