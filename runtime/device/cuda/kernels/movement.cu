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

namespace {

// Bytes of the rows that are moved, and of those before them: positions come first.
struct MovedRows {
  std::size_t before = 0, moved = 0, all = 0;
  explicit MovedRows(const CudaKernelArguments& a)
      : before(static_cast<std::size_t>(a.shape.begin * a.shape.batch * a.shape.columns * size_of(a.type))),
        moved(static_cast<std::size_t>(a.shape.sequence * a.shape.batch * a.shape.columns * size_of(a.type))),
        all(static_cast<std::size_t>(a.shape.rows * a.shape.columns * size_of(a.type))) {}
  std::size_t behind() const { return before + moved; }
};

void move(std::byte* to, const std::byte* from, std::size_t bytes, const CudaKernelArguments& a) {
  if (bytes > 0 && to != from) check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, a.stream), "rows");
}
void clear(std::byte* to, std::size_t bytes, const CudaKernelArguments& a) {
  if (bytes > 0) check(cudaMemsetAsync(to, 0, bytes, a.stream), "rows");
}

// An element of the table, for one sample, is a thread's; the rest of its rows are zeros.
template <class T>
__global__ void fill_table_rows(std::int64_t count, std::int64_t elements, std::int64_t batch, std::int64_t columns,
                                const T* table, T* rows) {
  const std::int64_t place = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (place >= count) return;
  const std::int64_t element = place / columns / batch * columns + place % columns;
  rows[place] = element < elements ? table[element] : static_cast<T>(0.0f);
}

// The gradients of an element's samples are added in order.
template <class T>
__global__ void add_table_rows(std::int64_t elements, std::int64_t batch, std::int64_t columns, const T* rows,
                               float* gradients) {
  const std::int64_t element = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (element >= elements) return;
  float sum = 0.0f;
  for (std::int64_t sample = 0; sample < batch; ++sample)
    sum += static_cast<float>(rows[(element / columns * batch + sample) * columns + element % columns]);
  gradients[element] += sum;
}

Grid a_thread_each(std::int64_t count) {
  return {.blocks = dim3(rows_of_grid(divide_up(count, flat_threads))), .threads = dim3(flat_threads)};
}

}  // namespace

// x [positions, batch, columns] -> y: `sequence` positions from `begin` on
void take_rows(const CudaKernelArguments& a) {
  const MovedRows rows(a);
  move(a.at<std::byte>(1), a.at<const std::byte>(0) + rows.before, rows.moved, a);
}

// dy -> dx (+=)
void take_rows_gradient(const CudaKernelArguments& a) {
  const MovedRows rows(a);
  auto* const dx = a.at<std::byte>(1);
  if (a.shape.accumulate) {
    const OpShape shape{.rows = a.shape.sequence * a.shape.batch * a.shape.columns};
    void* const operands[] = {a.operands[0], dx + rows.before};
    accumulate({shape, a.type, operands, a.scalars, a.stream, a.matrices});
    return;
  }
  clear(dx, rows.before, a);
  move(dx + rows.before, a.at<const std::byte>(0), rows.moved, a);
  clear(dx + rows.behind(), rows.all - rows.behind(), a);
}

// x, y -> z: x with y from position `begin` on; x may be z
void put_rows(const CudaKernelArguments& a) {
  const MovedRows rows(a);
  const auto* const x = a.at<const std::byte>(0);
  auto* const z = a.at<std::byte>(2);
  move(z, x, rows.before, a);
  move(z + rows.behind(), x + rows.behind(), rows.all - rows.behind(), a);
  move(z + rows.before, a.at<const std::byte>(1), rows.moved, a);
}

// dz -> dx, dy; dz may be dx
void put_rows_gradient(const CudaKernelArguments& a) {
  const MovedRows rows(a);
  const auto* const dz = a.at<const std::byte>(0);
  auto* const dx = a.at<std::byte>(1);
  move(a.at<std::byte>(2), dz + rows.before, rows.moved, a);
  move(dx, dz, rows.before, a);
  move(dx + rows.behind(), dz + rows.behind(), rows.all - rows.behind(), a);
  clear(dx + rows.before, rows.moved, a);
}

// x, table -> y: x, and for each sample the table's elements in `sequence` rows behind it
void append_rows(const CudaKernelArguments& a) {
  const OpShape& s = a.shape;
  const std::int64_t before = s.rows * s.columns, count = s.sequence * s.batch * s.columns;
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    move(a.at<std::byte>(2), a.at<const std::byte>(0), static_cast<std::size_t>(before) * sizeof(T), a);
    launch("append_rows", fill_table_rows<T>, a_thread_each(count), a.stream, count, s.inner, s.batch, s.columns,
           a.at<const T>(1), a.at<T>(2) + before);
  });
}

// dy -> dx, (dtable +=)
void append_rows_gradient(const CudaKernelArguments& a) {
  const OpShape& s = a.shape;
  const std::int64_t before = s.rows * s.columns;
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    move(a.at<std::byte>(1), a.at<const std::byte>(0), static_cast<std::size_t>(before) * sizeof(T), a);
    if (s.freezes_first) return;
    launch("append_rows_gradient", add_table_rows<T>, a_thread_each(s.inner), a.stream, s.inner, s.batch, s.columns,
           a.at<const T>(0) + before, a.at<float>(2));
  });
}

}  // namespace parplan
