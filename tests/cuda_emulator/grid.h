#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "tests/cuda_emulator/vector_types.h"

namespace emulator {

// The resources of one SM of a Hopper GPU (CUDA C++ Programming Guide, "Technical Specifications
// per Compute Capability").
inline constexpr std::size_t shared_bytes_by_default = 48 * 1024;
inline constexpr std::size_t shared_bytes_at_most = 227 * 1024;

// A kernel as it was launched.
struct Grid {
  const void* kernel = nullptr;  // its address, for messages
  dim3 blocks;
  dim3 threads;
  std::size_t shared = 0;
  std::function<void()> thread;
};

// Runs the whole grid: blocks one after the other, threads as fibers, both in an order that depends
// on `seed`. One host thread at a time.
void run_grid(const Grid& grid, std::uint64_t seed);

// "kernel parplan::f<float>(...), block (0, 0, 0), thread (1, 0, 0)", empty outside of kernels.
const char* where_in_kernel();

}  // namespace emulator
