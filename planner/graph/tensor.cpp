#include "planner/graph/tensor.h"

#include <algorithm>
#include <array>

#include "planner/base/enum_index.h"

namespace parplan {

const char* name(Dim dim) {
  constexpr std::array names = {"sequence", "batch",      "hidden",   "kv_groups",
                                "feature",  "vocabulary", "position", "adapter"};
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
    case DataType::fp8: return "fp8";
    case DataType::uint8:
      return "uint8";
  }
  return "unknown";
}

bool divides_into(const TensorDim& dim, std::int64_t shards) {
  const std::int64_t granules = dim.granules();
  if (granules % shards == 0) return true;
  return granules > 0 && shards % granules == 0 && dim.parts % (shards / granules) == 0;
}

std::int64_t shards_of_granule(const TensorDim& dim, std::int64_t shards) {
  return std::max<std::int64_t>(shards / std::max<std::int64_t>(dim.granules(), 1), 1);
}

std::int64_t element_count(const Tensor& tensor) {
  std::int64_t count = 1;
  for (const TensorDim& dim : tensor.dims) count *= dim.size;
  return count;
}

}  // namespace parplan
