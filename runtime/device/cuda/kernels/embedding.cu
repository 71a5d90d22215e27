#include "runtime/device/cuda/kernels/kernels.h"
#include "runtime/device/cuda/kernels/load_store.h"
#include "runtime/device/cuda/kernels/thread_reduction.h"
#include "runtime/device/cuda/kernels/work_division.h"

namespace parplan {
namespace {

template <class T, int width>
__global__ void look_up(const std::int32_t* tokens, const T* table, T* y, std::int64_t columns, std::int64_t begin,
                        std::int64_t valid) {
  const std::int64_t row = blockIdx.x;
  const std::int64_t index = tokens[row] - begin;
  const bool present = index >= 0 && index < valid;
  for_each_column<width>(columns, [&](std::int64_t i) {
    float values[width] = {};
    if (present) load(table + index * columns + i, values);
    store(y + row * columns + i, values);
  });
}

// (colour / 255 - 0.5) / 0.5, as transformers' ViTImageProcessor.
template <class T>
__global__ void normalize_colours(FlatRange range, const std::int32_t* colours, T* y) {
  for_each_flat<1>(range, [&](std::int64_t i, auto) {
    const float value[1] = {fmaf(static_cast<float>(colours[i]), 2.0f / 255.0f, -1.0f)};
    store(y + i, value);
  });
}

// Tokens that a thread examines between two barriers.
constexpr int tokens_at_once = 8;

// One row of the gradient is the work of the blocks (blockIdx.y divides the columns) of the first
// position that has its token; blocks of later positions find the token before them and leave. So
// no two blocks write one row, without atomics, and a row's terms are added in ascending order of
// position whichever block runs when. A block reads each token once, mostly from the second-level
// cache.
template <class T, int width>
__global__ void add_to_rows(const T* dy, const std::int32_t* tokens, float* table, std::int64_t rows,
                            std::int64_t columns, std::int64_t begin, std::int64_t valid) {
  __shared__ unsigned matches[tokens_at_once][most_warps];
  const std::int64_t position = blockIdx.x;
  const std::int32_t token = tokens[position];
  const std::int64_t index = token - begin;
  if (index < 0 || index >= valid) return;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  bool is_later = false;
#pragma unroll 8
  for (std::int64_t earlier = thread; earlier < position; earlier += threads) is_later |= tokens[earlier] == token;
  if (__syncthreads_or(is_later)) return;

  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.y) * threads + thread) * width;
  const bool has_columns = column < columns;
  float sum[width] = {};
  if (has_columns) load(table + index * columns + column, sum);
  for (std::int64_t first = position; first < rows; first += tokens_at_once * threads) {
    bool any = false;
#pragma unroll
    for (int i = 0; i < tokens_at_once; ++i) {
      const std::int64_t row = first + i * threads + thread;
      const bool match = row < rows && tokens[row] == token;
      const unsigned found = __ballot_sync(0xffffffffu, match);
      if (thread % 32 == 0) matches[i][thread / 32] = found;
      any = any || match;
    }
    if (!__syncthreads_or(any)) continue;
    for (int i = 0; i < tokens_at_once; ++i) {
      for (int warp = 0; warp < threads / 32; ++warp) {
        for (unsigned rest = matches[i][warp]; rest != 0; rest &= rest - 1) {
          const std::int64_t row = first + i * threads + warp * 32 + __ffs(static_cast<int>(rest)) - 1;
          if (!has_columns) continue;
          float values[width];
          load(dy + row * columns + column, values);
#pragma unroll
          for (int k = 0; k < width; ++k) sum[k] += values[k];
        }
      }
    }
    __syncthreads();  // all have read the matches
  }
  if (has_columns) store(table + index * columns + column, sum);
}

template <class T, int width>
__global__ void add_row_of_position(const T* x, const T* table, T* y, std::int64_t columns, std::int64_t batch,
                                    ContextChunks chunks) {
  const std::int64_t row = blockIdx.x;
  const T* position = table + chunks.position(row / batch) * columns;
  for_each_column<width>(columns, [&](std::int64_t i) {
    float sum[width], other[width];
    load(x + row * columns + i, sum);
    load(position + i, other);
#pragma unroll
    for (int k = 0; k < width; ++k) sum[k] += other[k];
    store(y + row * columns + i, sum);
  });
}

// blockIdx.x: the row of a position; samples are added in ascending order.
template <class T, int width>
__global__ void add_samples(const T* dy, float* table, std::int64_t columns, std::int64_t batch, ContextChunks chunks) {
  const std::int64_t row = blockIdx.x;
  float* const position = table + chunks.position(row) * columns;
  for_each_column<width>(columns, [&](std::int64_t i) {
    float sum[width], values[width];
    load(position + i, sum);
#pragma unroll 4
    for (std::int64_t sample = 0; sample < batch; ++sample) {
      load(dy + (row * batch + sample) * columns + i, values);
#pragma unroll
      for (int k = 0; k < width; ++k) sum[k] += values[k];
    }
    store(position + i, sum);
  });
}

}  // namespace

// tokens, table -> y. Tokens of other shards of the vocabulary give zeros: the sum over shards is
// the whole.
void embedding(const CudaKernelArguments& a) {
  const OpShape& s = a.shape;
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* table = a.at<const T>(1);
    T* y = a.at<T>(2);
    submit_rows<vector_width<T>>(s.rows, s.columns, {table, y}, [&](auto width, const Grid& grid) {
      launch("embedding", look_up<T, decltype(width)::width>, grid, a.stream, a.at<const std::int32_t>(0), table, y,
             s.columns, s.begin, s.valid);
    });
  });
}

// colours -> y
void normalize_pixels(const CudaKernelArguments& a) {
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    submit_flat<1>(a.shape.rows * a.shape.columns, {a.at<const std::int32_t>(0)},
                   [&](auto, FlatRange range, const Grid& grid) {
                     launch("normalize_pixels", normalize_colours<T>, grid, a.stream, range,
                            a.at<const std::int32_t>(0), a.at<T>(1));
                   });
  });
}

// dy, tokens -> dtable +=
void embedding_gradient(const CudaKernelArguments& a) {
  const OpShape& s = a.shape;
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* dy = a.at<const T>(0);
    float* table = a.at<float>(2);
    submit_rows<vector_width<T>>(s.rows, s.columns, {dy, table}, [&](auto width, const Grid& grid) {
      constexpr int elements_at_once = decltype(width)::width;
      PARPLAN_ASSERT(
          divide_up(s.columns, elements_at_once * static_cast<std::int64_t>(grid.threads.x)) == grid.blocks.y,
          "columns of a row");
      launch("embedding_gradient", add_to_rows<T, elements_at_once>, grid, a.stream, dy, a.at<const std::int32_t>(1),
             table, s.rows, s.columns, s.begin, s.valid);
    });
  });
}

// x, position table -> y
void add_position(const CudaKernelArguments& a) {
  const OpShape& s = a.shape;
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* x = a.at<const T>(0);
    const T* table = a.at<const T>(1) + s.begin * s.columns;
    T* y = a.at<T>(2);
    submit_rows<vector_width<T>>(s.sequence * s.batch, s.columns, {x, table, y}, [&](auto width, const Grid& grid) {
      launch("add_position", add_row_of_position<T, decltype(width)::width>, grid, a.stream, x, table, y, s.columns,
             s.batch, s.chunks);
    });
  });
}

// dy -> dtable +=
void add_position_gradient(const CudaKernelArguments& a) {
  const OpShape& s = a.shape;
  if (s.batch <= 0) return;
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* dy = a.at<const T>(0);
    float* table = a.at<float>(1) + s.begin * s.columns;
    submit_rows<vector_width<T>>(s.sequence, s.columns, {dy, table}, [&](auto width, const Grid& grid) {
      launch("add_position_gradient", add_samples<T, decltype(width)::width>, grid, a.stream, dy, table, s.columns,
             s.batch, s.chunks);
    });
  });
}

}  // namespace parplan
