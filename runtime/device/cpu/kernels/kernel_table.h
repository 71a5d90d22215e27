#pragma once

#include <cstdint>

#include "runtime/device/kernel_call.h"

namespace parplan {

// The arguments of a kernel function: a KernelCall without types of the standard library (see
// instruction_set.h).
struct CpuKernelArguments {
  const OpShape& shape;
  void* const* operands;
  const StepScalars* scalars;  // the optimizer's; null inside other kernels

  float* floats(int i) const { return static_cast<float*>(operands[i]); }
  std::uint8_t* codes(int i) const { return static_cast<std::uint8_t*>(operands[i]); }
  LossScale& loss_scale(int i) const { return *static_cast<LossScale*>(operands[i]); }
  const std::int32_t* tokens(int i) const { return static_cast<const std::int32_t*>(operands[i]); }
};

using CpuKernel = void (*)(const CpuKernelArguments&);

// All kernels of one instruction set.
struct CpuKernelTable {
  CpuKernel kernels[static_cast<int>(OpKind::count_)] = {};  // null: not a kernel (load_tokens, load_targets)
  // out[i] = ((inputs[0][i] + inputs[1][i]) + inputs[2][i]) + ...; `out` may be one of the inputs.
  void (*sum_in_order)(float* out, const float* const* inputs, int count, std::int64_t elements) = nullptr;
  void (*max_in_order)(float* out, const float* const* inputs, int count, std::int64_t elements) = nullptr;
};

namespace cpu_baseline {
const CpuKernelTable& kernel_table();
}
#if defined(__x86_64__)
namespace cpu_v3 {
const CpuKernelTable& kernel_table();
}
namespace cpu_v4 {
const CpuKernelTable& kernel_table();
}
#endif

}  // namespace parplan
