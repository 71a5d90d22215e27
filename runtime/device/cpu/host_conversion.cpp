#include "runtime/device/cpu/host_conversion.h"

#include <algorithm>

#include <Eigen/Core>

#include "planner/base/error.h"
#include "planner/graph/dynamic_quantization.h"

namespace parplan {

void widen(DataType type, const void* from, std::int64_t count, float* to) {
  switch (type) {
    case DataType::fp32:
    case DataType::tf32: std::copy_n(static_cast<const float*>(from), count, to); return;
    case DataType::bf16: std::copy_n(static_cast<const Eigen::bfloat16*>(from), count, to); return;
    case DataType::fp16: std::copy_n(static_cast<const Eigen::half*>(from), count, to); return;
    case DataType::int32:
    case DataType::uint8:
    case DataType::fp8:
      break;
  }
  PARPLAN_ASSERT(false, name(type));
}

void narrow(DataType type, const float* from, std::int64_t count, void* to) {
  switch (type) {
    case DataType::fp32:
    case DataType::tf32: std::copy_n(from, count, static_cast<float*>(to)); return;
    case DataType::bf16:
      std::transform(from, from + count, static_cast<Eigen::bfloat16*>(to),
                     [](float x) { return static_cast<Eigen::bfloat16>(x); });
      return;
    case DataType::fp16:
      std::transform(from, from + count, static_cast<Eigen::half*>(to),
                     [](float x) { return static_cast<Eigen::half>(x); });
      return;
    case DataType::int32:
    case DataType::uint8:
    case DataType::fp8:
      break;
  }
  PARPLAN_ASSERT(false, name(type));
}

void dequantize(bool is_signed, const std::uint8_t* codes, const float* scales, std::int64_t first, std::int64_t count,
                float* to) {
  const CodeValues& values = is_signed ? signed_values : unsigned_values;
  for (std::int64_t i = 0; i < count; ++i) to[i] = values.of[codes[i]] * scales[(first + i) / quantization_block];
}

void quantize(bool is_signed, const float* from, std::int64_t count, std::uint8_t* codes, float* scales) {
  for (std::int64_t block = 0; block < quantization_blocks(count); ++block) {
    const std::int64_t begin = block * quantization_block, end = std::min(begin + quantization_block, count);
    const auto [lowest, highest] = std::minmax_element(from + begin, from + end);
    scales[block] = block_scale(*highest, *lowest);
    const float inverse = inverse_scale(scales[block]);
    for (std::int64_t i = begin; i < end; ++i)
      codes[i] = is_signed ? quantized<true>(from[i] * inverse) : quantized<false>(from[i] * inverse);
  }
}

}  // namespace parplan
