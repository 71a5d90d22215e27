#pragma once

#include <nccl.h>

#include <string>

namespace parplan {

// "<what>: <NCCL's text of the result> (<the last error that NCCL recorded, if any>)".
// `communicator` may be null.
std::string nccl_error_text(ncclResult_t result, ncclComm_t communicator, const std::string& what);

// The checked call of NCCL for operations outside of any communicator that could be aborted. Throws
// RunError.
void nccl_check(ncclResult_t result, ncclComm_t communicator, const std::string& what);

}  // namespace parplan
