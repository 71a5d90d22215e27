#include "runtime/device/cpu/kernels/fused_qkv.h"
#include "runtime/device/cpu/kernels/kernels.h"
#include "runtime/device/cpu/kernels/simd.h"

namespace parplan::PARPLAN_CPU_NAMESPACE {

namespace {

PARPLAN_INLINE float reciprocal_root(float mean_square, double epsilon) {
  return 1.0f / __builtin_sqrtf(mean_square + static_cast<float>(epsilon));
}

// The squares of differences from `mean`.
float sum_of_squares(const float* x, std::int64_t n, float mean = 0.0f) {
  Wide squares{};
  for_each_wide(n, [&](std::int64_t i, auto lanes) {
    const Wide v = load(x + i, lanes, mean) - mean;
    squares += v * v;
  });
  return sum_lanes(squares);
}

// A head's mean, where the norm takes it off; else 0.
float mean_of(const OpShape& s, const float* x) {
  if (!s.centered) return 0.0f;
  Wide sum{};
  for_each_wide(s.head_dim, [&](std::int64_t i, auto lanes) { sum += load(x + i, lanes); });
  return sum_lanes(sum) / static_cast<float>(s.head_dim);
}

void copy_head(const OpShape& s, const float* from, float* to) {
  if (from != to) __builtin_memcpy(to, from, s.head_dim * sizeof(float));
}

// 1 / root mean square of queries and of keys over the whole width of all ranks.
struct WidthNorm {
  float rstd[2] = {};
  float width[2] = {};
};
WidthNorm width_norm(const OpShape& s, const float* squares) {
  const std::int64_t all_keys = s.all_heads / s.heads * s.kv_heads;
  WidthNorm norm;
  norm.width[0] = static_cast<float>(s.all_heads * s.head_dim);
  norm.width[1] = static_cast<float>(all_keys * s.head_dim);
  for (int part = 0; part < 2; ++part) norm.rstd[part] = reciprocal_root(squares[part] / norm.width[part], s.epsilon);
  return norm;
}

// Where a head's gamma begins.
std::int64_t gamma_of(const OpShape& s, const FusedHead& head) {
  return s.centered ? head.index * s.head_dim : 0;
}

}  // namespace

// qkv, gamma of queries, gamma of keys -> y, rstd [rows, heads + key/value heads], in the order of
// memory
void head_norm(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* qkv = a.floats(0);
  float* y = a.floats(3);
  float* rstd = a.floats(4);
  const float count = static_cast<float>(s.head_dim);
  for (std::int64_t row = 0; row < s.sequence * s.batch; ++row, qkv += fused_width(s), y += fused_width(s))
    for_each_head(s, [&](const FusedHead& head) {
      const float* x = qkv + head.offset;
      float* out = y + head.offset;
      if (head.part == HeadPart::value) return copy_head(s, x, out);
      const float* gamma = a.floats(head.part == HeadPart::query ? 1 : 2) + gamma_of(s, head);
      const float mean = mean_of(s, x);
      const float r = reciprocal_root(sum_of_squares(x, s.head_dim, mean) / count, s.epsilon);
      for_each_wide(s.head_dim, [&](std::int64_t i, auto lanes) {
        store(out + i, (load(x + i, lanes) - mean) * r * load(gamma + i, lanes), lanes);
      });
      *rstd++ = r;
    });
}

// Where the gradients of both gammas begin, of queries and of keys: null where they are frozen.
struct GammaGradients {
  float* of[2] = {};

  GammaGradients(const CpuKernelArguments& a, int next) {
    if (!a.shape.freezes_first) of[0] = a.floats(next++);
    if (!a.shape.freezes_second) of[1] = a.floats(next);
  }
};

// dy, qkv, gamma of queries, gamma of keys, rstd -> dqkv, (dgamma of queries +=), (dgamma of keys
// +=)
// As rms_norm_gradient, or layer_norm_gradient, head by head, with n = (x - mean) rstd and
// g = dy gamma: dx = rstd (g - mean(g) - n mean(g n)); in RMS norms, both of the first are 0.
void head_norm_gradient(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* dy = a.floats(0);
  const float* qkv = a.floats(1);
  const float* rstd = a.floats(4);
  float* dqkv = a.floats(5);
  const GammaGradients dgammas(a, 6);
  const float count = static_cast<float>(s.head_dim);
  const std::int64_t width = fused_width(s);
  for (std::int64_t row = 0; row < s.sequence * s.batch; ++row, dy += width, qkv += width, dqkv += width)
    for_each_head(s, [&](const FusedHead& head) {
      const float* d = dy + head.offset;
      const float* x = qkv + head.offset;
      float* dx = dqkv + head.offset;
      if (head.part == HeadPart::value) return copy_head(s, d, dx);
      const float* gamma = a.floats(head.part == HeadPart::query ? 2 : 3) + gamma_of(s, head);
      float* dgamma = dgammas.of[head.part == HeadPart::query ? 0 : 1];
      if (dgamma != nullptr) dgamma += gamma_of(s, head);
      const float mean = mean_of(s, x), r = *rstd++;
      Wide sum{};
      Wide products{};
      for_each_wide(s.head_dim, [&](std::int64_t i, auto lanes) {
        const Wide from = load(d + i, lanes), g = load(gamma + i, lanes);
        const Wide product = from * ((load(x + i, lanes, mean) - mean) * r);
        sum += from * g;
        products += product * g;
        if (dgamma != nullptr) store(dgamma + i, load(dgamma + i, lanes) + product, lanes);
      });
      const float mean_g = s.centered ? sum_lanes(sum) / count : 0.0f;
      const float mean_product = sum_lanes(products) / count;
      for_each_wide(s.head_dim, [&](std::int64_t i, auto lanes) {
        const Wide g = load(d + i, lanes) * load(gamma + i, lanes);
        store(dx + i, (g - mean_g - (load(x + i, lanes) - mean) * r * mean_product) * r, lanes);
      });
    });
}

// qkv -> squares [rows, 2]: of this rank's queries, of its keys
void query_key_squares(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* qkv = a.floats(0);
  float* squares = a.floats(1);
  for (std::int64_t row = 0; row < s.sequence * s.batch; ++row, qkv += fused_width(s), squares += 2) {
    squares[0] = squares[1] = 0.0f;
    for_each_head(s, [&](const FusedHead& head) {
      if (head.part == HeadPart::value) return;
      squares[head.part == HeadPart::query ? 0 : 1] += sum_of_squares(qkv + head.offset, s.head_dim);
    });
  }
}

// dsquares, qkv -> dqkv (+=)
void query_key_squares_gradient(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* dsquares = a.floats(0);
  const float* qkv = a.floats(1);
  float* dqkv = a.floats(2);
  const std::int64_t width = fused_width(s);
  for (std::int64_t row = 0; row < s.sequence * s.batch; ++row, dsquares += 2, qkv += width, dqkv += width)
    for_each_head(s, [&](const FusedHead& head) {
      const float* x = qkv + head.offset;
      float* dx = dqkv + head.offset;
      if (head.part == HeadPart::value) {
        if (!s.accumulate) __builtin_memset(dx, 0, s.head_dim * sizeof(float));
        return;
      }
      const float twice = 2.0f * dsquares[head.part == HeadPart::query ? 0 : 1];
      for_each_wide(s.head_dim, [&](std::int64_t i, auto lanes) {
        Wide d = load(x + i, lanes) * twice;
        if (s.accumulate) d += load(dx + i, lanes);
        store(dx + i, d, lanes);
      });
    });
}

// qkv, squares of all ranks, gamma of queries, gamma of keys -> y
void query_key_norm(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* qkv = a.floats(0);
  const float* squares = a.floats(1);
  float* y = a.floats(4);
  for (std::int64_t row = 0; row < s.sequence * s.batch;
       ++row, qkv += fused_width(s), y += fused_width(s), squares += 2) {
    const WidthNorm norm = width_norm(s, squares);
    for_each_head(s, [&](const FusedHead& head) {
      const float* x = qkv + head.offset;
      float* out = y + head.offset;
      if (head.part == HeadPart::value) return copy_head(s, x, out);
      const int part = head.part == HeadPart::query ? 0 : 1;
      const float* gamma = a.floats(2 + part) + head.index * s.head_dim;
      for_each_wide(s.head_dim, [&](std::int64_t i, auto lanes) {
        store(out + i, load(x + i, lanes) * norm.rstd[part] * load(gamma + i, lanes), lanes);
      });
    });
  }
}

// dy, qkv, squares, gamma of queries, gamma of keys -> dqkv, dsquares (of this rank's heads),
// (dgamma of queries +=), (of keys +=)
// With r = (squares / width + epsilon)^-1/2 and y = x r gamma: dx = dy gamma r (through x alone),
// and dsquares = sum(dy gamma x) dr/dsquares = -sum(dy gamma x) r^3 / (2 width).
void query_key_norm_gradient(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* dy = a.floats(0);
  const float* qkv = a.floats(1);
  const float* squares = a.floats(2);
  float* dqkv = a.floats(5);
  float* dsquares = a.floats(6);
  const GammaGradients dgammas(a, 7);
  const std::int64_t width = fused_width(s);
  for (std::int64_t row = 0; row < s.sequence * s.batch;
       ++row, dy += width, qkv += width, dqkv += width, squares += 2, dsquares += 2) {
    const WidthNorm norm = width_norm(s, squares);
    float sums[2] = {};
    for_each_head(s, [&](const FusedHead& head) {
      const float* d = dy + head.offset;
      const float* x = qkv + head.offset;
      float* dx = dqkv + head.offset;
      if (head.part == HeadPart::value) return copy_head(s, d, dx);
      const int part = head.part == HeadPart::query ? 0 : 1;
      const float r = norm.rstd[part];
      const float* gamma = a.floats(3 + part) + head.index * s.head_dim;
      float* dgamma = dgammas.of[part] == nullptr ? nullptr : dgammas.of[part] + head.index * s.head_dim;
      Wide products{};
      for_each_wide(s.head_dim, [&](std::int64_t i, auto lanes) {
        const Wide to_y = load(d + i, lanes), v = load(x + i, lanes);
        const Wide g = to_y * load(gamma + i, lanes);
        products += g * v;
        if (dgamma != nullptr) store(dgamma + i, load(dgamma + i, lanes) + to_y * v * r, lanes);
        store(dx + i, g * r, lanes);
      });
      sums[part] += sum_lanes(products);
    });
    for (int part = 0; part < 2; ++part) {
      const float r = norm.rstd[part];
      dsquares[part] = -0.5f * sums[part] * r * r * r / norm.width[part];
    }
  }
}

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
