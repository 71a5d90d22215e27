#pragma once

#include <cstddef>
#include <optional>

#include "tests/cuda_emulator/cuda_runtime_api.h"

namespace emulator {

struct Allocation {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;
  cudaMemoryType type = cudaMemoryTypeDevice;
  int device = 0;
};

// The live allocation of cudaMalloc or cudaMallocHost that holds `address`, if one does.
std::optional<Allocation> allocation_at(const void* address);
// Whether the bytes [memory, memory + bytes) lie in one allocation.
bool lies_in(const Allocation& allocation, const void* memory, std::size_t bytes);

// With PARPLAN_EMULATOR_STRICT=1, device memory can be touched only while one of these lives, that
// is by code on the device: any other access on the host ends the program, as with a real GPU.
// (This costs a system call for each allocation and each piece of work.)
class DeviceMemoryAccess {
 public:
  DeviceMemoryAccess();
  ~DeviceMemoryAccess();
  DeviceMemoryAccess(const DeviceMemoryAccess&) = delete;
  DeviceMemoryAccess& operator=(const DeviceMemoryAccess&) = delete;
};
// Removes the access for a while.
class HostMemoryOnly {
 public:
  HostMemoryOnly();
  ~HostMemoryOnly();
  HostMemoryOnly(const HostMemoryOnly&) = delete;
  HostMemoryOnly& operator=(const HostMemoryOnly&) = delete;
};

}  // namespace emulator
