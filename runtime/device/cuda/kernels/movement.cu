#include "runtime/device/cuda/kernels/kernels.h"
#include "runtime/device/cuda/kernels/load_store.h"
#include "runtime/device/cuda/kernels/work_division.h"

namespace parplan {
namespace {

// Each block of y is a row of the grid.
template <class T, int width>
__global__ void move_blocks(std::int64_t rows, std::int64_t blocks, std::int64_t columns, const T* x, T* y) {
  const std::int64_t to = static_cast<std::int64_t>(blockIdx.x);
  const std::int64_t from = (to % rows) * blocks + to / rows;
  for_each_column<width>(columns, [&](std::int64_t i) {
    float values[width];
    load(x + from * columns + i, values);
    store(y + to * columns + i, values);
  });
}

// Rows of `from` and `to` are apart by their strides.
template <class T, int width>
__global__ void move_rows(std::int64_t columns, const T* from, std::int64_t from_stride, T* to,
                          std::int64_t to_stride) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x);
  for_each_column<width>(columns, [&](std::int64_t i) {
    float values[width];
    load(from + row * from_stride + i, values);
    store(to + row * to_stride + i, values);
  });
}

template <class T>
void move_columns(const char* name, const OpShape& s, const T* from, std::int64_t from_stride, T* to,
                  std::int64_t to_stride, cudaStream_t stream) {
  const auto submit = [&](auto width, const Grid& grid) {
    launch(name, move_rows<T, decltype(width)::width>, grid, stream, s.columns, from, from_stride, to, to_stride);
  };
  // Vectors are aligned in every row where the longer stride is a multiple, too.
  if (s.inner % vector_width<T> == 0) {
    submit_rows<vector_width<T>>(s.rows, s.columns, {from, to}, submit);
  } else {
    submit_rows<1>(s.rows, s.columns, {from, to}, submit);
  }
}

}  // namespace

// -> y = 0
void fill_zero(const CudaKernelArguments& a) {
  const std::int64_t bytes = elements(a.shape) * size_of(a.type);
  if (bytes > 0) check(cudaMemsetAsync(a.operands[0], 0, static_cast<std::size_t>(bytes), a.stream), "fill_zero");
}

// x -> y = x
void copy(const CudaKernelArguments& a) {
  const std::int64_t bytes = elements(a.shape) * size_of(a.type);
  if (bytes == 0 || a.operands[0] == a.operands[1]) return;
  check(cudaMemcpyAsync(a.operands[1], a.operands[0], static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice,
                        a.stream),
        "copy");
}

// x [rows, inner, columns] -> y [inner, rows, columns]
void transpose_blocks(const CudaKernelArguments& a) {
  const OpShape& s = a.shape;
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* x = a.at<const T>(0);
    T* y = a.at<T>(1);
    submit_rows<vector_width<T>>(s.rows * s.inner, s.columns, {x, y}, [&](auto width, const Grid& grid) {
      launch("transpose_blocks", move_blocks<T, decltype(width)::width>, grid, a.stream, s.rows, s.inner, s.columns, x,
             y);
    });
  });
}

// x [rows, inner] -> y [rows, columns]: the columns from `begin` on
void take_columns(const CudaKernelArguments& a) {
  const OpShape& s = a.shape;
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    move_columns("take_columns", s, a.at<const T>(0) + s.begin, s.inner, a.at<T>(1), s.columns, a.stream);
  });
}

// x [rows, columns] -> y [rows, inner], in the columns from `begin` on
void put_columns(const CudaKernelArguments& a) {
  const OpShape& s = a.shape;
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    move_columns("put_columns", s, a.at<const T>(0), s.columns, a.at<T>(1) + s.begin, s.inner, a.stream);
  });
}

}  // namespace parplan
