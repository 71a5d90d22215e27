#include "planner/graph/tensor.h"

namespace parplan {

const char* name(Dim dim) {
  switch (dim) {
    case Dim::sequence: return "sequence";
    case Dim::batch: return "batch";
    case Dim::hidden: return "hidden";
    case Dim::kv_groups: return "kv_groups";
    case Dim::feature: return "feature";
    case Dim::vocabulary: return "vocabulary";
    case Dim::position: return "position";
  }
  return "unknown";
}

const char* name(DataType type) {
  switch (type) {
    case DataType::fp32: return "fp32";
    case DataType::bf16: return "bf16";
    case DataType::fp16: return "fp16";
    case DataType::int32: return "int32";
    case DataType::tf32: return "tf32";
  }
  return "unknown";
}

std::int64_t element_count(const Tensor& tensor) {
  std::int64_t count = 1;
  for (const TensorDim& dim : tensor.dims) count *= dim.size;
  return count;
}

}  // namespace parplan
