#pragma once

#include "planner/base/units.h"
#include "planner/cluster/device.h"
#include "planner/graph/op.h"

namespace parplan {

// Bytes of the workspace operand of a kernel.
//   cpu   packing and attention scratch, as the op's row says
//   cuda  matrix products: 32 MiB, what cuBLAS itself uses on Hopper (cuBLAS 13 documentation, cublasSetWorkspace);
//         the attention backward: the fp32 accumulator of the query gradient and one row sum per query and head
//         (FlashAttention-2, Dao 2023, algorithm 2)
Bytes workspace_bytes(OpKind kind, const OpShape& shape, BackendKind backend);

}  // namespace parplan
