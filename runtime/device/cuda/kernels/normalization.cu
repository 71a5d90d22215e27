#include "runtime/device/cuda/kernels/kernels.h"
#include "runtime/device/cuda/kernels/load_store.h"
#include "runtime/device/cuda/kernels/thread_reduction.h"
#include "runtime/device/cuda/kernels/work_division.h"

// A row is held in the registers of a warp or a block, so memory is passed once; the variance is
// summed from differences to the mean, as on the CPU. One kernel is both the norm and its fusion
// with the sum before it: a row meets the same instructions in either.
namespace parplan {
namespace {

enum class Norm { layer, rms };

template <class T>
struct NormOperands {
  // Fused: x = a + b + bias is written first; b and bias may be null. Otherwise only `x` is read.
  const T* a = nullptr;
  const T* b = nullptr;
  const T* bias = nullptr;
  T* sum = nullptr;
  const T* x = nullptr;  // the row: `sum`, or the input
  const T* gamma = nullptr;
  const T* beta = nullptr;  // layer_norm; null: none
  T* y = nullptr;
  float* mean = nullptr;  // layer_norm
  float* rstd = nullptr;
  float epsilon = 0.0f;
};

// The elements of x at `at` (in the matrix) and `column`, as they read after being written.
template <class T, int width>
__device__ __forceinline__ void first_read(const NormOperands<T>& o, std::int64_t at, std::int64_t column,
                                           float (&x)[width]) {
  if (o.sum == nullptr) return load(o.x + at, x);
  float other[width];
  load(o.a + at, x);
  if (o.b != nullptr) {
    load(o.b + at, other);
#pragma unroll
    for (int k = 0; k < width; ++k) x[k] += other[k];
  }
  if (o.bias != nullptr) {
    load(o.bias + column, other);
#pragma unroll
    for (int k = 0; k < width; ++k) x[k] += other[k];
  }
  store(o.sum + at, x);
#pragma unroll
  for (int k = 0; k < width; ++k) x[k] = rounded<T>(x[k]);
}

// This thread's share of a row: `vectors` vectors of `width` elements kept in registers, or with
// vectors = 0, for rows of any length, read again whenever they are needed (if written, by the
// thread that wrote them).
template <class T, int width, int vectors>
struct RowShare {
  float kept[vectors][width];
  std::int64_t begin, columns;
  bool present;

  // Reads the row for the first time and passes over it.
  template <class Body>
  __device__ __forceinline__ void first_pass(const NormOperands<T>& o, const Body& body) {
#pragma unroll
    for (int v = 0; v < vectors; ++v)
      if (has(v)) first_read(o, begin + column(v), column(v), kept[v]);
    pass(o, body);
  }
  template <class Body>
  __device__ __forceinline__ void pass(const NormOperands<T>&, const Body& body) {
#pragma unroll
    for (int v = 0; v < vectors; ++v)
      if (has(v)) body(column(v), kept[v]);
  }
  __device__ __forceinline__ std::int64_t column(int v) const {
    return (v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * width;
  }
  __device__ __forceinline__ bool has(int v) const { return present && column(v) < columns; }
};

template <class T, int width>
struct RowShare<T, width, 0> {
  std::int64_t begin, columns;
  bool present;

  template <class Body>
  __device__ __forceinline__ void first_pass(const NormOperands<T>& o, const Body& body) {
    over(body, [&](std::int64_t i, float(&x)[width]) { first_read(o, begin + i, i, x); });
  }
  template <class Body>
  __device__ __forceinline__ void pass(const NormOperands<T>& o, const Body& body) {
    over(body, [&](std::int64_t i, float(&x)[width]) { load(o.x + begin + i, x); });
  }
  template <class Body, class Read>
  __device__ __forceinline__ void over(const Body& body, const Read& read) {
    if (!present) return;
    const std::int64_t stride = static_cast<std::int64_t>(blockDim.x) * width;
    for (std::int64_t i = static_cast<std::int64_t>(threadIdx.x) * width; i < columns; i += stride) {
      float x[width];
      read(i, x);
      body(i, x);
    }
  }
};

// The threads with equal threadIdx.y share a row.
template <class T, int width, int vectors, Norm norm>
__global__ void __launch_bounds__(1024) normalize(std::int64_t rows, std::int64_t columns, NormOperands<T> o) {
  __shared__ float shared[1][most_warps];
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  RowShare<T, width, vectors> share;
  share.begin = row * columns;
  share.columns = columns;
  share.present = row < rows;
  const float count = static_cast<float>(columns);
  float total = 0.0f, mean = 0.0f;
  if constexpr (norm == Norm::layer) {
    share.first_pass(o, [&](std::int64_t, const float(&x)[width]) {
#pragma unroll
      for (const float value : x) total += value;
    });
    mean = over_threads<Sum>(total, shared) / count;
    total = 0.0f;
    share.pass(o, [&](std::int64_t, const float(&x)[width]) {
#pragma unroll
      for (const float value : x) total += (value - mean) * (value - mean);
    });
  } else {
    share.first_pass(o, [&](std::int64_t, const float(&x)[width]) {
#pragma unroll
      for (const float value : x) total += value * value;
    });
  }
  const float rstd = 1.0f / sqrtf(over_threads<Sum>(total, shared) / count + o.epsilon);
  share.pass(o, [&](std::int64_t i, const float(&x)[width]) {
    float gamma[width], beta[width] = {}, y[width];
    load(o.gamma + i, gamma);
    if constexpr (norm == Norm::layer) {
      if (o.beta != nullptr) load(o.beta + i, beta);
    }
#pragma unroll
    for (int k = 0; k < width; ++k) {
      if constexpr (norm == Norm::layer) {
        y[k] = (x[k] - mean) * rstd * gamma[k] + beta[k];
      } else {
        y[k] = x[k] * rstd * gamma[k];
      }
    }
    store(o.y + share.begin + i, y);
  });
  if (threadIdx.x != 0 || !share.present) return;
  if constexpr (norm == Norm::layer) o.mean[row] = mean;
  o.rstd[row] = rstd;
}

// One warp per row of up to 128 vectors, eight rows per block; otherwise one block per row.
template <class T, Norm norm>
void submit(const CudaKernelArguments& a, const NormOperands<T>& o) {
  const std::int64_t rows = a.shape.rows, columns = a.shape.columns;
  if (rows <= 0) return;
  const auto submit_as = [&](auto width, auto vectors, std::int64_t threads) {
    const int lines = threads == 32 ? 8 : 1;
    launch(name(norm == Norm::layer ? OpKind::layer_norm : OpKind::rms_norm),
           normalize<T, decltype(width)::width, decltype(vectors)::width, norm>,
           Grid{.blocks = dim3(rows_of_grid(divide_up(rows, lines))),
                .threads = dim3(static_cast<unsigned>(threads), static_cast<unsigned>(lines))},
           a.stream, rows, columns, o);
  };
  const T* const x = o.x;
  constexpr int width = vector_width<T>;
  const bool in_vectors = o.sum == nullptr
                              ? rows_can_move(width, columns, {x, o.gamma, o.beta != nullptr ? o.beta : x, o.y})
                              : rows_can_move(width, columns,
                                              {x, o.a, o.b != nullptr ? o.b : x, o.bias != nullptr ? o.bias : x,
                                               o.gamma, o.beta != nullptr ? o.beta : x, o.y});
  if (in_vectors) {
    const std::int64_t pieces = columns / width;
    if (pieces <= 32) return submit_as(Count<width>{}, Count<1>{}, 32);
    if (pieces <= 128) return submit_as(Count<width>{}, Count<4>{}, 32);
    if (pieces <= 256) return submit_as(Count<width>{}, Count<1>{}, whole_warps(pieces));
    if (pieces <= 4096) return submit_as(Count<width>{}, Count<4>{}, whole_warps(divide_up(pieces, 4)));
  }
  if (columns <= 128) return submit_as(Count<1>{}, Count<4>{}, 32);
  if (columns <= 4096) return submit_as(Count<1>{}, Count<4>{}, whole_warps(divide_up(columns, 4)));
  submit_as(Count<1>{}, Count<0>{}, 1024);
}

// The sum with which a fused kernel begins: a, (b), (bias). Returns the index of the next operand.
template <class T>
int read_sum(const CudaKernelArguments& a, NormOperands<T>& o) {
  int next = 0;
  o.a = a.at<const T>(next++);
  if (a.shape.second) o.b = a.at<const T>(next++);
  if (a.shape.bias) o.bias = a.at<const T>(next++);
  return next;
}

}  // namespace

// x, gamma, (beta) -> y, mean, rstd
void layer_norm(const CudaKernelArguments& a) {
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const int next = a.shape.without_beta ? 2 : 3;
    submit<T, Norm::layer>(a, {.x = a.at<const T>(0),
                               .gamma = a.at<const T>(1),
                               .beta = a.shape.without_beta ? nullptr : a.at<const T>(2),
                               .y = a.at<T>(next),
                               .mean = a.at<float>(next + 1),
                               .rstd = a.at<float>(next + 2),
                               .epsilon = static_cast<float>(a.shape.epsilon)});
  });
}

// a, (b), (bias), gamma, (beta) -> sum, y, mean, rstd
void add_layer_norm(const CudaKernelArguments& a) {
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    NormOperands<T> o{.epsilon = static_cast<float>(a.shape.epsilon)};
    int next = read_sum(a, o);
    o.gamma = a.at<const T>(next++);
    if (!a.shape.without_beta) o.beta = a.at<const T>(next++);
    o.sum = a.at<T>(next);
    o.x = o.sum;
    o.y = a.at<T>(next + 1);
    o.mean = a.at<float>(next + 2);
    o.rstd = a.at<float>(next + 3);
    submit<T, Norm::layer>(a, o);
  });
}

// x, gamma -> y, rstd
void rms_norm(const CudaKernelArguments& a) {
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    submit<T, Norm::rms>(a, {.x = a.at<const T>(0),
                             .gamma = a.at<const T>(1),
                             .y = a.at<T>(2),
                             .rstd = a.at<float>(3),
                             .epsilon = static_cast<float>(a.shape.epsilon)});
  });
}

// a, (b), (bias), gamma -> sum, y, rstd
void add_rms_norm(const CudaKernelArguments& a) {
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    NormOperands<T> o{.epsilon = static_cast<float>(a.shape.epsilon)};
    const int next = read_sum(a, o);
    o.gamma = a.at<const T>(next);
    o.sum = a.at<T>(next + 1);
    o.x = o.sum;
    o.y = a.at<T>(next + 2);
    o.rstd = a.at<float>(next + 3);
    submit<T, Norm::rms>(a, o);
  });
}

}  // namespace parplan
