#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "runtime/device/cuda/cuda_check.h"

namespace parplan {

// The number of blocks, the number of threads of each, and the bytes of dynamic shared memory of a
// block (above 48 KiB the kernel needs permission: allow_shared_memory).
struct Grid {
  dim3 blocks;
  dim3 threads;
  std::size_t shared = 0;
};

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Kernels are started by the runtime's function, not by <<<>>>, so that the files are C++ to any
// compiler.
template <class... Parameters, class... Arguments>
void launch(const char* what, void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream,
            Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.shared;
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), what);
}

// Lets a block of the kernel have `bytes` of dynamic shared memory on this thread's current GPU.
// CUDA keeps one limit per kernel and GPU, and the call can wait for copies between host and device
// (oneapi-src/unified-runtime, pull request 2678). It is therefore made only to raise the limit,
// which threads thus never lower for one another.
void allow_shared_memory(const void* kernel, std::size_t bytes);
template <class... Parameters>
void allow_shared_memory(void (*kernel)(Parameters...), std::size_t bytes) {
  allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
}

}  // namespace parplan
