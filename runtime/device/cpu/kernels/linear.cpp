#include "runtime/device/cpu/kernels/gemm.h"
#include "runtime/device/cpu/kernels/kernels.h"
#include "runtime/device/cpu/kernels/simd.h"

namespace parplan::PARPLAN_CPU_NAMESPACE {

namespace {

void multiply(const CpuKernelArguments& a, float* y, float* workspace) {
  const OpShape& s = a.shape;
  const int bias = s.bias ? 2 : -1;
  for (std::int64_t row = 0; row < s.rows; ++row) {
    if (s.bias) {
      __builtin_memcpy(y + row * s.columns, a.floats(bias), s.columns * sizeof(float));
    } else {
      __builtin_memset(y + row * s.columns, 0, s.columns * sizeof(float));
    }
  }
  gemm_rows({.m = s.columns, .n = s.rows, .k = s.inner,
             .x = a.floats(0), .x_stride = s.inner,
             .w = a.floats(1), .w_stride = s.inner,
             .y = y, .y_stride = s.columns,
             .blocking = forward_blocking, .workspace = workspace});
}

}  // namespace

// x, weight [columns, inner], (bias), -> y, workspace
void linear(const CpuKernelArguments& a) {
  const int next = a.shape.bias ? 3 : 2;
  multiply(a, a.floats(next), a.floats(next + 1));
}

// x, weight, (bias) -> before, y = gelu(before), workspace. As linear and then activation; `before`
// and y may share storage.
void linear_gelu(const CpuKernelArguments& a) {
  const int next = a.shape.bias ? 3 : 2;
  multiply(a, a.floats(next), a.floats(next + 2));
  activation({.shape = {.rows = a.shape.rows, .columns = a.shape.columns, .activation = ActivationKind::gelu_tanh},
              .operands = a.operands + next, .scalars = nullptr});
}

// dy, weight -> dx (+=), workspace
void linear_input_gradient(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  float* dx = a.floats(2);
  if (!s.accumulate) __builtin_memset(dx, 0, s.rows * s.inner * sizeof(float));
  gemm_rows_transposed({.m = s.inner, .n = s.rows, .k = s.columns,
                        .x = a.floats(0), .x_stride = s.columns,
                        .w = a.floats(1), .w_stride = s.inner,
                        .y = dx, .y_stride = s.inner,
                        .blocking = backward_blocking, .workspace = a.floats(3)});
}

// dy, weight, before -> dbefore, workspace. As linear_input_gradient and then, in place,
// activation_gradient.
void linear_input_gradient_gelu(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  void* const product[] = {a.operands[0], a.operands[1], a.operands[3], a.operands[4]};
  linear_input_gradient(
      {.shape = {.rows = s.rows, .columns = s.columns, .inner = s.inner}, .operands = product, .scalars = nullptr});
  void* const slope[] = {a.operands[3], a.operands[2], a.operands[3]};
  activation_gradient({.shape = {.rows = s.rows, .columns = s.inner, .activation = ActivationKind::gelu_tanh},
                       .operands = slope, .scalars = nullptr});
}

// dy, x -> dweight +=, (dbias +=), workspace
void linear_weight_gradient(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* dy = a.floats(0);
  gemm_outer({.m = s.inner, .n = s.columns, .k = s.rows,
              .x = dy, .x_stride = s.columns,
              .w = a.floats(1), .w_stride = s.inner,
              .y = a.floats(2), .y_stride = s.inner,
              .blocking = backward_blocking, .workspace = a.floats(s.bias ? 4 : 3)});
  if (!s.bias) return;
  float* dbias = a.floats(3);
  for (std::int64_t row = 0; row < s.rows; ++row, dy += s.columns)
    for (std::int64_t i = 0; i < s.columns; ++i) dbias[i] += dy[i];
}

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
