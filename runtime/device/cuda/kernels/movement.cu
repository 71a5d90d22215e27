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

}  // namespace parplan
