#pragma once

#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tests/cuda_emulator/cuda_runtime_api.h"
#include "tests/cuda_emulator/device_code.h"

namespace emulator {
// Submits a kernel; `thread` is what one of its threads runs, and holds the arguments.
cudaError_t launch(const cudaLaunchConfig_t& launch, const void* kernel, std::function<void()> thread);
}  // namespace emulator

// Arguments are converted to the kernel's parameters and copied when it is launched.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  static_assert((std::is_trivially_copyable_v<std::decay_t<Parameters>> && ...), "parameters of kernels are copied as bytes");
  static_assert((std::is_trivially_destructible_v<std::decay_t<Parameters>> && ...), "parameters of kernels are copied as bytes");
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
