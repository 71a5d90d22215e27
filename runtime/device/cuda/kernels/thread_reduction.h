#pragma once

#include <cuda_runtime.h>

// Sums and maxima over the threads of a warp or block, in one order whatever the timing; a + b is
// b + a to the bit, so all threads get the same result. Every thread of the warp or block calls
// them.
namespace parplan {

struct Sum {
  static constexpr float identity = 0.0f;
  __device__ __forceinline__ static float of(float a, float b) { return a + b; }
};
// NaN wins, so that all see a divergence.
struct Maximum {
  static constexpr float identity = -__builtin_inff();
  __device__ __forceinline__ static float of(float a, float b) { return a >= b || a != a ? a : b; }
};

template <class Combine>
__device__ __forceinline__ float over_warp(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value = Combine::of(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

inline constexpr int most_warps = 32;  // of a block

// Over the threads with equal threadIdx.y; blockDim.x is a multiple of 32. The next call may use
// `shared` again.
template <class Combine, int count>
__device__ __forceinline__ void over_threads(float (&values)[count], float (&shared)[count][most_warps]) {
#pragma unroll
  for (int i = 0; i < count; ++i) values[i] = over_warp<Combine>(values[i]);
  const int warps = static_cast<int>(blockDim.x) / 32;
  if (warps == 1) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first = static_cast<int>(threadIdx.y) * warps;
  __syncthreads();  // the last call's results have been read
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < count; ++i) shared[i][first + static_cast<int>(threadIdx.x) / 32] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < count; ++i)
    values[i] = over_warp<Combine>(lane < warps ? shared[i][first + lane] : Combine::identity);
}

template <class Combine>
__device__ __forceinline__ float over_threads(float value, float (&shared)[1][most_warps]) {
  float values[1] = {value};
  over_threads<Combine>(values, shared);
  return values[0];
}

}  // namespace parplan
