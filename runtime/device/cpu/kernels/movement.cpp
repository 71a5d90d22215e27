#include "runtime/device/cpu/kernels/kernels.h"

namespace parplan::PARPLAN_CPU_NAMESPACE {

// -> y = 0
void fill_zero(const CpuKernelArguments& a) { __builtin_memset(a.operands[0], 0, elements(a.shape) * sizeof(float)); }

// x -> y = x
void copy(const CpuKernelArguments& a) {
  if (a.operands[0] == a.operands[1]) return;
  __builtin_memcpy(a.operands[1], a.operands[0], elements(a.shape) * sizeof(float));
}

// x [rows, inner, columns] -> y [inner, rows, columns]
void transpose_blocks(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* x = a.floats(0);
  float* y = a.floats(1);
  for (std::int64_t block = 0; block < s.inner; ++block)
    for (std::int64_t row = 0; row < s.rows; ++row, y += s.columns)
      __builtin_memcpy(y, x + (row * s.inner + block) * s.columns, s.columns * sizeof(float));
}

// x [rows, inner] -> y [rows, columns]: the columns from `begin` on
void take_columns(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* x = a.floats(0) + s.begin;
  float* y = a.floats(1);
  for (std::int64_t row = 0; row < s.rows; ++row, x += s.inner, y += s.columns)
    __builtin_memcpy(y, x, s.columns * sizeof(float));
}

// x [rows, columns] -> y [rows, inner], in the columns from `begin` on
void put_columns(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* x = a.floats(0);
  float* y = a.floats(1) + s.begin;
  for (std::int64_t row = 0; row < s.rows; ++row, x += s.columns, y += s.inner)
    __builtin_memcpy(y, x, s.columns * sizeof(float));
}

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
