#pragma once

#include <cstdint>

#include "planner/graph/cpu_workspace.h"
#include "runtime/device/cpu/kernels/instruction_set.h"

namespace parplan::PARPLAN_CPU_NAMESPACE {

// y[n, m] += scale * sum over k of x[n, k] w[m, k], float32; stored rows of each array are `stride`
// apart. `workspace` holds gemm_workspace(blocking, m, n, k) bytes, aligned to 64. Nothing is
// allocated.
struct Gemm {
  std::int64_t m = 0, n = 0, k = 0;
  const float* x = nullptr;
  std::int64_t x_stride = 0;
  const float* w = nullptr;
  std::int64_t w_stride = 0;
  float* y = nullptr;
  std::int64_t y_stride = 0;
  float scale = 1.0f;
  GemmBlocking blocking;
  float* workspace = nullptr;
};

// In the first two, a row of y depends only on its row of x, to the bit.
void gemm_rows(const Gemm& gemm);             // x stored [n, k], w stored [m, k]
void gemm_rows_transposed(const Gemm& gemm);  // x stored [n, k], w stored [k, m]
void gemm_outer(const Gemm& gemm);            // x stored [k, n], w stored [k, m]

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
