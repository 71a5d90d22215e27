#include "runtime/device/cpu/kernels/fused_qkv.h"
#include "runtime/device/cpu/kernels/kernels.h"
#include "runtime/device/cpu/kernels/simd.h"

namespace parplan::PARPLAN_CPU_NAMESPACE {

namespace {

constexpr std::int64_t pairs_at_a_time = 64;

// Rotates the first rotary_dim features of query and key heads by position * theta^(-2 i /
// rotary_dim), over the factor of linear scaling where there is one, pairing element i with i +
// rotary_dim / 2 (the convention of GPT-NeoX and Hugging Face), or 2i with 2i + 1 (GPT-J's);
// `direction` -1 rotates back, which is the gradient. The angle is rounded to float32 where Hugging
// Face rounds it. The rest is copied; `from` may be `to`.
void rotate(const OpShape& s, const float* from, float* to, float direction) {
  const std::int64_t turning = s.rotary_dim > 0 ? s.rotary_dim : s.head_dim;
  const std::int64_t half = turning / 2;
  const std::int64_t width = fused_width(s);
  for (std::int64_t first = 0; first < half; first += pairs_at_a_time) {
    const std::int64_t pairs = half - first < pairs_at_a_time ? half - first : pairs_at_a_time;
    float frequency[pairs_at_a_time];
    for (std::int64_t i = 0; i < pairs; ++i)
      frequency[i] = static_cast<float>(
          1.0 / __builtin_pow(s.theta, 2.0 * static_cast<double>(first + i) / static_cast<double>(turning)));
    for (std::int64_t i = 0; s.factor != 0.0 && i < pairs; ++i) frequency[i] /= static_cast<float>(s.factor);
    for (std::int64_t place = 0; place < s.sequence; ++place) {
      float cosine[pairs_at_a_time];
      float sine[pairs_at_a_time];
      for (std::int64_t i = 0; i < pairs; ++i) {
        const float angle = static_cast<float>(s.position(place)) * frequency[i];
        cosine[i] = __builtin_cosf(angle);
        sine[i] = direction * __builtin_sinf(angle);
      }
      for (std::int64_t sample = 0; sample < s.batch; ++sample) {
        const std::int64_t row = (place * s.batch + sample) * width;
        for_each_head(s, [&](const FusedHead& head) {
          if (head.part == HeadPart::value) return;
          const float* x = from + row + head.offset;
          float* y = to + row + head.offset;
          if (s.interleaved) {
            for (std::int64_t i = 0; i < pairs; ++i) {
              const float low = x[2 * (first + i)], high = x[2 * (first + i) + 1];
              y[2 * (first + i)] = low * cosine[i] - high * sine[i];
              y[2 * (first + i) + 1] = high * cosine[i] + low * sine[i];
            }
            return;
          }
          for_each_wide(pairs, [&](std::int64_t i, auto lanes) {
            const Wide c = load(cosine + i, lanes), n = load(sine + i, lanes);
            const Wide low = load(x + first + i, lanes), high = load(x + first + half + i, lanes);
            store(y + first + i, low * c - high * n, lanes);
            store(y + first + half + i, high * c + low * n, lanes);
          });
        });
      }
    }
  }
  if (from == to) return;
  for (std::int64_t row = 0; row < s.sequence * s.batch; ++row)
    for_each_head(s, [&](const FusedHead& head) {
      const std::int64_t turned = head.part == HeadPart::value ? 0 : turning;
      const std::int64_t offset = row * width + head.offset + turned;
      __builtin_memcpy(to + offset, from + offset, (s.head_dim - turned) * sizeof(float));
    });
}

}  // namespace

// qkv -> qkv, rotated
void rotary(const CpuKernelArguments& a) { rotate(a.shape, a.floats(0), a.floats(1), 1.0f); }

// dy -> dx
void rotary_gradient(const CpuKernelArguments& a) { rotate(a.shape, a.floats(0), a.floats(1), -1.0f); }

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
