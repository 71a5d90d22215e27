#include "runtime/device/cuda/cuda_check.h"

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

void throw_cuda_error(cudaError_t error, const std::string& what) {
  // A non-sticky error would be reported again by an unrelated call.
  static_cast<void>(cudaGetLastError());
  throw RunError(fmt::format("{}: {} ({})", what, cudaGetErrorName(error), cudaGetErrorString(error)));
}

}  // namespace parplan
