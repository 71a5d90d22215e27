#include "planner/graph/cuda_workspace.h"
#include "runtime/device/cuda/kernels/kernels.h"
#include "runtime/device/cuda/kernels/load_store.h"
#include "runtime/device/cuda/kernels/work_division.h"

namespace parplan {
namespace {

constexpr int lanes = 32;        // adjacent in a row
constexpr int rows_at_once = 8;  // of a block

// Sums part blockIdx.y of the rows: parts[part][c]. Each of the block's eight lines of threads sums
// every eighth row of the part, then the lines are added in order.
template <class T, int width>
__global__ void sum_parts(const T* matrix, std::int64_t rows, std::int64_t columns, std::int64_t rows_per_part,
                          float* parts) {
  __shared__ float lines[rows_at_once][lanes * width];
  const int lane = static_cast<int>(threadIdx.x), line = static_cast<int>(threadIdx.y);
  const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * lanes * width;
  const std::int64_t column = first_column + lane * width;
  const std::int64_t begin = blockIdx.y * rows_per_part;
  const std::int64_t end = begin + rows_per_part < rows ? begin + rows_per_part : rows;
  float sum[width] = {}, values[width];
  if (column < columns) {
#pragma unroll 4
    for (std::int64_t row = begin + line; row < end; row += rows_at_once) {
      load(matrix + row * columns + column, values);
#pragma unroll
      for (int k = 0; k < width; ++k) sum[k] += values[k];
    }
  }
#pragma unroll
  for (int k = 0; k < width; ++k) lines[line][lane * width + k] = sum[k];
  __syncthreads();
  for (int i = line * lanes + lane; i < lanes * width && first_column + i < columns; i += lanes * rows_at_once) {
    float total = lines[0][i];
#pragma unroll
    for (int other = 1; other < rows_at_once; ++other) total += lines[other][i];
    parts[blockIdx.y * columns + first_column + i] = total;
  }
}

constexpr int parts_at_once = 32;

// Line l sums the parts l, l + 32, ..., then the lines are added in order.
__global__ void __launch_bounds__(lanes* parts_at_once)
    add_up_parts(const float* parts, std::int64_t count, std::int64_t columns, float* sums) {
  __shared__ float lines[parts_at_once][lanes];
  const int lane = static_cast<int>(threadIdx.x), line = static_cast<int>(threadIdx.y);
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * lanes + lane;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 8
    for (std::int64_t part = line; part < count; part += parts_at_once) sum += parts[part * columns + column];
  }
  lines[line][lane] = sum;
  __syncthreads();
  if (line != 0 || column >= columns) return;
  float total = lines[0][lane];
#pragma unroll
  for (int other = 1; other < parts_at_once; ++other) total += lines[other][lane];
  sums[column] += total;
}

}  // namespace

void add_parts(const float* parts, std::int64_t count, std::int64_t columns, float* sums, cudaStream_t stream) {
  launch("add up parts of sums", add_up_parts,
         Grid{.blocks = dim3(rows_of_grid(divide_up(columns, lanes))), .threads = dim3(lanes, parts_at_once)}, stream,
         parts, count, columns, sums);
}

void add_column_sums(const void* matrix, DataType type, std::int64_t rows, std::int64_t columns, float* sums,
                     void* workspace, cudaStream_t stream) {
  if (rows <= 0 || columns <= 0) return;
  const std::int64_t count = partial_sums(rows);
  auto* parts = static_cast<float*>(workspace);
  dispatch(type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* from = static_cast<const T*>(matrix);
    const auto submit = [&](auto width) {
      constexpr int n = decltype(width)::width;
      launch("sum columns", sum_parts<T, n>,
             Grid{.blocks = dim3(rows_of_grid(divide_up(columns, lanes * n)), static_cast<unsigned>(count)),
                  .threads = dim3(lanes, rows_at_once)},
             stream, from, rows, columns, divide_up(rows, count), parts);
    };
    if (rows_can_move(vector_width<T>, columns, {from})) {
      submit(Count<vector_width<T>>{});
    } else {
      submit(Count<1>{});
    }
  });
  add_parts(parts, count, columns, sums, stream);
}

// dy, (dbias), workspace
void bias_gradient(const CudaKernelArguments& a) {
  if (!a.shape.bias) return;
  add_column_sums(a.operands[0], a.type, a.shape.rows, a.shape.columns, a.at<float>(1), a.operands[2], a.stream);
}

}  // namespace parplan
