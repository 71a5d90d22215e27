#pragma once

#include "planner/base/units.h"
#include "planner/cluster/device.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/op_kind.h"
#include "planner/graph/training_spec.h"

namespace parplan {

// Bytes of the workspace operand of a kernel, from the op's row for the backend; 0: it has none.
Bytes workspace_bytes(OpKind kind, const OpShape& shape, BackendKind backend);
// The scratch of the gradient norm: partial sums.
Bytes norm_scratch_bytes(const TrainingSpec& training, BackendKind backend);
// The scratch that calls beside blocks' need: that, and under engines with scale_history the
// magnitudes of all products of the model in fp8.
Bytes step_scratch_bytes(const TrainingSpec& training, const OpGraph& graph, BackendKind backend);

}  // namespace parplan
