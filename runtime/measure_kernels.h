#pragma once

#include <functional>
#include <string>
#include <vector>

#include "planner/cluster/device.h"
#include "planner/cluster/device_measurements.h"
#include "runtime/device/backend.h"

namespace parplan {

// Kernels to time, with `time` left open: matrix products over sizes of transformers and some that
// fill no tile, attention, and memory-bound kernels, from small to large, in sizes for a GPU or for
// a core.
std::vector<KernelMeasurement> kernels_to_measure(BackendKind backend, const std::vector<DataType>& types);

struct MeasureOptions {
  Seconds budget{30.0};
  // Device memory to work in; kernels that need more are left out.
  Bytes memory{std::int64_t{2} << 30};
  // Sets of operands rotate until they have this many bytes together, so that no kernel finds its
  // operands in a cache.
  Bytes footprint{std::int64_t{256} << 20};
  std::vector<Bytes> copies{Bytes(1 << 20), Bytes(16 << 20), Bytes(256 << 20)};
  std::function<void(int done, int of)> progress = [](int, int) {};
};

// Times kernels, copies and launches on `backend`, which nothing else uses meanwhile: the median of
// repeated runs after a warm-up, each of several consecutive kernels that the backend may replay,
// as in training. A kernel is left out if a single run takes more than its share of the budget.
// Operands hold numbers that look random, since the power that matrix units draw depends on them.
Measurements measure_kernels(Backend& backend, const std::vector<KernelMeasurement>& kernels,
                             const MeasureOptions& options);

}  // namespace parplan
