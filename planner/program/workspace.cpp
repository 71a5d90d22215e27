#include "planner/program/workspace.h"

namespace parplan {

Bytes workspace_bytes(OpKind kind, const OpShape& shape, BackendKind backend) {
  const OpRow& row = row_of(kind);
  if (backend == BackendKind::cpu) return row.cpu_workspace ? row.cpu_workspace(shape) : Bytes(0);
  switch (kind) {
    case OpKind::linear:
    case OpKind::linear_input_gradient:
    case OpKind::linear_weight_gradient: return Bytes(32 << 20);
    case OpKind::attention_gradient:
      return Bytes(4 * shape.sequence * shape.batch * shape.heads * (shape.head_dim + 1));
    default: return Bytes(0);
  }
}

}  // namespace parplan
