#include "planner/cluster/device.h"

#include <algorithm>
#include <array>

#include "planner/base/error.h"

namespace parplan {
namespace {

constexpr std::array<const char*, 2> backend_names = {"cpu", "cuda"};

template <typename Unit>
Unit between(Unit low, Unit high, double t) {
  return low + (high - low) * t;
}

}  // namespace

const char* name(BackendKind backend) { return backend_names[static_cast<std::size_t>(backend)]; }

DeviceRates rates_at(const DeviceKind& device, int active) {
  PARPLAN_ASSERT(!device.rates.empty() && active >= 1, device.name + " with " + std::to_string(active) + " active");
  const auto above = std::find_if(device.rates.begin(), device.rates.end(),
                                  [&](const DeviceRates& row) { return row.active >= active; });
  if (above == device.rates.begin() || above == device.rates.end()) {
    DeviceRates row = above == device.rates.end() ? device.rates.back() : *above;
    row.active = active;
    return row;
  }
  const DeviceRates& low = *(above - 1);
  const DeviceRates& high = *above;
  const double t = static_cast<double>(active - low.active) / (high.active - low.active);
  return {.active = active,
          .matrix_fp32 = between(low.matrix_fp32, high.matrix_fp32, t),
          .matrix_half = between(low.matrix_half, high.matrix_half, t),
          .vector = between(low.vector, high.vector, t),
          .memory = between(low.memory, high.memory, t)};
}

FlopsPerSecond peak(const DeviceKind& device, DataType type) {
  return type == DataType::bf16 || type == DataType::fp16 ? device.peak_half : device.peak_fp32;
}

}  // namespace parplan
