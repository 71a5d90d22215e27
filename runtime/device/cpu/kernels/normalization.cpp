#include "runtime/device/cpu/kernels/kernels.h"
#include "runtime/device/cpu/kernels/wide.h"

namespace parplan::PARPLAN_CPU_NAMESPACE {

namespace {

PARPLAN_INLINE float inverse_square_root(float x) { return 1.0f / __builtin_sqrtf(x); }

}  // namespace

// x, gamma, beta -> y, mean, rstd
void layer_norm(const CpuKernelArguments& a) {
  const std::int64_t columns = a.shape.columns;
  const float* x = a.floats(0);
  const float* gamma = a.floats(1);
  const float* beta = a.floats(2);
  float* y = a.floats(3);
  float* means = a.floats(4);
  float* rstds = a.floats(5);
  const float count = static_cast<float>(columns);
  const float epsilon = static_cast<float>(a.shape.epsilon);
  for (std::int64_t row = 0; row < a.shape.rows; ++row, x += columns, y += columns) {
    Wide sum{};
    for_each_wide(columns, [&](std::int64_t i, auto lanes) { sum += load(x + i, lanes); });
    const float mean = sum_lanes(sum) / count;
    Wide squares{};
    for_each_wide(columns, [&](std::int64_t i, auto lanes) {
      const Wide d = load(x + i, lanes, mean) - mean;
      squares += d * d;
    });
    const float rstd = inverse_square_root(sum_lanes(squares) / count + epsilon);
    for_each_wide(columns, [&](std::int64_t i, auto lanes) {
      const Wide normal = (load(x + i, lanes) - mean) * rstd;
      store(y + i, normal * load(gamma + i, lanes) + load(beta + i, lanes), lanes);
    });
    means[row] = mean;
    rstds[row] = rstd;
  }
}

// dy, x, gamma, mean, rstd -> dx (+=), dgamma +=, dbeta +=
// With n = (x - mean) rstd and g = dy gamma:  dx = rstd (g - mean(g) - n mean(g n)).
void layer_norm_gradient(const CpuKernelArguments& a) {
  const std::int64_t columns = a.shape.columns;
  const float* dy = a.floats(0);
  const float* x = a.floats(1);
  const float* gamma = a.floats(2);
  const float* means = a.floats(3);
  const float* rstds = a.floats(4);
  float* dx = a.floats(5);
  float* dgamma = a.floats(6);
  float* dbeta = a.floats(7);
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
      store(dgamma + i, load(dgamma + i, lanes) + d * normal, lanes);
      store(dbeta + i, load(dbeta + i, lanes) + d, lanes);
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
  const float* x = a.floats(0);
  const float* gamma = a.floats(1);
  float* y = a.floats(2);
  float* rstds = a.floats(3);
  const float count = static_cast<float>(columns);
  const float epsilon = static_cast<float>(a.shape.epsilon);
  for (std::int64_t row = 0; row < a.shape.rows; ++row, x += columns, y += columns) {
    Wide squares{};
    for_each_wide(columns, [&](std::int64_t i, auto lanes) {
      const Wide v = load(x + i, lanes);
      squares += v * v;
    });
    const float rstd = inverse_square_root(sum_lanes(squares) / count + epsilon);
    for_each_wide(columns, [&](std::int64_t i, auto lanes) {
      store(y + i, load(x + i, lanes) * rstd * load(gamma + i, lanes), lanes);
    });
    rstds[row] = rstd;
  }
}

// dy, x, gamma, rstd -> dx (+=), dgamma +=
// With n = x rstd and g = dy gamma:  dx = rstd (g - n mean(g n)).
void rms_norm_gradient(const CpuKernelArguments& a) {
  const std::int64_t columns = a.shape.columns;
  const float* dy = a.floats(0);
  const float* x = a.floats(1);
  const float* gamma = a.floats(2);
  const float* rstds = a.floats(3);
  float* dx = a.floats(4);
  float* dgamma = a.floats(5);
  const float count = static_cast<float>(columns);
  for (std::int64_t row = 0; row < a.shape.rows; ++row, dy += columns, x += columns, dx += columns) {
    const float rstd = rstds[row];
    Wide products{};
    for_each_wide(columns, [&](std::int64_t i, auto lanes) {
      const Wide d = load(dy + i, lanes);
      const Wide normal = load(x + i, lanes) * rstd;
      products += d * load(gamma + i, lanes) * normal;
      store(dgamma + i, load(dgamma + i, lanes) + d * normal, lanes);
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
