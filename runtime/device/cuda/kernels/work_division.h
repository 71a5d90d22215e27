#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "planner/base/error.h"
#include "runtime/device/cuda/kernel_launch.h"

// How kernels divide elements and rows among threads, in vectors where addresses allow it.
namespace parplan {

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

// Elements before the first from which all arrays can be moved in vectors; nothing where there
// is none.
inline std::optional<int> head_of(int width, std::initializer_list<Array> arrays) {
  for (int head = 0; head < width; ++head)
    if (can_move(width, head, arrays)) return head;
  return std::nullopt;
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
  const std::optional<int> head = head_of(width, arrays);
  if (head) {
    submit(Count<width>{}, FlatRange{n, *head}, grid(width));
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

}  // namespace parplan
