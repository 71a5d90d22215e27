#pragma once

// A stand-in for CUDA, cuBLASLt and NCCL on the CPU, for programs whose kernels are plain C++ with
// CUDA's keywords and are launched by cudaLaunchKernelEx. Compile with this folder in front of the
// toolkit's headers and link cuda_emulator. Misuse that CUDA leaves undefined ends the program with
// a message. Environment variables:
//   PARPLAN_EMULATOR_SEED=number       another order of streams, graph nodes, blocks and threads
//   PARPLAN_EMULATOR_PATIENCE=seconds  until a wait for what can never run ends the program (30)
//   PARPLAN_EMULATOR_STRICT=1          the host cannot touch device memory (slower)
//   PARPLAN_EMULATED_DEVICES=number    number of devices (1); from 2 on NCCL needs one per rank,
//                                      like the real one
//   PARPLAN_EMULATED_MEMORY=bytes      memory of a device (8 GiB)

#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tests/cuda_emulator/cuda_runtime_api.h"
#include "tests/cuda_emulator/device_code.h"

namespace emulator {
// Submits a kernel; `thread` is the function of one of its threads, and holds the arguments.
cudaError_t launch(const cudaLaunchConfig_t& launch, const void* kernel, std::function<void()> thread);
}  // namespace emulator

// Arguments are converted to the kernel's parameters and copied when it is launched.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  static_assert((std::is_trivially_copyable_v<std::decay_t<Parameters>> && ...),
                "parameters of kernels are copied as bytes");
  static_assert((std::is_trivially_destructible_v<std::decay_t<Parameters>> && ...),
                "parameters of kernels are copied as bytes");
  static_assert((!std::is_reference_v<Parameters> && ...), "a kernel cannot take references to the host's variables");
  static_assert((sizeof(std::decay_t<Parameters>) + ... + 0) <= 32764, "CUDA passes at most 32764 bytes");
  if (config == nullptr || kernel == nullptr) return cudaErrorInvalidValue;
  auto copies = [](Parameters... parameters) { return std::tuple<std::decay_t<Parameters>...>(parameters...); }(
      std::forward<Arguments>(arguments)...);
  return emulator::launch(*config, reinterpret_cast<const void*>(kernel),
                          [kernel, copies = std::move(copies)] { std::apply(kernel, copies); });
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
template <class T>
cudaError_t cudaMalloc(T** memory, std::size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(memory), bytes);
}
template <class T>
cudaError_t cudaMallocHost(T** memory, std::size_t bytes) {
  return cudaMallocHost(reinterpret_cast<void**>(memory), bytes);
}
template <class T>
cudaError_t cudaHostAlloc(T** memory, std::size_t bytes, unsigned flags) {
  return cudaHostAlloc(reinterpret_cast<void**>(memory), bytes, flags);
}
