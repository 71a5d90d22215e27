#include <chrono>
#include <cstring>
#include <mutex>

#include "tests/cuda_emulator/cuda_runtime.h"
#include "tests/cuda_emulator/device.h"
#include "tests/cuda_emulator/grid.h"
#include "tests/cuda_emulator/memory.h"

struct CUstream_st {};
struct CUevent_st {
  std::chrono::steady_clock::time_point time;
};

namespace emulator {
namespace {
std::mutex mutex;
std::uint64_t launches = 1;
}  // namespace

cudaError_t forbidden_in_capture() { return cudaSuccess; }
void finish_device_work() {}

cudaError_t launch(const cudaLaunchConfig_t& launch, const void* kernel, std::function<void()> thread) {
  const std::lock_guard lock(mutex);
  const dim3 b = launch.gridDim, t = launch.blockDim;
  if (b.x == 0 || b.y == 0 || b.z == 0 || t.x == 0 || t.y == 0 || t.z == 0 || b.x > 2147483647u || b.y > 65535 || b.z > 65535 || t.x > 1024 ||
      t.y > 1024 || t.z > 64 || t.x * t.y * t.z > 1024)
    return remember(cudaErrorInvalidConfiguration);
  if (launch.dynamicSmemBytes > allowed_shared_memory(kernel)) return remember(cudaErrorInvalidValue);
  run_grid({.kernel = kernel, .blocks = b, .threads = t, .shared = launch.dynamicSmemBytes, .thread = std::move(thread)}, launches++);
  return cudaSuccess;
}
}  // namespace emulator

cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) { return cudaMemcpyAsync(to, from, bytes, kind); }
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) { return cudaMemsetAsync(memory, value, bytes); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
