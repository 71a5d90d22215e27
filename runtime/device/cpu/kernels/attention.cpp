#include "runtime/device/cpu/kernels/gemm.h"
#include "runtime/device/cpu/kernels/kernels.h"
#include "runtime/device/cpu/kernels/simd.h"

namespace parplan::PARPLAN_CPU_NAMESPACE {

namespace {

// Where the rows of one (sample, query head) are. Activations are [sequence, batch, width]; the
// fused width holds for each key/value head its query heads, the key and the value, each head_dim
// wide. The output has the query heads in the same order; log-sum-exp is [batch, heads, sequence].
struct Head {
  std::int64_t qkv_stride = 0;
  std::int64_t y_stride = 0;
  std::int64_t query = 0;  // offsets into qkv
  std::int64_t key = 0;
  std::int64_t value = 0;
  std::int64_t y = 0;      // offset into the output
  std::int64_t lse = 0;    // offset into log-sum-exp
};

Head head_of(const OpShape& s, std::int64_t sample, std::int64_t head) {
  const std::int64_t per_group = s.heads / s.kv_heads;
  const std::int64_t group = head / per_group;
  const std::int64_t qkv_width = (s.heads + 2 * s.kv_heads) * s.head_dim;
  const std::int64_t y_width = s.heads * s.head_dim;
  const std::int64_t base = sample * qkv_width + group * (per_group + 2) * s.head_dim;
  return {.qkv_stride = s.batch * qkv_width,
          .y_stride = s.batch * y_width,
          .query = base + head % per_group * s.head_dim,
          .key = base + per_group * s.head_dim,
          .value = base + (per_group + 1) * s.head_dim,
          .y = sample * y_width + head * s.head_dim,
          .lse = (sample * s.heads + head) * s.sequence};
}

float score_scale(const OpShape& s) {
  return s.score_scale != 0.0 ? static_cast<float>(s.score_scale)
                              : 1.0f / __builtin_sqrtf(static_cast<float>(s.head_dim));
}

// The keys that a block of queries needs, [begin, end), and those that one of its rows sees,
// counted from `begin`.
struct Keys {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t first(std::int64_t query, const OpShape& s) const {
    const std::int64_t seen = s.window > 0 ? query - s.window + 1 : 0;
    return seen > begin ? seen - begin : 0;
  }
  std::int64_t last(std::int64_t query) const { return query + 1 - begin; }  // one past
  std::int64_t count() const { return end - begin; }
};
Keys keys_of(const OpShape& s, std::int64_t first_query, std::int64_t block) {
  const std::int64_t seen = s.window > 0 ? first_query - s.window + 1 : 0;
  return {.begin = seen > 0 ? seen : 0, .end = first_query + block < s.sequence ? first_query + block : s.sequence};
}

// The operations on a score after it is scaled: s -> cap tanh(s / cap) + slope (key's - query's
// position).
struct Adjustment {
  float cap = 0.0f;    // 0: none
  float slope = 0.0f;
  Adjustment(const OpShape& s, std::int64_t head) : cap(static_cast<float>(s.softcap)) {
    if (s.alibi != 0.0) slope = static_cast<float>(s.alibi * alibi_slope(s.first_head + head, s.all_heads));
  }
  bool any() const { return cap != 0.0f || slope != 0.0f; }
  PARPLAN_INLINE Wide capped(const Wide& score) const {
    return cap != 0.0f ? cap * hyperbolic_tangent(score / cap) : score;
  }
  // d capped / d score.
  PARPLAN_INLINE Wide slope_of_cap(const Wide& capped_score) const {
    const Wide tangent = cap != 0.0f ? capped_score / cap : Wide{};
    return 1.0f - tangent * tangent;
  }
  // For sixteen keys from `distance` = the first one's position - the query's.
  PARPLAN_INLINE Wide bias(std::int64_t distance) const {
    constexpr Wide lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return slope * (static_cast<float>(distance) + lane);
  }
};

void zero(float* p, std::int64_t n) { __builtin_memset(p, 0, n * sizeof(float)); }

// scores[rows, keys] = scale * a[rows, head_dim] b[keys, head_dim]
void dot_products(const float* a, std::int64_t a_stride, const float* b, std::int64_t b_stride, std::int64_t rows,
                  std::int64_t keys, std::int64_t head_dim, float scale, float* scores, float* packing) {
  zero(scores, rows * keys);
  gemm_rows({.m = keys, .n = rows, .k = head_dim, .x = a, .x_stride = a_stride, .w = b, .w_stride = b_stride,
             .y = scores, .y_stride = keys, .scale = scale, .blocking = forward_blocking, .workspace = packing});
}

}  // namespace

// fused qkv -> y, log-sum-exp, workspace. For each block of queries: scores against all keys that
// it may see, softmax in place, product with the values.
void attention(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* qkv = a.floats(0);
  float* y = a.floats(1);
  float* lse = a.floats(2);
  float* scores = a.floats(3);
  const std::int64_t block = attention_block(s.sequence);
  float* packing = scores + align_elements(block * s.sequence);
  const float scale = score_scale(s);
  for (std::int64_t sample = 0; sample < s.batch; ++sample) {
    for (std::int64_t head = 0; head < s.heads; ++head) {
      const Head h = head_of(s, sample, head);
      const Adjustment adjustment(s, head);
      for (std::int64_t begin = 0; begin < s.sequence; begin += block) {
        const Keys met = keys_of(s, begin, block);
        const std::int64_t keys = met.count();
        const std::int64_t rows = met.end - begin;
        dot_products(qkv + h.query + begin * h.qkv_stride, h.qkv_stride, qkv + h.key + met.begin * h.qkv_stride,
                     h.qkv_stride, rows, keys, s.head_dim, scale, scores, packing);
        for (std::int64_t row = 0; row < rows; ++row) {
          const std::int64_t query = begin + row;
          const std::int64_t first = met.first(query, s);
          const std::int64_t visible = met.last(query) - first;
          zero(scores + row * keys, first);
          float* p = scores + row * keys + first;
          if (adjustment.any())
            for_each_wide(visible, [&](std::int64_t i, auto lanes) {
              store(p + i, adjustment.capped(load(p + i, lanes)) + adjustment.bias(met.begin + first + i - query),
                    lanes);
            });
          Wide largest = splat(p[0]);
          for_each_wide(visible, [&](std::int64_t i, auto lanes) {
            largest = maximum(largest, load(p + i, lanes, p[0]));
          });
          const float max = max_lanes(largest);
          Wide sum{};
          for_each_wide(visible, [&](std::int64_t i, auto lanes) {
            const Wide e = exponential(load(p + i, lanes, -__builtin_inff()) - max);
            store(p + i, e, lanes);
            sum += load(p + i, lanes);  // the padding of the rest does not count
          });
          const float total = sum_lanes(sum);
          const float inverse = 1.0f / total;
          for_each_wide(visible, [&](std::int64_t i, auto lanes) {
            store(p + i, load(p + i, lanes) * inverse, lanes);
          });
          zero(p + visible, keys - first - visible);
          lse[h.lse + query] = max + __builtin_logf(total);
        }
        float* out = y + h.y + begin * h.y_stride;
        for (std::int64_t row = 0; row < rows; ++row) zero(out + row * h.y_stride, s.head_dim);
        gemm_rows_transposed({.m = s.head_dim, .n = rows, .k = keys, .x = scores, .x_stride = keys,
                              .w = qkv + h.value + met.begin * h.qkv_stride, .w_stride = h.qkv_stride, .y = out,
                              .y_stride = h.y_stride, .blocking = backward_blocking, .workspace = packing});
      }
    }
  }
}

// dy, qkv, y, log-sum-exp -> dqkv, workspace. As FlashAttention (Dao et al. 2022, algorithm 4):
// with P = exp(scale Q K^T - lse), dP = dY V^T, D = rowsum(dY * Y) and dS = P (dP - D) scale: dQ =
// dS K, dK = dS^T Q, dV = P^T dY. A capped score t = cap tanh(s / cap) multiplies dS by dt/ds = 1 -
// (t / cap)^2.
void attention_gradient(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* dy = a.floats(0);
  const float* qkv = a.floats(1);
  const float* y = a.floats(2);
  const float* lse = a.floats(3);
  float* dqkv = a.floats(4);
  const std::int64_t block = attention_block(s.sequence);
  float* probabilities = a.floats(5);
  float* gradients = probabilities + align_elements(block * s.sequence);
  float* sums = gradients + align_elements(block * s.sequence);
  float* packing = sums + align_elements(block);
  const float scale = score_scale(s);
  zero(dqkv, s.sequence * s.batch * (s.heads + 2 * s.kv_heads) * s.head_dim);
  for (std::int64_t sample = 0; sample < s.batch; ++sample) {
    for (std::int64_t head = 0; head < s.heads; ++head) {
      const Head h = head_of(s, sample, head);
      const Adjustment adjustment(s, head);
      for (std::int64_t begin = 0; begin < s.sequence; begin += block) {
        const Keys met = keys_of(s, begin, block);
        const std::int64_t keys = met.count();
        const std::int64_t rows = met.end - begin;
        const std::int64_t first_key = met.begin * h.qkv_stride;
        const float* query = qkv + h.query + begin * h.qkv_stride;
        const float* dout = dy + h.y + begin * h.y_stride;
        const float* out = y + h.y + begin * h.y_stride;
        dot_products(query, h.qkv_stride, qkv + h.key + first_key, h.qkv_stride, rows, keys, s.head_dim, scale,
                     probabilities, packing);
        dot_products(dout, h.y_stride, qkv + h.value + first_key, h.qkv_stride, rows, keys, s.head_dim, 1.0f, gradients,
                     packing);
        for (std::int64_t row = 0; row < rows; ++row) {
          Wide sum{};
          for_each_wide(s.head_dim, [&](std::int64_t i, auto lanes) {
            sum += load(dout + row * h.y_stride + i, lanes) * load(out + row * h.y_stride + i, lanes);
          });
          sums[row] = sum_lanes(sum);
        }
        for (std::int64_t row = 0; row < rows; ++row) {
          const std::int64_t at = begin + row;
          const std::int64_t first = met.first(at, s);
          const std::int64_t visible = met.last(at) - first;
          zero(probabilities + row * keys, first);
          zero(gradients + row * keys, first);
          float* p = probabilities + row * keys + first;
          float* d = gradients + row * keys + first;
          const float row_lse = lse[h.lse + at];
          const float row_sum = sums[row];
          if (adjustment.any()) {
            for_each_wide(visible, [&](std::int64_t i, auto lanes) {
              const Wide capped = adjustment.capped(load(p + i, lanes));
              const Wide probability = exponential(capped + adjustment.bias(met.begin + first + i - at) - row_lse);
              store(p + i, probability, lanes);
              store(d + i, probability * (load(d + i, lanes) - row_sum) * scale * adjustment.slope_of_cap(capped),
                    lanes);
            });
          } else {
            for_each_wide(visible, [&](std::int64_t i, auto lanes) {
              const Wide probability = exponential(load(p + i, lanes) - row_lse);
              store(p + i, probability, lanes);
              store(d + i, probability * (load(d + i, lanes) - row_sum) * scale, lanes);
            });
          }
          zero(p + visible, keys - first - visible);
          zero(d + visible, keys - first - visible);
        }
        gemm_rows_transposed({.m = s.head_dim, .n = rows, .k = keys, .x = gradients, .x_stride = keys,
                              .w = qkv + h.key + first_key, .w_stride = h.qkv_stride,
                              .y = dqkv + h.query + begin * h.qkv_stride, .y_stride = h.qkv_stride,
                              .blocking = backward_blocking, .workspace = packing});
        gemm_outer({.m = s.head_dim, .n = keys, .k = rows, .x = gradients, .x_stride = keys,
                    .w = query, .w_stride = h.qkv_stride, .y = dqkv + h.key + first_key, .y_stride = h.qkv_stride,
                    .blocking = backward_blocking, .workspace = packing});
        gemm_outer({.m = s.head_dim, .n = keys, .k = rows, .x = probabilities, .x_stride = keys,
                    .w = dout, .w_stride = h.y_stride, .y = dqkv + h.value + first_key, .y_stride = h.qkv_stride,
                    .blocking = backward_blocking, .workspace = packing});
      }
    }
  }
}

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
