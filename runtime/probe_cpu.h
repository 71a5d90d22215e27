#pragma once

#include <vector>

#include "planner/base/units.h"

namespace parplan {

// A short probe of this machine with the runtime's own kernels and communicator.

// The rates that kernels reach in each of `threads` threads that work at once: the mean over the
// threads.
struct MeasuredRates {
  FlopsPerSecond matrix;   // linear forward and both its gradients, 256 tokens of GPT-2 (768 to 3072), by their flops
  FlopsPerSecond vector;   // GELU of a tensor that stays in cache
  BytesPerSecond memory;   // y += x of tensors that do not
};
MeasuredRates measure_rates(int threads);

// Time of a kernel with almost no work.
Seconds measure_kernel_launch();

// All-reduces of fp32 over threads of this process: the time of a call (lower quartile), by size,
// ascending.
struct MeasuredTransfer {
  Bytes bytes;
  Seconds time;
};
std::vector<MeasuredTransfer> measure_all_reduce(int ranks);

}  // namespace parplan
