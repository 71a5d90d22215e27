#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "planner/graph/tensor.h"

// The reductions of the device-local communicator.
namespace parplan {

inline constexpr int most_inputs_in_order = 64;

// out[i] = ((inputs[0][i] + inputs[1][i]) + inputs[2][i]) + ..., in fp32 for every type. `out` may
// be one of the inputs, which are in the memory of one device, at most `most_inputs_in_order`.
void sum_in_order(void* out, std::span<const void* const> inputs, std::int64_t count, DataType type,
                  cudaStream_t stream);
// NaN wins, so that a diverged rank is seen by all.
void max_in_order(void* out, std::span<const void* const> inputs, std::int64_t count, DataType type,
                  cudaStream_t stream);

}  // namespace parplan
