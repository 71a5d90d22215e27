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
// The bytes [memory, memory + bytes) lie in one allocation.
bool lies_in(const Allocation& allocation, const void* memory, std::size_t bytes);

}  // namespace emulator
