#pragma once

#include <cstdint>

#include "planner/graph/tensor.h"

namespace parplan {

// Converts between fp32 and the type of a tensor in host memory (fp32, tf32, bf16, fp16); rounds to
// nearest, ties to even.
void widen(DataType type, const void* from, std::int64_t count, float* to);
void narrow(DataType type, const float* from, std::int64_t count, void* to);

}  // namespace parplan
