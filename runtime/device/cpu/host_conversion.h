#pragma once

#include <cstdint>

#include "planner/graph/tensor.h"

namespace parplan {

// Converts between fp32 and the type of a tensor in host memory (fp32, tf32, bf16, fp16); rounds to
// nearest, ties to even.
void widen(DataType type, const void* from, std::int64_t count, float* to);
void narrow(DataType type, const float* from, std::int64_t count, void* to);

// Numbers of a quantized moment (planner/graph/dynamic_quantization.h) from their codes on.
// `scales` begins with that of the block of the first one, which is number `first` of it.
void dequantize(bool is_signed, const std::uint8_t* codes, const float* scales, std::int64_t first,
                std::int64_t count, float* to);
// The codes and the scales of numbers of whole blocks, but for the last one, to the nearest values.
void quantize(bool is_signed, const float* from, std::int64_t count, std::uint8_t* codes, float* scales);

}  // namespace parplan
