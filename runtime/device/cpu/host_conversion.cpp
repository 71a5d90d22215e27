#include "runtime/device/cpu/host_conversion.h"

#include <algorithm>

#include <Eigen/Core>

#include "planner/base/error.h"

namespace parplan {

void widen(DataType type, const void* from, std::int64_t count, float* to) {
  switch (type) {
    case DataType::fp32:
    case DataType::tf32: std::copy_n(static_cast<const float*>(from), count, to); return;
    case DataType::bf16: std::copy_n(static_cast<const Eigen::bfloat16*>(from), count, to); return;
    case DataType::fp16: std::copy_n(static_cast<const Eigen::half*>(from), count, to); return;
    case DataType::int32:
    case DataType::uint8:
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
      break;
  }
  PARPLAN_ASSERT(false, name(type));
}

}  // namespace parplan
