#pragma once

#include "planner/base/units.h"
#include "planner/cluster/device.h"
#include "planner/graph/op_kind.h"
#include "planner/graph/training_spec.h"

namespace parplan {

// Bytes of the workspace operand of a kernel, from the op's row for the backend; 0: it has none.
Bytes workspace_bytes(OpKind kind, const OpShape& shape, BackendKind backend);
// The scratch that the kernels around the step need: the gradient norm's partial sums.
Bytes step_scratch_bytes(const TrainingSpec& training, BackendKind backend);

}  // namespace parplan
