#include <string>

#include "planner/graph/cuda_workspace.h"
#include "runtime/device/cuda/kernels/kernels.h"
#include "runtime/device/cuda/kernels/load_store.h"
#include "runtime/device/cuda/kernels/thread_reduction.h"
#include "runtime/device/cuda/kernels/work_division.h"

extern __shared__ __align__(16) unsigned char dynamic_shared[];

// Norms of the queries and keys in rows of fused queries, keys and values. Formulas:
// runtime/device/cpu/kernels/query_key_norm.cpp.
namespace parplan {
namespace {

constexpr int warps_per_block = 8;

// A row: for each key/value head its `queries` query heads, the key, the value.
struct FusedRow {
  int queries = 0;  // of a group
  int groups = 0;
  int head_dim = 0;
  __host__ __device__ int slots() const { return groups * (queries + 2); }
  __host__ __device__ std::int64_t columns() const { return static_cast<std::int64_t>(slots()) * head_dim; }
  __host__ __device__ int normed() const { return groups * (queries + 1); }
  __device__ __forceinline__ bool is_value(int slot) const { return slot % (queries + 2) == queries + 1; }
  __device__ __forceinline__ bool is_key(int slot) const { return slot % (queries + 2) == queries; }
  // The number of a query or key head among those that are normalised, in the order of memory, and
  // among its own kind.
  __device__ __forceinline__ int number(int slot) const { return slot - slot / (queries + 2); }
  __device__ __forceinline__ int number_of_kind(int slot) const {
    const int group = slot / (queries + 2);
    return is_key(slot) ? group : group * queries + slot % (queries + 2);
  }
};

FusedRow row_of(const OpShape& s) {
  return {.queries = static_cast<int>(s.heads / s.kv_heads),
          .groups = static_cast<int>(s.kv_heads),
          .head_dim = static_cast<int>(s.head_dim)};
}
std::int64_t rows_of(const OpShape& s) { return s.sequence * s.batch; }

// Each norm ---------------------------------------------------------------------------------------

// A head's mean. (head_dim elements, `width` per lane of a warp at once.)
template <int width, class T>
__device__ __forceinline__ float mean_of_head(const T* x, int head_dim) {
  float sum = 0.0f;
  for (int i = static_cast<int>(threadIdx.x) * width; i < head_dim; i += 32 * width) {
    float v[width];
    load(x + i, v);
#pragma unroll
    for (int k = 0; k < width; ++k) sum += v[k];
  }
  return over_warp<Sum>(sum) / static_cast<float>(head_dim);
}

// A warp processes one head of one row at a time.
template <class T, int width, bool centered>
__global__ void __launch_bounds__(32 * warps_per_block)
    normalize_heads(std::int64_t heads, FusedRow r, const T* qkv, const T* query_gamma, const T* key_gamma, T* y,
                    float* rstd, float epsilon) {
  const int lane = static_cast<int>(threadIdx.x);
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * warps_per_block;
  for (std::int64_t head = static_cast<std::int64_t>(blockIdx.x) * warps_per_block + threadIdx.y; head < heads;
       head += stride) {
    const std::int64_t row = head / r.slots();
    const int slot = static_cast<int>(head - row * r.slots());
    const T* x = qkv + head * r.head_dim;
    T* to = y + head * r.head_dim;
    const bool value = r.is_value(slot);
    const float mean = centered ? mean_of_head<width>(x, r.head_dim) : 0.0f;
    float squares = 0.0f;
    for (int i = lane * width; i < r.head_dim; i += 32 * width) {
      float v[width];
      load(x + i, v);
#pragma unroll
      for (int k = 0; k < width; ++k) squares += (v[k] - mean) * (v[k] - mean);
      if (value) store(to + i, v);
    }
    if (value) continue;
    const float scale = 1.0f / sqrtf(over_warp<Sum>(squares) / static_cast<float>(r.head_dim) + epsilon);
    const T* gamma = r.is_key(slot) ? key_gamma : query_gamma;
    if constexpr (centered) gamma += static_cast<std::int64_t>(r.number_of_kind(slot)) * r.head_dim;
    for (int i = lane * width; i < r.head_dim; i += 32 * width) {
      float v[width], g[width];
      load(x + i, v);
      load(gamma + i, g);
#pragma unroll
      for (int k = 0; k < width; ++k) v[k] = (v[k] - mean) * scale * g[k];
      store(to + i, v);
    }
    if (lane == 0) rstd[row * r.normed() + r.number(slot)] = scale;
  }
}

// Block b has the rows [b rows_per_part, (b + 1) rows_per_part), and its warps take their heads in
// turn. A warp adds up its heads' parts of the gradients of both gammas in shared memory, each
// element by one lane; then the warps are added in order. dqkv may be dy: a lane reads what it
// writes.
template <class T, int width>
__global__ void __launch_bounds__(32 * warps_per_block)
    normalize_heads_gradient(std::int64_t rows, std::int64_t rows_per_part, FusedRow r, const T* dy, const T* qkv,
                             const T* query_gamma, const T* key_gamma, const float* rstd, T* dqkv, float* query_parts,
                             float* key_parts) {
  float* sums = reinterpret_cast<float*>(dynamic_shared);  // [warps, queries' and keys', head_dim]
  const int lane = static_cast<int>(threadIdx.x), warp = static_cast<int>(threadIdx.y);
  const int thread = warp * 32 + lane;
  for (int i = thread; i < warps_per_block * 2 * r.head_dim; i += 32 * warps_per_block) sums[i] = 0.0f;
  __syncthreads();
  const std::int64_t first = blockIdx.x * rows_per_part;
  const std::int64_t last = first + rows_per_part < rows ? first + rows_per_part : rows;
  for (std::int64_t head = first * r.slots() + warp; head < last * r.slots(); head += warps_per_block) {
    const std::int64_t row = head / r.slots();
    const int slot = static_cast<int>(head - row * r.slots());
    const T *d = dy + head * r.head_dim, *x = qkv + head * r.head_dim;
    T* dx = dqkv + head * r.head_dim;
    if (r.is_value(slot)) {
      if (dx == d) continue;
      for (int i = lane * width; i < r.head_dim; i += 32 * width) {
        float v[width];
        load(d + i, v);
        store(dx + i, v);
      }
      continue;
    }
    const bool key = r.is_key(slot);
    const T* gamma = key ? key_gamma : query_gamma;
    float* dgamma = sums + (2 * warp + (key ? 1 : 0)) * r.head_dim;
    const float scale = rstd[row * r.normed() + r.number(slot)];
    float products = 0.0f;
    for (int i = lane * width; i < r.head_dim; i += 32 * width) {
      float from[width], v[width], g[width];
      load(d + i, from);
      load(x + i, v);
      load(gamma + i, g);
#pragma unroll
      for (int k = 0; k < width; ++k) {
        const float product = from[k] * (v[k] * scale);
        products += product * g[k];
        dgamma[i + k] += product;
      }
    }
    const float mean = over_warp<Sum>(products) / static_cast<float>(r.head_dim);
    for (int i = lane * width; i < r.head_dim; i += 32 * width) {
      float from[width], v[width], g[width];
      load(d + i, from);
      load(x + i, v);
      load(gamma + i, g);
#pragma unroll
      for (int k = 0; k < width; ++k) from[k] = (from[k] * g[k] - v[k] * scale * mean) * scale;
      store(dx + i, from);
    }
  }
  __syncthreads();
  for (int i = thread; i < 2 * r.head_dim; i += 32 * warps_per_block) {
    float total = sums[i];
    for (int other = 1; other < warps_per_block; ++other) total += sums[other * 2 * r.head_dim + i];
    float* parts = i < r.head_dim ? query_parts : key_parts;
    parts[static_cast<std::int64_t>(blockIdx.x) * r.head_dim + i % r.head_dim] = total;
  }
}

// LayerNorm, with a gamma for each head. A warp has the same heads in every row of its block, and
// adds up their parts of the gradients of gammas in the workspace, each element by one lane. dqkv
// may be dy.
template <class T, int width>
__global__ void __launch_bounds__(32 * warps_per_block)
    normalize_centered_heads_gradient(std::int64_t rows, std::int64_t rows_per_part, FusedRow r, const T* dy,
                                      const T* qkv, const T* query_gamma, const T* key_gamma, const float* rstd,
                                      T* dqkv, float* query_parts, float* key_parts) {
  const int lane = static_cast<int>(threadIdx.x);
  const std::int64_t first = blockIdx.x * rows_per_part;
  const std::int64_t last = first + rows_per_part < rows ? first + rows_per_part : rows;
  for (int slot = static_cast<int>(threadIdx.y); slot < r.slots(); slot += warps_per_block) {
    const std::int64_t at = static_cast<std::int64_t>(slot) * r.head_dim;
    if (r.is_value(slot)) {
      if (dqkv == dy) continue;
      for (std::int64_t row = first; row < last; ++row)
        for (int i = lane * width; i < r.head_dim; i += 32 * width) {
          float v[width];
          load(dy + row * r.columns() + at + i, v);
          store(dqkv + row * r.columns() + at + i, v);
        }
      continue;
    }
    const bool key = r.is_key(slot);
    const std::int64_t place = static_cast<std::int64_t>(r.number_of_kind(slot)) * r.head_dim;
    const std::int64_t part = static_cast<std::int64_t>(blockIdx.x) * r.groups * (key ? 1 : r.queries) * r.head_dim;
    const T* gamma = (key ? key_gamma : query_gamma) + place;
    float* dgamma = (key ? key_parts : query_parts) + part + place;
    for (int i = lane * width; i < r.head_dim; i += 32 * width) {
#pragma unroll
      for (int k = 0; k < width; ++k) dgamma[i + k] = 0.0f;
    }
    for (std::int64_t row = first; row < last; ++row) {
      const T *d = dy + row * r.columns() + at, *x = qkv + row * r.columns() + at;
      T* dx = dqkv + row * r.columns() + at;
      const float mean = mean_of_head<width>(x, r.head_dim);
      const float scale = rstd[row * r.normed() + r.number(slot)];
      float sum = 0.0f, products = 0.0f;
      for (int i = lane * width; i < r.head_dim; i += 32 * width) {
        float from[width], v[width], g[width];
        load(d + i, from);
        load(x + i, v);
        load(gamma + i, g);
#pragma unroll
        for (int k = 0; k < width; ++k) {
          const float product = from[k] * ((v[k] - mean) * scale);
          sum += from[k] * g[k];
          products += product * g[k];
          dgamma[i + k] += product;
        }
      }
      const float mean_g = over_warp<Sum>(sum) / static_cast<float>(r.head_dim);
      const float mean_product = over_warp<Sum>(products) / static_cast<float>(r.head_dim);
      for (int i = lane * width; i < r.head_dim; i += 32 * width) {
        float from[width], v[width], g[width];
        load(d + i, from);
        load(x + i, v);
        load(gamma + i, g);
#pragma unroll
        for (int k = 0; k < width; ++k)
          from[k] = (from[k] * g[k] - mean_g - (v[k] - mean) * scale * mean_product) * scale;
        store(dx + i, from);
      }
    }
  }
}

// Norms over all heads ----------------------------------------------------------------------------
// A block processes one row at a time; each of its threads has the same columns of every row.
// [0]: queries, [1]: keys.

constexpr int row_threads = 256;

struct Widths {
  float all[2] = {};  // of all ranks
};

__device__ __forceinline__ float rstd_of(const float* squares, int kind, Widths widths, float epsilon) {
  return 1.0f / sqrtf(squares[kind] / widths.all[kind] + epsilon);
}

// Calls body(first column, slot, first element in the head) for this thread's columns of a row.
template <int width, class Body>
__device__ __forceinline__ void for_each_in_row(const FusedRow& r, const Body& body) {
  for (std::int64_t i = static_cast<std::int64_t>(threadIdx.x) * width; i < r.columns(); i += row_threads * width) {
    const int slot = static_cast<int>(i / r.head_dim);
    body(i, slot, static_cast<int>(i - static_cast<std::int64_t>(slot) * r.head_dim));
  }
}

template <class T, int width>
__global__ void __launch_bounds__(row_threads) sum_squares_of_heads(FusedRow r, const T* qkv, float* squares) {
  __shared__ float shared[2][most_warps];
  const T* x = qkv + blockIdx.x * r.columns();
  float totals[2] = {};
  for_each_in_row<width>(r, [&](std::int64_t i, int slot, int) {
    if (r.is_value(slot)) return;
    float v[width], sum = 0.0f;
    load(x + i, v);
#pragma unroll
    for (int k = 0; k < width; ++k) sum += v[k] * v[k];
    totals[r.is_key(slot) ? 1 : 0] += sum;
  });
  over_threads<Sum>(totals, shared);
  if (threadIdx.x < 2) squares[2 * static_cast<std::int64_t>(blockIdx.x) + threadIdx.x] = totals[threadIdx.x];
}

template <class T, int width>
__global__ void __launch_bounds__(row_threads)
    squares_gradient(FusedRow r, const float* dsquares, const T* qkv, T* dqkv, bool accumulate) {
  const std::int64_t row = blockIdx.x * r.columns();
  const float* d = dsquares + 2 * static_cast<std::int64_t>(blockIdx.x);
  const float twice[2] = {2.0f * d[0], 2.0f * d[1]};
  for_each_in_row<width>(r, [&](std::int64_t i, int slot, int) {
    float v[width] = {}, before[width] = {};
    if (!r.is_value(slot)) {
      load(qkv + row + i, v);
    } else if (accumulate) {
      return;
    }
    if (accumulate) load(dqkv + row + i, before);
    const float factor = twice[r.is_key(slot) ? 1 : 0];
#pragma unroll
    for (int k = 0; k < width; ++k) v[k] = before[k] + v[k] * factor;
    store(dqkv + row + i, v);
  });
}

template <class T, int width>
__global__ void __launch_bounds__(row_threads)
    normalize_width(FusedRow r, const T* qkv, const float* squares, const T* query_gamma, const T* key_gamma, T* y,
                    Widths widths, float epsilon) {
  const std::int64_t row = blockIdx.x * r.columns();
  const float* sums = squares + 2 * static_cast<std::int64_t>(blockIdx.x);
  const float rstd[2] = {rstd_of(sums, 0, widths, epsilon), rstd_of(sums, 1, widths, epsilon)};
  for_each_in_row<width>(r, [&](std::int64_t i, int slot, int element) {
    float v[width], g[width];
    load(qkv + row + i, v);
    if (!r.is_value(slot)) {
      const bool key = r.is_key(slot);
      load((key ? key_gamma : query_gamma) + static_cast<std::int64_t>(r.number_of_kind(slot)) * r.head_dim + element,
           g);
#pragma unroll
      for (int k = 0; k < width; ++k) v[k] = v[k] * rstd[key ? 1 : 0] * g[k];
    }
    store(y + row + i, v);
  });
}

// Block b has the rows [b rows_per_part, (b + 1) rows_per_part) and adds up its parts of the
// gradients of both gammas in the workspace, each element by one thread. dqkv may be dy.
template <class T, int width>
__global__ void __launch_bounds__(row_threads)
    normalize_width_gradient(std::int64_t rows, std::int64_t rows_per_part, FusedRow r, const T* dy, const T* qkv,
                             const float* squares, const T* query_gamma, const T* key_gamma, T* dqkv, float* dsquares,
                             float* query_parts, float* key_parts, Widths widths, float epsilon) {
  __shared__ float shared[2][most_warps];
  const std::int64_t head_dim = r.head_dim;
  float* parts[2] = {query_parts + blockIdx.x * r.groups * r.queries * head_dim,
                     key_parts + blockIdx.x * r.groups * head_dim};
  const auto place = [&](int slot, int element) {  // in gammas and their parts
    return static_cast<std::int64_t>(r.number_of_kind(slot)) * head_dim + element;
  };
  for_each_in_row<width>(r, [&](std::int64_t, int slot, int element) {
    if (r.is_value(slot)) return;
    float* to = parts[r.is_key(slot) ? 1 : 0] + place(slot, element);
#pragma unroll
    for (int k = 0; k < width; ++k) to[k] = 0.0f;
  });
  const std::int64_t first = blockIdx.x * rows_per_part;
  const std::int64_t last = first + rows_per_part < rows ? first + rows_per_part : rows;
  for (std::int64_t number = first; number < last; ++number) {
    const std::int64_t row = number * r.columns();
    const float rstd[2] = {rstd_of(squares + 2 * number, 0, widths, epsilon),
                           rstd_of(squares + 2 * number, 1, widths, epsilon)};
    float totals[2] = {};
    for_each_in_row<width>(r, [&](std::int64_t i, int slot, int element) {
      float d[width], v[width], g[width];
      load(dy + row + i, d);
      if (!r.is_value(slot)) {
        const int kind = r.is_key(slot) ? 1 : 0;
        load(qkv + row + i, v);
        load((kind == 1 ? key_gamma : query_gamma) + place(slot, element), g);
        float* to = parts[kind] + place(slot, element);
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < width; ++k) {
          const float through = d[k] * g[k];
          sum += through * v[k];
          to[k] += d[k] * v[k] * rstd[kind];
          d[k] = through * rstd[kind];
        }
        totals[kind] += sum;
      }
      store(dqkv + row + i, d);
    });
    over_threads<Sum>(totals, shared);
    if (threadIdx.x < 2) {
      const int kind = static_cast<int>(threadIdx.x);
      dsquares[2 * number + kind] = -0.5f * totals[kind] * rstd[kind] * rstd[kind] * rstd[kind] / widths.all[kind];
    }
  }
}

Widths widths_of(const OpShape& s) {
  Widths widths;
  widths.all[0] = static_cast<float>(s.all_heads * s.head_dim);
  widths.all[1] = static_cast<float>(s.all_heads / s.heads * s.kv_heads * s.head_dim);
  return widths;
}

// Calls submit(Count<width>) with the widest vectors in which heads can be moved.
template <class T, class Submit>
void with_width(const FusedRow& r, std::initializer_list<Array> arrays, const Submit& submit) {
  if (rows_can_move(vector_width<T>, r.head_dim, arrays)) {
    submit(Count<vector_width<T>>{});
  } else {
    submit(Count<1>{});
  }
}

Grid block_a_row(const OpShape& s) { return {.blocks = dim3(rows_of_grid(rows_of(s))), .threads = dim3(row_threads)}; }

}  // namespace

// qkv, gamma of queries, gamma of keys -> y, rstd
void head_norm(const CudaKernelArguments& a) {
  if (rows_of(a.shape) <= 0) return;
  const FusedRow r = row_of(a.shape);
  const std::int64_t heads = rows_of(a.shape) * r.slots();
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T *qkv = a.at<const T>(0), *query_gamma = a.at<const T>(1), *key_gamma = a.at<const T>(2);
    T* y = a.at<T>(3);
    with_width<T>(r, {qkv, query_gamma, key_gamma, y}, [&](auto width) {
      constexpr int n = decltype(width)::width;
      launch(
          "head_norm", a.shape.centered ? normalize_heads<T, n, true> : normalize_heads<T, n, false>,
          Grid{.blocks = dim3(rows_of_grid(divide_up(heads, warps_per_block))), .threads = dim3(32, warps_per_block)},
          a.stream, heads, r, qkv, query_gamma, key_gamma, y, a.at<float>(4), static_cast<float>(a.shape.epsilon));
    });
  });
}

// dy, qkv, gamma of queries, gamma of keys, rstd -> dqkv, (dgamma of queries +=), (of
// keys +=), workspace
void head_norm_gradient(const CudaKernelArguments& a) {
  const std::int64_t rows = rows_of(a.shape);
  if (rows <= 0) return;
  const FusedRow r = row_of(a.shape);
  const std::int64_t parts = partial_sums(rows);
  const NormGradients gradients(a, 6);
  const bool centered = a.shape.centered;
  const std::int64_t query_width = (centered ? a.shape.heads : 1) * a.shape.head_dim;
  const std::int64_t key_width = (centered ? a.shape.kv_heads : 1) * a.shape.head_dim;
  float* query_parts = gradients.workspace;
  float* key_parts = query_parts + parts * query_width;
  const std::size_t shared = centered ? 0 : sizeof(float) * static_cast<std::size_t>(warps_per_block * 2 * r.head_dim);
  PARPLAN_ASSERT(shared <= 48 << 10, "head_dim " + std::to_string(r.head_dim));
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T *dy = a.at<const T>(0), *qkv = a.at<const T>(1), *query_gamma = a.at<const T>(2),
            *key_gamma = a.at<const T>(3);
    T* dqkv = a.at<T>(5);
    with_width<T>(r, {dy, qkv, query_gamma, key_gamma, dqkv}, [&](auto width) {
      constexpr int n = decltype(width)::width;
      launch("head_norm_gradient",
             centered ? normalize_centered_heads_gradient<T, n> : normalize_heads_gradient<T, n>,
             Grid{.blocks = dim3(static_cast<unsigned>(parts)), .threads = dim3(32, warps_per_block), .shared = shared},
             a.stream, rows, divide_up(rows, parts), r, dy, qkv, query_gamma, key_gamma, a.at<const float>(4), dqkv,
             query_parts, key_parts);
    });
  });
  if (gradients.first != nullptr) add_parts(query_parts, parts, query_width, gradients.first, a.stream);
  if (gradients.second != nullptr) add_parts(key_parts, parts, key_width, gradients.second, a.stream);
}

// qkv -> squares
void query_key_squares(const CudaKernelArguments& a) {
  if (rows_of(a.shape) <= 0) return;
  const FusedRow r = row_of(a.shape);
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* qkv = a.at<const T>(0);
    with_width<T>(r, {qkv}, [&](auto width) {
      launch("query_key_squares", sum_squares_of_heads<T, decltype(width)::width>, block_a_row(a.shape), a.stream, r,
             qkv, a.at<float>(1));
    });
  });
}

// dsquares, qkv -> dqkv (+=)
void query_key_squares_gradient(const CudaKernelArguments& a) {
  if (rows_of(a.shape) <= 0) return;
  const FusedRow r = row_of(a.shape);
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* qkv = a.at<const T>(1);
    T* dqkv = a.at<T>(2);
    with_width<T>(r, {qkv, dqkv}, [&](auto width) {
      launch("query_key_squares_gradient", squares_gradient<T, decltype(width)::width>, block_a_row(a.shape), a.stream,
             r, a.at<const float>(0), qkv, dqkv, a.shape.accumulate);
    });
  });
}

// qkv, squares, gamma of queries, gamma of keys -> y
void query_key_norm(const CudaKernelArguments& a) {
  if (rows_of(a.shape) <= 0) return;
  const FusedRow r = row_of(a.shape);
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T *qkv = a.at<const T>(0), *query_gamma = a.at<const T>(2), *key_gamma = a.at<const T>(3);
    T* y = a.at<T>(4);
    with_width<T>(r, {qkv, query_gamma, key_gamma, y}, [&](auto width) {
      launch("query_key_norm", normalize_width<T, decltype(width)::width>, block_a_row(a.shape), a.stream, r, qkv,
             a.at<const float>(1), query_gamma, key_gamma, y, widths_of(a.shape), static_cast<float>(a.shape.epsilon));
    });
  });
}

// dy, qkv, squares, gamma of queries, gamma of keys -> dqkv, dsquares, (dgamma of queries +=),
// (of keys +=), workspace
void query_key_norm_gradient(const CudaKernelArguments& a) {
  const std::int64_t rows = rows_of(a.shape);
  if (rows <= 0) return;
  const FusedRow r = row_of(a.shape);
  const std::int64_t parts = partial_sums(rows);
  const std::int64_t query_width = a.shape.heads * a.shape.head_dim, key_width = a.shape.kv_heads * a.shape.head_dim;
  const NormGradients gradients(a, 7);
  float* query_parts = gradients.workspace;
  float* key_parts = query_parts + parts * query_width;
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T *dy = a.at<const T>(0), *qkv = a.at<const T>(1), *query_gamma = a.at<const T>(3),
            *key_gamma = a.at<const T>(4);
    T* dqkv = a.at<T>(5);
    with_width<T>(r, {dy, qkv, query_gamma, key_gamma, dqkv}, [&](auto width) {
      launch("query_key_norm_gradient", normalize_width_gradient<T, decltype(width)::width>,
             Grid{.blocks = dim3(static_cast<unsigned>(parts)), .threads = dim3(row_threads)}, a.stream, rows,
             divide_up(rows, parts), r, dy, qkv, a.at<const float>(2), query_gamma, key_gamma, dqkv, a.at<float>(6),
             query_parts, key_parts, widths_of(a.shape), static_cast<float>(a.shape.epsilon));
    });
  });
  if (gradients.first != nullptr) add_parts(query_parts, parts, query_width, gradients.first, a.stream);
  if (gradients.second != nullptr) add_parts(key_parts, parts, key_width, gradients.second, a.stream);
}

}  // namespace parplan
