#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "planner/base/error.h"
#include "planner/graph/tensor.h"
#include "runtime/device/cuda/kernel_launch.h"

// How kernels read, write, add up and divide numbers among threads. All arithmetic is in fp32; T is
// float, __nv_bfloat16 or __half.
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

// The start of an array, to ask how wide its elements can be moved. (A pointer converts to it
// wherever a list of arrays is expected.)
struct Array {
  template <class T>
  Array(const T* begin) : address(reinterpret_cast<std::uintptr_t>(begin)), element(static_cast<int>(sizeof(T))) {}
  std::uintptr_t address;
  int element;
};

// Whether `width` elements can be moved at once from element `first` of every array on.
inline bool can_move(int width, int first, std::initializer_list<Array> arrays) {
  for (const Array& array : arrays) {
    const int bytes = width * array.element < 16 ? width * array.element : 16;
    if ((array.address + static_cast<std::uintptr_t>(first * array.element)) % static_cast<std::uintptr_t>(bytes) != 0)
      return false;
  }
  return true;
}

// Rows of `columns` elements, one after the other in every array: whether every row can be moved in
// vectors of `width`. (Arrays of one row count too.)
inline bool rows_can_move(int width, std::int64_t columns, std::initializer_list<Array> arrays) {
  return columns % width == 0 && can_move(width, 0, arrays);
}

template <int value>
struct Count {
  static constexpr int width = value;
};

// Flat work ---------------------------------------------------------------------------------------
// n elements of arrays that begin anywhere. If all arrays become aligned at the same element:
// `head` elements one by one, then vectors, then the rest; otherwise all one by one.

struct FlatRange {
  std::int64_t n = 0;
  int head = 0;
};

// Elements before the first from which all arrays can be moved in vectors; -1 where there is none.
inline int head_of(int width, std::initializer_list<Array> arrays) {
  for (int head = 0; head < width; ++head)
    if (can_move(width, head, arrays)) return head;
  return -1;
}

// Calls body(first element, Count<elements>) in device code, for each element in one thread.
// Expects one-dimensional blocks.
template <int width, class Body>
__device__ __forceinline__ void for_each_flat(const FlatRange& range, const Body& body) {
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  if constexpr (width == 1) {
    for (std::int64_t i = thread; i < range.n; i += threads) body(i, Count<1>{});
  } else {
    const std::int64_t head = range.head < range.n ? range.head : range.n;
    const std::int64_t vectors = (range.n - head) / width;
    const std::int64_t rest = head + vectors * width;
    for (std::int64_t v = thread; v < vectors; v += threads) body(head + v * width, Count<width>{});
    if (thread < head) body(thread, Count<1>{});
    if (rest + thread < range.n) body(rest + thread, Count<1>{});
  }
}

inline constexpr int flat_threads = 256;

// Calls submit(Count<width>, FlatRange, Grid), unless there is nothing to do. With `most_blocks`, a
// thread has several vectors.
template <int width, class Submit>
void submit_flat(std::int64_t n, std::initializer_list<Array> arrays, const Submit& submit,
                 std::int64_t most_blocks = 0x7fffffff) {
  if (n <= 0) return;
  const auto grid = [&](int elements) {
    const std::int64_t blocks = divide_up(divide_up(n, elements), flat_threads);
    return Grid{.blocks = dim3(static_cast<unsigned>(blocks < most_blocks ? blocks : most_blocks)),
                .threads = dim3(flat_threads)};
  };
  const int head = head_of(width, arrays);
  if (head >= 0) {
    submit(Count<width>{}, FlatRange{n, head}, grid(width));
  } else {
    submit(Count<1>{}, FlatRange{n, 0}, grid(1));
  }
}

// Work by rows ------------------------------------------------------------------------------------
// blockIdx.x is the row; the block's threads and blockIdx.y divide its columns.

template <int width, class Body>
__device__ __forceinline__ void for_each_column(std::int64_t columns, const Body& body) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.y) * blockDim.x * width;
  for (std::int64_t i = (static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * width; i < columns;
       i += stride)
    body(i);
}

constexpr int whole_warps(std::int64_t threads) { return static_cast<int>(divide_up(threads, 32) * 32); }

inline unsigned rows_of_grid(std::int64_t rows) {
  PARPLAN_ASSERT(rows > 0 && rows <= 0x7fffffff, "rows of a grid");
  return static_cast<unsigned>(rows);
}

// Calls submit(Count<width>, Grid) for rows of `columns` elements, unless there is nothing to do.
template <int width, class Submit>
void submit_rows(std::int64_t rows, std::int64_t columns, std::initializer_list<Array> arrays, const Submit& submit) {
  if (rows <= 0 || columns <= 0) return;
  const auto grid = [&](int elements) {
    const std::int64_t vectors = divide_up(columns, elements);
    const std::int64_t threads = vectors < 256 ? whole_warps(vectors) : 256;
    const std::int64_t parts = divide_up(vectors, threads);
    return Grid{.blocks = dim3(rows_of_grid(rows), static_cast<unsigned>(parts < 65535 ? parts : 65535)),
                .threads = dim3(static_cast<unsigned>(threads))};
  };
  if (rows_can_move(width, columns, arrays)) {
    submit(Count<width>{}, grid(width));
  } else {
    submit(Count<1>{}, grid(1));
  }
}

// Sums and maxima over threads --------------------------------------------------------------------
// In one order whatever the timing; a + b is b + a to the bit, so all threads get the same result.
// Every thread of the warp or block calls them.

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
