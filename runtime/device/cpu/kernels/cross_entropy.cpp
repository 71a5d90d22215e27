#include "runtime/device/cpu/kernels/kernels.h"
#include "runtime/device/cpu/kernels/simd.h"

// The vocabulary may be split over ranks: this shard holds the columns of the tokens [begin, begin
// + columns), of which the first `valid` are no padding. Maxima and sums are reduced over the
// shards between the kernels. A negative target is none: its token has neither loss nor gradient.
namespace parplan::PARPLAN_CPU_NAMESPACE {

// logits -> maximum per token; minus infinity on a shard that is all padding.
void cross_entropy_max(const CpuKernelArguments& a) {
  const float* logits = a.floats(0);
  float* maxima = a.floats(1);
  const float lowest = -__builtin_inff();
  for (std::int64_t row = 0; row < a.shape.rows; ++row, logits += a.shape.columns) {
    Wide largest = splat(lowest);
    for_each_wide(a.shape.valid, [&](std::int64_t i, auto lanes) {
      largest = maximum(largest, load(logits + i, lanes, lowest));
    });
    maxima[row] = max_lanes(largest);
  }
}

// logits, targets, maximum -> per token {sum of exp(x - max), target's x - max if it is of this
// shard, else 0}
void cross_entropy_sums(const CpuKernelArguments& a) {
  const float* logits = a.floats(0);
  const std::int32_t* targets = a.tokens(1);
  const float* maxima = a.floats(2);
  float* sums = a.floats(3);
  for (std::int64_t row = 0; row < a.shape.rows; ++row, logits += a.shape.columns) {
    const float max = maxima[row];
    Wide sum{};
    std::int64_t i = 0;
    for (; i + 16 <= a.shape.valid; i += 16) sum += exponential(load(logits + i, Whole{}) - max);
    if (i < a.shape.valid) {
      const Rest rest{a.shape.valid - i};
      alignas(64) float tail[16] = {};
      store(tail, exponential(load(logits + i, rest) - max), rest);
      sum += load(tail, Whole{});
    }
    const std::int64_t target = targets[row] - a.shape.begin;
    sums[2 * row] = sum_lanes(sum);
    sums[2 * row + 1] = target >= 0 && target < a.shape.valid ? logits[target] - max : 0.0f;
  }
}

// logits, targets, maximum, sums -> loss += sum over tokens of log(sum) - target, added up in
// double precision
void cross_entropy_loss(const CpuKernelArguments& a) {
  const std::int32_t* targets = a.tokens(1);
  const float* sums = a.floats(3);
  double loss = 0.0;
  for (std::int64_t row = 0; row < a.shape.rows; ++row)
    if (targets[row] >= 0)
      loss += __builtin_log(static_cast<double>(sums[2 * row])) - static_cast<double>(sums[2 * row + 1]);
  *a.floats(4) += static_cast<float>(loss);
}

// logits, targets, maximum, sums, -> dlogits, (loss scale). dlogits = (exp(x - max) / sum -
// [target]) scale, times the loss scale; padding gets 0. In place or not.
void cross_entropy_gradient(const CpuKernelArguments& a) {
  const float* logits = a.floats(0);
  const std::int32_t* targets = a.tokens(1);
  const float* maxima = a.floats(2);
  const float* sums = a.floats(3);
  float* gradient = a.floats(4);
  const float scale = static_cast<float>(a.shape.scale) * (a.shape.scaled ? a.loss_scale(5).scale : 1.0f);
  for (std::int64_t row = 0; row < a.shape.rows; ++row, logits += a.shape.columns, gradient += a.shape.columns) {
    if (targets[row] < 0) {
      __builtin_memset(gradient, 0, a.shape.columns * sizeof(float));
      continue;
    }
    const float max = maxima[row];
    const float factor = scale / sums[2 * row];
    for_each_wide(a.shape.valid, [&](std::int64_t i, auto lanes) {
      store(gradient + i, exponential(load(logits + i, lanes) - max) * factor, lanes);
    });
    const std::int64_t target = targets[row] - a.shape.begin;
    if (target >= 0 && target < a.shape.valid) gradient[target] -= scale;
    __builtin_memset(gradient + a.shape.valid, 0, (a.shape.columns - a.shape.valid) * sizeof(float));
  }
}

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
