#include "planner/graph/cuda_workspace.h"
#include "runtime/device/cuda/kernels/kernels.h"
#include "runtime/device/cuda/kernels/load_store.h"
#include "runtime/device/cuda/kernels/thread_reduction.h"
#include "runtime/device/cuda/kernels/work_division.h"

// Memory is passed once: a row of dy and x is held in registers, and so are a block's sums for
// dgamma and dbeta over the rows of its part, which it writes to the workspace for a second kernel
// to add up (planner/graph/cuda_workspace.h); of frozen ones, it writes them for nobody.
namespace parplan {
namespace {

enum class Norm { layer, rms };

template <class T>
struct GradientOperands {
  const T* dy = nullptr;
  const T* x = nullptr;
  const T* gamma = nullptr;
  const float* mean = nullptr;  // layer_norm
  const float* rstd = nullptr;
  T* dx = nullptr;
  float* gamma_parts = nullptr;  // [parts, columns]
  float* beta_parts = nullptr;   // layer_norm
  bool accumulate = false;
};

constexpr int most_threads = 512;
constexpr int most_kept = 16;  // elements of a row in a thread

template <Norm norm, class T>
__device__ __forceinline__ float mean_of(const GradientOperands<T>& o, std::int64_t row, bool present) {
  if constexpr (norm == Norm::layer) {
    return present ? o.mean[row] : 0.0f;
  } else {
    return 0.0f;
  }
}

// dx = rstd (g - mean(g) - n mean(g n)) with n = (x - mean) rstd and g = dy gamma; rms_norm: mean
// and mean(g) are 0.
template <class T, int width>
__device__ __forceinline__ void write_dx(const GradientOperands<T>& o, std::int64_t at, const float (&g)[width],
                                         const float (&normal)[width], float rstd, float mean_g, float mean_product) {
  float dx[width] = {};
  if (o.accumulate) load(o.dx + at, dx);
#pragma unroll
  for (int k = 0; k < width; ++k) dx[k] += (g[k] - mean_g - normal[k] * mean_product) * rstd;
  store(o.dx + at, dx);
}

// Block b has the rows [b rows_per_part, (b + 1) rows_per_part); threads with equal threadIdx.y
// share one of them at a time, `vectors` vectors of `width` elements each.
template <class T, int width, int vectors, Norm norm>
__global__ void __launch_bounds__(most_threads, vectors == 1 ? 2 : 1)
    normalize_gradient(std::int64_t rows, std::int64_t columns, std::int64_t rows_per_part, GradientOperands<T> o) {
  constexpr int sums = norm == Norm::layer ? 2 : 1;
  __shared__ float shared[sums][most_warps];
  __shared__ float lines[most_threads * width * vectors];
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const float inverse_count = 1.0f / static_cast<float>(columns);
  const std::int64_t begin = blockIdx.x * rows_per_part;
  const std::int64_t end = begin + rows_per_part < rows ? begin + rows_per_part : rows;
  float dgamma[vectors][width] = {}, dbeta[vectors][width] = {};
  for (std::int64_t first = begin; first < end; first += blockDim.y) {
    const std::int64_t row = first + threadIdx.y;
    const bool present = row < end;
    const float mean = mean_of<norm>(o, row, present);
    const float rstd = present ? o.rstd[row] : 0.0f;
    float g[vectors][width], normal[vectors][width];
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      const std::int64_t column = (v * threads + thread) * width;
      if (present && column < columns) {
        load(o.dy + row * columns + column, g[v]);
        load(o.x + row * columns + column, normal[v]);
      }
    }
    float totals[sums] = {};  // of g n, and of g
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      const std::int64_t column = (v * threads + thread) * width;
      if (!present || column >= columns) continue;
      float gamma[width];
      load(o.gamma + column, gamma);
#pragma unroll
      for (int k = 0; k < width; ++k) {
        const float d = g[v][k];
        normal[v][k] = (normal[v][k] - mean) * rstd;
        g[v][k] = d * gamma[k];
        dgamma[v][k] += d * normal[v][k];
        totals[0] += g[v][k] * normal[v][k];
        if constexpr (norm == Norm::layer) {
          dbeta[v][k] += d;
          totals[1] += g[v][k];
        }
      }
    }
    over_threads<Sum>(totals, shared);
    const float mean_product = totals[0] * inverse_count;
    const float mean_g = norm == Norm::layer ? totals[sums - 1] * inverse_count : 0.0f;
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      const std::int64_t column = (v * threads + thread) * width;
      if (present && column < columns) write_dx(o, row * columns + column, g[v], normal[v], rstd, mean_g, mean_product);
    }
  }
  // The lines of threads, added in order.
  const int line = static_cast<int>(threadIdx.y), stride = threads * width * vectors;
  const auto write_part = [&](const float(&sum)[vectors][width], float* parts) {
    __syncthreads();
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
#pragma unroll
      for (int k = 0; k < width; ++k) lines[line * stride + (v * threads + thread) * width + k] = sum[v][k];
    }
    __syncthreads();
    for (int i = line * threads + thread; i < columns; i += threads * static_cast<int>(blockDim.y)) {
      float total = lines[i];
      for (int other = 1; other < static_cast<int>(blockDim.y); ++other) total += lines[other * stride + i];
      parts[blockIdx.x * columns + i] = total;
    }
  };
  write_part(dgamma, o.gamma_parts);
  if constexpr (norm == Norm::layer) write_part(dbeta, o.beta_parts);
}

// Rows of any length: read twice, with sums kept in the workspace, each by the thread that owns the
// column.
template <class T, Norm norm>
__global__ void __launch_bounds__(most_threads)
    normalize_gradient_of_long_rows(std::int64_t rows, std::int64_t columns, std::int64_t rows_per_part,
                                    GradientOperands<T> o) {
  constexpr int sums = norm == Norm::layer ? 2 : 1;
  __shared__ float shared[sums][most_warps];
  const float inverse_count = 1.0f / static_cast<float>(columns);
  const std::int64_t begin = blockIdx.x * rows_per_part;
  const std::int64_t end = begin + rows_per_part < rows ? begin + rows_per_part : rows;
  float* dgamma = o.gamma_parts + blockIdx.x * columns;
  float* dbeta = norm == Norm::layer ? o.beta_parts + blockIdx.x * columns : nullptr;
  for (std::int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
    dgamma[i] = 0.0f;
    if constexpr (norm == Norm::layer) dbeta[i] = 0.0f;
  }
  for (std::int64_t row = begin; row < end; ++row) {
    const float mean = mean_of<norm>(o, row, true);
    const float rstd = o.rstd[row];
    float totals[sums] = {};
    for (std::int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
      const float d = to_float(o.dy[row * columns + i]);
      const float normal = (to_float(o.x[row * columns + i]) - mean) * rstd;
      const float g = d * to_float(o.gamma[i]);
      dgamma[i] += d * normal;
      totals[0] += g * normal;
      if constexpr (norm == Norm::layer) {
        dbeta[i] += d;
        totals[1] += g;
      }
    }
    over_threads<Sum>(totals, shared);
    const float mean_product = totals[0] * inverse_count;
    const float mean_g = norm == Norm::layer ? totals[sums - 1] * inverse_count : 0.0f;
    for (std::int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
      const float g[1] = {to_float(o.dy[row * columns + i]) * to_float(o.gamma[i])};
      const float normal[1] = {(to_float(o.x[row * columns + i]) - mean) * rstd};
      write_dx(o, row * columns + i, g, normal, rstd, mean_g, mean_product);
    }
  }
}

template <class T, Norm norm>
void submit(const CudaKernelArguments& a, GradientOperands<T> o, float* workspace, float* dgamma, float* dbeta) {
  const std::int64_t rows = a.shape.rows, columns = a.shape.columns;
  if (rows <= 0) return;
  const std::int64_t parts = partial_sums(rows), rows_per_part = divide_up(rows, parts);
  o.gamma_parts = workspace;
  if (norm == Norm::layer) o.beta_parts = workspace + parts * columns;
  const char* what = name(norm == Norm::layer ? OpKind::layer_norm_gradient : OpKind::rms_norm_gradient);
  const auto grid = [&](int threads, int lines) {
    return Grid{.blocks = dim3(static_cast<unsigned>(parts)),
                .threads = dim3(static_cast<unsigned>(threads), static_cast<unsigned>(lines))};
  };
  const auto submit_as = [&](auto width, auto vectors) {
    constexpr int n = decltype(width)::width, m = decltype(vectors)::width;
    const int threads = whole_warps(divide_up(columns, n * m));
    launch(what, normalize_gradient<T, n, m, norm>, grid(threads, most_threads / threads), a.stream, rows, columns,
           rows_per_part, o);
  };
  constexpr int width = vector_width<T>;
  const T* dx = o.dx;
  if (rows_can_move(width, columns, {o.dy, o.x, o.gamma, dx}) && columns <= most_threads * most_kept) {
    if (columns <= 256 * width) {
      submit_as(Count<width>{}, Count<1>{});
    } else {
      submit_as(Count<width>{}, Count<most_kept / width>{});
    }
  } else if (columns <= most_threads * 8) {
    submit_as(Count<1>{}, Count<8>{});
  } else {
    launch(what, normalize_gradient_of_long_rows<T, norm>, grid(most_threads, 1), a.stream, rows, columns,
           rows_per_part, o);
  }
  if (dgamma != nullptr) add_parts(o.gamma_parts, parts, columns, dgamma, a.stream);
  if (dbeta != nullptr) add_parts(o.beta_parts, parts, columns, dbeta, a.stream);
}

}  // namespace

// dy, x, gamma, mean, rstd -> dx (+=), (dgamma +=), (dbeta +=), workspace
void layer_norm_gradient(const CudaKernelArguments& a) {
  const NormGradients gradients(a, 6);
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    submit<T, Norm::layer>(a,
                           {.dy = a.at<const T>(0),
                            .x = a.at<const T>(1),
                            .gamma = a.at<const T>(2),
                            .mean = a.at<const float>(3),
                            .rstd = a.at<const float>(4),
                            .dx = a.at<T>(5),
                            .accumulate = a.shape.accumulate},
                           gradients.workspace, gradients.first, gradients.second);
  });
}

// dy, x, gamma, rstd -> dx (+=), (dgamma +=), workspace
void rms_norm_gradient(const CudaKernelArguments& a) {
  float* const dgamma = a.shape.freezes_first ? nullptr : a.at<float>(5);
  float* const workspace = a.at<float>(a.shape.freezes_first ? 5 : 6);
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    submit<T, Norm::rms>(a,
                         {.dy = a.at<const T>(0),
                          .x = a.at<const T>(1),
                          .gamma = a.at<const T>(2),
                          .rstd = a.at<const float>(3),
                          .dx = a.at<T>(4),
                          .accumulate = a.shape.accumulate},
                         workspace, dgamma, nullptr);
  });
}

}  // namespace parplan
