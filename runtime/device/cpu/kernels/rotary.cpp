#include "runtime/device/cpu/kernels/kernels.h"
#include "runtime/device/cpu/kernels/wide.h"

namespace parplan::PARPLAN_CPU_NAMESPACE {

namespace {

constexpr std::int64_t pairs_at_a_time = 64;

// Rotates query and key heads by position * theta^(-2 i / head_dim), pairing element i with i + head_dim / 2 (the
// convention of GPT-NeoX and Hugging Face); `direction` -1 rotates back, which is the gradient. The angle is rounded
// to float32 where Hugging Face does. Values are copied; `from` may be `to`.
void rotate(const OpShape& s, const float* from, float* to, float direction) {
  const std::int64_t half = s.head_dim / 2;
  const std::int64_t per_group = s.heads / s.kv_heads;
  const std::int64_t width = (s.heads + 2 * s.kv_heads) * s.head_dim;
  for (std::int64_t first = 0; first < half; first += pairs_at_a_time) {
    const std::int64_t pairs = half - first < pairs_at_a_time ? half - first : pairs_at_a_time;
    float frequency[pairs_at_a_time];
    for (std::int64_t i = 0; i < pairs; ++i)
      frequency[i] = static_cast<float>(
          1.0 / __builtin_pow(s.theta, 2.0 * static_cast<double>(first + i) / static_cast<double>(s.head_dim)));
    for (std::int64_t position = 0; position < s.sequence; ++position) {
      float cosine[pairs_at_a_time];
      float sine[pairs_at_a_time];
      for (std::int64_t i = 0; i < pairs; ++i) {
        const float angle = static_cast<float>(s.begin + position) * frequency[i];
        cosine[i] = __builtin_cosf(angle);
        sine[i] = direction * __builtin_sinf(angle);
      }
      for (std::int64_t sample = 0; sample < s.batch; ++sample) {
        for (std::int64_t head = 0; head < s.heads + 2 * s.kv_heads; ++head) {
          if (head % (per_group + 2) == per_group + 1) continue;  // a value
          const std::int64_t offset = (position * s.batch + sample) * width + head * s.head_dim + first;
          const float* x = from + offset;
          float* y = to + offset;
          for_each_wide(pairs, [&](std::int64_t i, auto lanes) {
            const Wide c = load(cosine + i, lanes), n = load(sine + i, lanes);
            const Wide low = load(x + i, lanes), high = load(x + half + i, lanes);
            store(y + i, low * c - high * n, lanes);
            store(y + half + i, high * c + low * n, lanes);
          });
        }
      }
    }
  }
  if (from == to) return;
  for (std::int64_t row = 0; row < s.sequence * s.batch; ++row)
    for (std::int64_t group = 0; group < s.kv_heads; ++group) {
      const std::int64_t offset = row * width + (group * (per_group + 2) + per_group + 1) * s.head_dim;
      __builtin_memcpy(to + offset, from + offset, s.head_dim * sizeof(float));
    }
}

}  // namespace

// qkv -> qkv, rotated
void rotary(const CpuKernelArguments& a) { rotate(a.shape, a.floats(0), a.floats(1), 1.0f); }

// dy -> dx
void rotary_gradient(const CpuKernelArguments& a) { rotate(a.shape, a.floats(0), a.floats(1), -1.0f); }

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
