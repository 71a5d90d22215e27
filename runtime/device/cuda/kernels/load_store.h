#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "planner/base/error.h"
#include "planner/graph/tensor.h"

// How kernels read and write numbers. All arithmetic is in fp32; T is float, __nv_bfloat16 or
// __half.
namespace parplan {

// The type that stores numbers of a DataType in device memory; `body` receives Number<T>.
template <class T>
struct Number {
  using Type = T;
};
template <class Body>
void dispatch(DataType type, const Body& body) {
  switch (in_memory(type)) {
    case DataType::fp32:
      return body(Number<float>{});
    case DataType::bf16:
      return body(Number<__nv_bfloat16>{});
    case DataType::fp16:
      return body(Number<__half>{});
    default:
      PARPLAN_ASSERT(false, name(type));
  }
}

// Conversions -------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half(x);
}

// The value of x after it was written as T.
template <class T>
__device__ __forceinline__ float rounded(float x) {
  return to_float(from_float<T>(x));
}

// Vectors -----------------------------------------------------------------------------------------

// Elements of the 16 bytes that a thread moves at once.
template <class T>
inline constexpr int vector_width = 16 / static_cast<int>(sizeof(T));

// Reads or writes n elements: one by one where n is 1, otherwise 16 bytes at a time (8 where that
// is all), to which the address must be aligned.
template <class T, int n>
__device__ __forceinline__ void load(const T* from, float (&to)[n]) {
  if constexpr (n == 1) {
    to[0] = to_float(*from);
  } else {
    T numbers[n];
    if constexpr (n * sizeof(T) == 8) {
      const uint2 bits = *reinterpret_cast<const uint2*>(from);
      std::memcpy(static_cast<void*>(numbers), &bits, 8);
    } else {
      static_assert(n * sizeof(T) % 16 == 0);
#pragma unroll
      for (int i = 0; i < n; i += vector_width<T>) {
        const uint4 bits = *reinterpret_cast<const uint4*>(from + i);
        std::memcpy(static_cast<void*>(numbers + i), &bits, 16);
      }
    }
#pragma unroll
    for (int i = 0; i < n; ++i) to[i] = to_float(numbers[i]);
  }
}

template <class T, int n>
__device__ __forceinline__ void store(T* to, const float (&from)[n]) {
  if constexpr (n == 1) {
    *to = from_float<T>(from[0]);
  } else {
    T numbers[n];
#pragma unroll
    for (int i = 0; i < n; ++i) numbers[i] = from_float<T>(from[i]);
    if constexpr (n * sizeof(T) == 8) {
      uint2 bits;
      std::memcpy(&bits, static_cast<const void*>(numbers), 8);
      *reinterpret_cast<uint2*>(to) = bits;
    } else {
      static_assert(n * sizeof(T) % 16 == 0);
#pragma unroll
      for (int i = 0; i < n; i += vector_width<T>) {
        uint4 bits;
        std::memcpy(&bits, static_cast<const void*>(numbers + i), 16);
        *reinterpret_cast<uint4*>(to + i) = bits;
      }
    }
  }
}

}  // namespace parplan
