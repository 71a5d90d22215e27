#include "runtime/device/cuda/kernel_launch.h"

#include <map>
#include <mutex>

namespace parplan {
namespace {

struct Limits {
  std::mutex mutex;
  std::map<std::pair<int, const void*>, std::size_t> bytes;  // by GPU and kernel
};

}  // namespace

void allow_shared_memory(const void* kernel, std::size_t bytes) {
  static Limits limits;
  int device = 0;
  check(cudaGetDevice(&device), "ask which GPU is in use");
  const std::lock_guard lock(limits.mutex);
  std::size_t& limit = limits.bytes[{device, kernel}];
  if (bytes <= limit) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "allow shared memory");
  limit = bytes;
}

}  // namespace parplan
