#pragma once

#include "runtime/device/backend.h"

namespace parplan {

// What ranks of other devices have the host compute (Backend::run_on_host): optimizers' kernels and
// sums of squares, on as many threads as there are cores and enough elements. Each element meets
// the same instructions as on a CPU rank. In half precision, the master copy is updated, and the
// parameters are rounded from it. A HostKernel.
void update_on_host(const KernelCall& call, const StepScalars& scalars);

}  // namespace parplan
