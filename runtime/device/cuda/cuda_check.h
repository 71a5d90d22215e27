#pragma once

#include <cuda_runtime.h>

#include <string>

namespace parplan {

// Throws RunError: "<what>: <CUDA's name of the error> (<its text>)".
[[noreturn]] void throw_cuda_error(cudaError_t error, const std::string& what);

// The only checked call of the CUDA runtime. `what` names the operation, for the message.
inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw_cuda_error(error, what);
}

}  // namespace parplan
