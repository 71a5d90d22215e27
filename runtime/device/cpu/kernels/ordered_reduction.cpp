#include "runtime/device/cpu/kernels/kernels.h"
#include "runtime/device/cpu/kernels/simd.h"

namespace parplan::PARPLAN_CPU_NAMESPACE {

void sum_in_order(float* out, const float* const* inputs, int count, std::int64_t elements) {
  for_each_wide(elements, [&](std::int64_t i, auto lanes) {
    Wide sum = load(inputs[0] + i, lanes);
    for (int member = 1; member < count; ++member) sum += load(inputs[member] + i, lanes);
    store(out + i, sum, lanes);
  });
}

// NaN wins, so that a diverged rank is seen by all.
void max_in_order(float* out, const float* const* inputs, int count, std::int64_t elements) {
  for_each_wide(elements, [&](std::int64_t i, auto lanes) {
    Wide largest = load(inputs[0] + i, lanes);
    for (int member = 1; member < count; ++member) {
      const Wide other = load(inputs[member] + i, lanes);
      largest = largest >= other || largest != largest ? largest : other;
    }
    store(out + i, largest, lanes);
  });
}

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
