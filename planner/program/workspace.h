#pragma once

#include "planner/base/units.h"
#include "planner/cluster/device.h"
#include "planner/graph/op.h"

namespace parplan {

// Bytes of the workspace operand of a kernel, as the op's row says for the backend; 0: it has none.
Bytes workspace_bytes(OpKind kind, const OpShape& shape, BackendKind backend);

}  // namespace parplan
