#include "runtime/comm/nccl/nccl_check.h"

#include <fmt/core.h>

#include "planner/base/error.h"

namespace parplan {

std::string nccl_error_text(ncclResult_t result, ncclComm_t communicator, const std::string& what) {
  const char* last = ncclGetLastError(communicator);
  const std::string text = fmt::format("{}: {}", what, ncclGetErrorString(result));
  return last == nullptr || *last == '\0' ? text : fmt::format("{} ({})", text, last);
}

void nccl_check(ncclResult_t result, ncclComm_t communicator, const std::string& what) {
  if (result != ncclSuccess) throw RunError(nccl_error_text(result, communicator, what));
}

}  // namespace parplan
