#include "planner/cost/kernel.h"

#include <algorithm>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

FlopsPerSecond rate(bool matrix, DataType type, const DeviceRates& rates) {
  if (!matrix) return rates.vector;
  const bool half = type == DataType::bf16 || type == DataType::fp16;
  // Without units for half precision, numbers are widened and multiplied as fp32.
  return half && rates.matrix_half.value > 0.0 ? rates.matrix_half : rates.matrix_fp32;
}

}  // namespace

Seconds kernel_time(OpKind op, const OpShape& shape, DataType type, const DeviceKind& device, const DeviceRates& rates) {
  if (op == OpKind::load_tokens || op == OpKind::load_targets)
    return device.backend == BackendKind::cpu ? Seconds(0.0) : device.kernel_launch;
  const OpRow& row = row_of(op);
  const OpWork work = row.work(shape, type);
  Seconds arithmetic;
  if (work.flops.value > 0.0) {
    const FlopsPerSecond reached = rate(work.matrix, type, rates);
    PARPLAN_ASSERT(reached.value > 0.0, fmt::format("{} on {}", row.name, device.name));
    arithmetic = work.flops / reached;
  }
  PARPLAN_ASSERT(rates.memory.value > 0.0, fmt::format("{} on {}", row.name, device.name));
  return device.kernel_launch + std::max(arithmetic, work.bytes / rates.memory);
}

}  // namespace parplan
