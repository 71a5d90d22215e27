#pragma once

#include "runtime/device/cuda/kernels/kernel_arguments.h"

namespace parplan {

// Null for load_tokens and load_targets, which belong to the data loader; every other op has one.
CudaKernel cuda_kernel(OpKind kind);

}  // namespace parplan
