#include "planner/graph/tensor.h"

#include <array>

#include "planner/base/enum_index.h"

namespace parplan {

const char* name(Dim dim) {
  constexpr std::array names = {"sequence", "batch", "hidden", "kv_groups", "feature", "vocabulary", "position"};
  static_assert(names.size() == count_of<Dim>);
  return names[index_of(dim)];
}

const char* name(DataType type) {
  switch (type) {
    case DataType::fp32: return "fp32";
    case DataType::bf16: return "bf16";
    case DataType::fp16: return "fp16";
    case DataType::int32: return "int32";
    case DataType::tf32: return "tf32";
    case DataType::uint8:
      return "uint8";
  }
  return "unknown";
}

std::int64_t element_count(const Tensor& tensor) {
  std::int64_t count = 1;
  for (const TensorDim& dim : tensor.dims) count *= dim.size;
  return count;
}

}  // namespace parplan
