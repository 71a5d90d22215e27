#include "runtime/device/cpu/kernels/kernels.h"
#include "runtime/device/cpu/kernels/simd.h"

namespace parplan::PARPLAN_CPU_NAMESPACE {

namespace {

PARPLAN_INLINE float inverse_square_root(float x) { return 1.0f / __builtin_sqrtf(x); }

// Rows are never inlined: a row meets the same instructions in the fused kernel as in the one that
// it replaces. `beta` may be null.
[[gnu::noinline]] void layer_norm_row(const OpShape& shape, const float* x, const float* gamma, const float* beta,
                                      float* y, float* mean_out, float* rstd_out) {
  const std::int64_t columns = shape.columns;
  const float count = static_cast<float>(columns);
  Wide sum{};
  for_each_wide(columns, [&](std::int64_t i, auto lanes) { sum += load(x + i, lanes); });
  const float mean = sum_lanes(sum) / count;
  Wide squares{};
  for_each_wide(columns, [&](std::int64_t i, auto lanes) {
    const Wide d = load(x + i, lanes, mean) - mean;
    squares += d * d;
  });
  const float rstd = inverse_square_root(sum_lanes(squares) / count + static_cast<float>(shape.epsilon));
  for_each_wide(columns, [&](std::int64_t i, auto lanes) {
    const Wide normal = (load(x + i, lanes) - mean) * rstd;
    const Wide scaled = normal * load(gamma + i, lanes);
    store(y + i, beta == nullptr ? scaled : scaled + load(beta + i, lanes), lanes);
  });
  *mean_out = mean;
  *rstd_out = rstd;
}

[[gnu::noinline]] void rms_norm_row(const OpShape& shape, const float* x, const float* gamma, float* y,
                                    float* rstd_out) {
  const std::int64_t columns = shape.columns;
  Wide squares{};
  for_each_wide(columns, [&](std::int64_t i, auto lanes) {
    const Wide v = load(x + i, lanes);
    squares += v * v;
  });
  const float rstd =
      inverse_square_root(sum_lanes(squares) / static_cast<float>(columns) + static_cast<float>(shape.epsilon));
  for_each_wide(columns, [&](std::int64_t i, auto lanes) {
    store(y + i, load(x + i, lanes) * rstd * load(gamma + i, lanes), lanes);
  });
  *rstd_out = rstd;
}

// The sum with which a fused kernel begins, as `add`: a, (b), (bias).
struct Sum {
  const float* a = nullptr;
  const float* b = nullptr;
  const float* bias = nullptr;
  std::int64_t columns = 0;
  int operands = 0;

  explicit Sum(const CpuKernelArguments& arguments) : columns(arguments.shape.columns) {
    a = arguments.floats(operands++);
    if (arguments.shape.second) b = arguments.floats(operands++);
    if (arguments.shape.bias) bias = arguments.floats(operands++);
  }
  void write_row(std::int64_t row, float* out) const {
    for_each_wide(columns, [&](std::int64_t i, auto lanes) {
      Wide v = load(a + row * columns + i, lanes);
      if (b != nullptr) v += load(b + row * columns + i, lanes);
      if (bias != nullptr) v += load(bias + i, lanes);
      store(out + i, v, lanes);
    });
  }
};

}  // namespace

// x, gamma, (beta) -> y, mean, rstd
void layer_norm(const CpuKernelArguments& a) {
  const std::int64_t columns = a.shape.columns;
  const float* beta = a.shape.without_beta ? nullptr : a.floats(2);
  const int next = a.shape.without_beta ? 2 : 3;
  for (std::int64_t row = 0; row < a.shape.rows; ++row)
    layer_norm_row(a.shape, a.floats(0) + row * columns, a.floats(1), beta, a.floats(next) + row * columns,
                   a.floats(next + 1) + row, a.floats(next + 2) + row);
}

// a, (b), (bias), gamma, (beta) -> sum, y, mean, rstd
void add_layer_norm(const CpuKernelArguments& a) {
  const std::int64_t columns = a.shape.columns;
  const Sum sum(a);
  const float* gamma = a.floats(sum.operands);
  const float* beta = a.shape.without_beta ? nullptr : a.floats(sum.operands + 1);
  const int next = sum.operands + (a.shape.without_beta ? 1 : 2);
  for (std::int64_t row = 0; row < a.shape.rows; ++row) {
    float* x = a.floats(next) + row * columns;
    sum.write_row(row, x);
    layer_norm_row(a.shape, x, gamma, beta, a.floats(next + 1) + row * columns, a.floats(next + 2) + row,
                   a.floats(next + 3) + row);
  }
}

// dy, x, gamma, mean, rstd -> dx (+=), (dgamma +=), (dbeta +=)
// With n = (x - mean) rstd and g = dy gamma:  dx = rstd (g - mean(g) - n mean(g n)).
void layer_norm_gradient(const CpuKernelArguments& a) {
  const std::int64_t columns = a.shape.columns;
  const float* dy = a.floats(0);
  const float* x = a.floats(1);
  const float* gamma = a.floats(2);
  const float* means = a.floats(3);
  const float* rstds = a.floats(4);
  float* dx = a.floats(5);
  float* dgamma = a.shape.freezes_first ? nullptr : a.floats(6);
  float* dbeta = a.shape.freezes_second ? nullptr : a.floats(a.shape.freezes_first ? 6 : 7);
  const float count = static_cast<float>(columns);
  for (std::int64_t row = 0; row < a.shape.rows; ++row, dy += columns, x += columns, dx += columns) {
    const float mean = means[row];
    const float rstd = rstds[row];
    Wide sum{};
    Wide products{};
    for_each_wide(columns, [&](std::int64_t i, auto lanes) {
      const Wide d = load(dy + i, lanes);
      const Wide normal = (load(x + i, lanes, mean) - mean) * rstd;
      const Wide g = d * load(gamma + i, lanes);
      sum += g;
      products += g * normal;
      if (dgamma != nullptr) store(dgamma + i, load(dgamma + i, lanes) + d * normal, lanes);
      if (dbeta != nullptr) store(dbeta + i, load(dbeta + i, lanes) + d, lanes);
    });
    const float mean_g = sum_lanes(sum) / count;
    const float mean_product = sum_lanes(products) / count;
    for_each_wide(columns, [&](std::int64_t i, auto lanes) {
      const Wide normal = (load(x + i, lanes, mean) - mean) * rstd;
      Wide d = (load(dy + i, lanes) * load(gamma + i, lanes) - mean_g - normal * mean_product) * rstd;
      if (a.shape.accumulate) d += load(dx + i, lanes);
      store(dx + i, d, lanes);
    });
  }
}

// x, gamma -> y, rstd
void rms_norm(const CpuKernelArguments& a) {
  const std::int64_t columns = a.shape.columns;
  for (std::int64_t row = 0; row < a.shape.rows; ++row)
    rms_norm_row(a.shape, a.floats(0) + row * columns, a.floats(1), a.floats(2) + row * columns, a.floats(3) + row);
}

// a, (b), (bias), gamma -> sum, y, rstd
void add_rms_norm(const CpuKernelArguments& a) {
  const std::int64_t columns = a.shape.columns;
  const Sum sum(a);
  const int next = sum.operands;
  for (std::int64_t row = 0; row < a.shape.rows; ++row) {
    float* x = a.floats(next + 1) + row * columns;
    sum.write_row(row, x);
    rms_norm_row(a.shape, x, a.floats(next), a.floats(next + 2) + row * columns, a.floats(next + 3) + row);
  }
}

// dy, x, gamma, rstd -> dx (+=), (dgamma +=)
// With n = x rstd and g = dy gamma:  dx = rstd (g - n mean(g n)).
void rms_norm_gradient(const CpuKernelArguments& a) {
  const std::int64_t columns = a.shape.columns;
  const float* dy = a.floats(0);
  const float* x = a.floats(1);
  const float* gamma = a.floats(2);
  const float* rstds = a.floats(3);
  float* dx = a.floats(4);
  float* dgamma = a.shape.freezes_first ? nullptr : a.floats(5);
  const float count = static_cast<float>(columns);
  for (std::int64_t row = 0; row < a.shape.rows; ++row, dy += columns, x += columns, dx += columns) {
    const float rstd = rstds[row];
    Wide products{};
    for_each_wide(columns, [&](std::int64_t i, auto lanes) {
      const Wide d = load(dy + i, lanes);
      const Wide normal = load(x + i, lanes) * rstd;
      products += d * load(gamma + i, lanes) * normal;
      if (dgamma != nullptr) store(dgamma + i, load(dgamma + i, lanes) + d * normal, lanes);
    });
    const float mean_product = sum_lanes(products) / count;
    for_each_wide(columns, [&](std::int64_t i, auto lanes) {
      const Wide normal = load(x + i, lanes) * rstd;
      Wide d = (load(dy + i, lanes) * load(gamma + i, lanes) - normal * mean_product) * rstd;
      if (a.shape.accumulate) d += load(dx + i, lanes);
      store(dx + i, d, lanes);
    });
  }
}

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
