#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "planner/graph/relative_position.h"
#include "runtime/device/cuda/kernel_launch.h"
#include "runtime/device/cuda/kernels/attention_kernels.h"
#include "runtime/device/cuda/kernels/load_store.h"

extern __shared__ __align__(16) unsigned char dynamic_shared[];

namespace parplan {

namespace {

// Blocks of 16 x 16 threads work on tiles of `tile` queries and `tile` keys: the thread (ty, tx) on
// rows ty * per + i and columns tx + 16 j, for i, j < per = tile / 16, and on the head's elements
// tx + 16 k. Everything is fp32 in shared memory; rows have an odd stride, so that the same element
// of 16 rows is in 16 banks.
constexpr int side = 16;
constexpr int threads = side * side;

__device__ inline int tx() {
  return static_cast<int>(threadIdx.x) % side;
}
__device__ inline int ty() {
  return static_cast<int>(threadIdx.x) / side;
}

// Tile sizes by head dim, such that two tiles of rows and two of scores stay below 99 KiB, which
// every device since sm_80 grants a block (CUDA C++ Programming Guide, technical specifications).
template <int tile_rows>
struct Tiles {
  static constexpr int rows = tile_rows;
  static constexpr int per = rows / side;
  static constexpr int most_head_dim = rows == 64 ? 128 : most_attention_head_dim;
  static constexpr int elements = most_head_dim / side;  // of a head, for each thread
  static constexpr int score_stride = rows + 1;
  static constexpr int scores = rows * score_stride;
  static_assert(4 * (2 * rows * (most_head_dim | 1) + 2 * scores) <= 99 * 1024);
};

__host__ __device__ constexpr int row_stride(int head_dim) {
  return head_dim | 1;
}

// The numbers [first, first + rows) of a head, which are in the rows `row_of`; zeros from `limit`
// on.
template <int rows, class T, class RowOf>
__device__ void load_rows(float* tile, const T* from, std::int64_t stride, int first, int limit, int head_dim,
                          const RowOf& row_of) {
  for (int place = static_cast<int>(threadIdx.x); place < rows * head_dim; place += threads) {
    const int number = first + place / head_dim;
    const int element = place % head_dim;
    tile[place / head_dim * row_stride(head_dim) + element] =
        number < limit ? static_cast<float>(from[row_of(number) * stride + element]) : 0.0f;
  }
}

template <int rows, class T>
__device__ void load_queries(float* tile, const T* from, std::int64_t stride, int first,
                             const AttentionLayout& layout) {
  load_rows<rows>(tile, from, stride, first, layout.sequence, layout.head_dim, [](int row) { return row; });
}

// Keys or values, by position.
template <int rows, class T>
__device__ void load_keys(float* tile, const T* from, int first, const AttentionLayout& layout) {
  load_rows<rows>(tile, from, layout.key_stride, first, layout.keys, layout.head_dim,
                  [&](int position) { return layout.key_row(position); });
}

// d[i][j] = row (ty, i) of `left` times row (tx, j) of `right`.
template <int per>
__device__ void dot_products(float (&d)[per][per], const float* left, const float* right, int head_dim) {
  const int stride = row_stride(head_dim);
#pragma unroll
  for (int i = 0; i < per; ++i) {
#pragma unroll
    for (int j = 0; j < per; ++j) d[i][j] = 0.0f;
  }
  for (int element = 0; element < head_dim; ++element) {
    float a[per];
    float b[per];
#pragma unroll
    for (int i = 0; i < per; ++i) {
      a[i] = left[(ty() * per + i) * stride + element];
      b[i] = right[(tx() + side * i) * stride + element];
    }
#pragma unroll
    for (int i = 0; i < per; ++i) {
#pragma unroll
      for (int j = 0; j < per; ++j) d[i][j] += a[i] * b[j];
    }
  }
}

template <class Tiles>
__device__ void store_scores(float* to, const float (&scores)[Tiles::per][Tiles::per]) {
#pragma unroll
  for (int i = 0; i < Tiles::per; ++i) {
#pragma unroll
    for (int j = 0; j < Tiles::per; ++j)
      to[(ty() * Tiles::per + i) * Tiles::score_stride + tx() + side * j] = scores[i][j];
  }
}

// d[i][k] += sum over the tile's columns c of scores[row (ty, i)][c] * right[c][tx + 16 k].
template <class Tiles>
__device__ void add_product(float (&d)[Tiles::per][Tiles::elements], const float* scores, const float* right,
                            int head_dim) {
  const int stride = row_stride(head_dim);
  for (int column = 0; column < Tiles::rows; ++column) {
    float a[Tiles::per];
#pragma unroll
    for (int i = 0; i < Tiles::per; ++i) a[i] = scores[(ty() * Tiles::per + i) * Tiles::score_stride + column];
#pragma unroll
    for (int k = 0; k < Tiles::elements; ++k) {
      if (tx() + side * k < head_dim) {
        const float b = right[column * stride + tx() + side * k];
#pragma unroll
        for (int i = 0; i < Tiles::per; ++i) d[i][k] += a[i] * b;
      }
    }
  }
}

// `adds`: to what is there.
template <class Tiles, class T, class RowOf>
__device__ void store_rows(const float (&d)[Tiles::per][Tiles::elements], float factor, T* to, std::int64_t stride,
                           int first, int limit, int head_dim, bool adds, const RowOf& row_of) {
#pragma unroll
  for (int i = 0; i < Tiles::per; ++i) {
    const int number = first + ty() * Tiles::per + i;
    if (number >= limit) continue;
    T* const row = to + row_of(number) * stride;
#pragma unroll
    for (int k = 0; k < Tiles::elements; ++k) {
      const int element = tx() + side * k;
      if (element >= head_dim) continue;
      const float before = adds ? static_cast<float>(row[element]) : 0.0f;
      row[element] = static_cast<T>(before + factor * d[i][k]);
    }
  }
}

template <class Tiles, class T>
__device__ void store_queries(const float (&d)[Tiles::per][Tiles::elements], float factor, T* to, std::int64_t stride,
                              int first, bool adds, const AttentionLayout& layout) {
  store_rows<Tiles>(d, factor, to, stride, first, layout.sequence, layout.head_dim, adds, [](int row) { return row; });
}

template <class Tiles, class T>
__device__ void store_keys(const float (&d)[Tiles::per][Tiles::elements], float factor, T* to, int first,
                           const AttentionLayout& layout) {
  store_rows<Tiles>(d, factor, to, layout.key_stride, first, layout.keys, layout.head_dim, false,
                    [&](int position) { return layout.key_row(position); });
}

// One past the last position of the keys that the queries of a tile see.
template <int rows>
__device__ int end_of_keys(const AttentionLayout& layout, int first_query) {
  return min(layout.position(min(first_query + rows, layout.sequence) - 1) + 1, layout.keys);
}

__device__ inline bool sees_key(const AttentionLayout& layout, int position, int key_position) {
  return key_position <= position && key_position < layout.keys && key_position >= layout.first_key(position);
}

// The start of the tile that holds `position`.
template <int rows>
__device__ int first_tile(int position) {
  return position / rows * rows;
}

// Over the 16 threads of a row.
__device__ inline float row_maximum(float x) {
  for (int step = side / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
__device__ inline float row_sum(float x) {
  for (int step = side / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

template <class T, class Tiles>
__global__ void __launch_bounds__(threads)
    attention_forward(AttentionLayout layout, const T* qkv, const T* keys, T* y, float* log_sum_exp) {
  constexpr int per = Tiles::per;
  const int head_dim = layout.head_dim;
  float* const query_tile = reinterpret_cast<float*>(dynamic_shared);
  float* const other_tile = query_tile + Tiles::rows * row_stride(head_dim);  // keys, then values
  float* const score_tile = other_tile + Tiles::rows * row_stride(head_dim);

  const int first_query = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Tiles::rows;  // the longest first
  const int head = static_cast<int>(blockIdx.y);
  const int sample = static_cast<int>(blockIdx.z);
  const T* const key = keys + layout.key(sample, head / layout.per_group);
  const T* const value = keys + layout.value(sample, head / layout.per_group);
  load_queries<Tiles::rows>(query_tile, qkv + layout.query(sample, head), layout.qkv_stride, first_query, layout);
  int positions[per];  // of this thread's queries
#pragma unroll
  for (int i = 0; i < per; ++i) positions[i] = layout.position(first_query + ty() * per + i);
  const int end = end_of_keys<Tiles::rows>(layout, first_query);

  const AttentionScores head_scores(layout, sample, head);
  float out[per][Tiles::elements] = {};
  float largest[per];
  float sum[per] = {};  // this thread's part
  for (float& x : largest) x = -INFINITY;
  for (int first_key = first_tile<Tiles::rows>(layout.first_key(layout.position(first_query))); first_key < end;
       first_key += Tiles::rows) {
    load_keys<Tiles::rows>(other_tile, key, first_key, layout);
    __syncthreads();
    float scores[per][per];
    dot_products<per>(scores, query_tile, other_tile, head_dim);
    __syncthreads();
    load_keys<Tiles::rows>(other_tile, value, first_key, layout);
#pragma unroll
    for (int i = 0; i < per; ++i) {
      // A query that has seen no key yet (its window begins later) has -infinity as its largest
      // score.
      float tile_largest = largest[i];
#pragma unroll
      for (int j = 0; j < per; ++j) {
        const int key_position = first_key + tx() + side * j;
        const bool sees = sees_key(layout, positions[i], key_position);
        scores[i][j] = sees ? head_scores.of(scores[i][j], key_position - positions[i]) : -INFINITY;
        tile_largest = fmaxf(tile_largest, scores[i][j]);
      }
      tile_largest = row_maximum(tile_largest);
      const float shift = tile_largest == -INFINITY ? 0.0f : tile_largest;
      const float correction = expf(largest[i] - shift);
      largest[i] = tile_largest;
      sum[i] *= correction;
#pragma unroll
      for (int j = 0; j < per; ++j) {
        scores[i][j] = expf(scores[i][j] - shift);
        sum[i] += scores[i][j];
      }
#pragma unroll
      for (int k = 0; k < Tiles::elements; ++k) out[i][k] *= correction;
    }
    store_scores<Tiles>(score_tile, scores);
    __syncthreads();
    add_product<Tiles>(out, score_tile, other_tile, head_dim);
    __syncthreads();
  }
  float* const row_log_sum_exp = log_sum_exp + layout.statistics(sample, head);
  T* const head_y = y + layout.y(sample, head);
#pragma unroll
  for (int i = 0; i < per; ++i) {
    const float total = row_sum(sum[i]);
    const int row = first_query + ty() * per + i;
    const bool present = row < layout.sequence;
    float after = largest[i] + logf(total);
#pragma unroll
    for (int k = 0; k < Tiles::elements; ++k) out[i][k] /= total;
    if (layout.accumulates) {
      const MergedRow merged(present ? row_log_sum_exp[row] : after, after);
      __syncwarp();  // (the threads of a row have read)
      after = merged.log_sum_exp;
#pragma unroll
      for (int k = 0; k < Tiles::elements; ++k) {
        const int element = tx() + side * k;
        if (present && element < head_dim)
          out[i][k] = merged.kept * static_cast<float>(head_y[row * layout.y_stride + element]) +
                      merged.added * out[i][k];
      }
    }
    if (tx() == 0 && present) row_log_sum_exp[row] = after;
  }
  store_queries<Tiles>(out, 1.0f, head_y, layout.y_stride, first_query, false, layout);
}

// dq of one tile of queries, and its sums of dy * y, which key_value_gradients reads.
template <class T, class Tiles>
__global__ void __launch_bounds__(threads) query_gradients(AttentionLayout layout, const T* dy, const T* qkv,
                                                           const T* keys, const T* y, const float* log_sum_exp,
                                                           T* dqkv, float* sums) {
  constexpr int per = Tiles::per;
  const int head_dim = layout.head_dim;
  float* const left_tile = reinterpret_cast<float*>(dynamic_shared);         // dy, then queries
  float* const right_tile = left_tile + Tiles::rows * row_stride(head_dim);  // values, then keys
  float* const score_tile = right_tile + Tiles::rows * row_stride(head_dim);

  const int first_query = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Tiles::rows;
  const int head = static_cast<int>(blockIdx.y);
  const int sample = static_cast<int>(blockIdx.z);
  const T* const query = qkv + layout.query(sample, head);
  const T* const head_dy = dy + layout.y(sample, head);
  const T* const head_y = y + layout.y(sample, head);
  const T* const key = keys + layout.key(sample, head / layout.per_group);
  const T* const value = keys + layout.value(sample, head / layout.per_group);

  int positions[per];
  float row_sums[per];
  float shift[per];  // log-sum-exp
#pragma unroll
  for (int i = 0; i < per; ++i) {
    const int row = first_query + ty() * per + i;
    positions[i] = layout.position(row);
    float sum = 0.0f;
    if (row < layout.sequence) {
      for (int element = tx(); element < head_dim; element += side) {
        sum += static_cast<float>(head_dy[row * layout.y_stride + element]) *
               static_cast<float>(head_y[row * layout.y_stride + element]);
      }
    }
    row_sums[i] = row_sum(sum);
    shift[i] = 0.0f;
    if (row < layout.sequence) {
      if (tx() == 0) sums[layout.statistics(sample, head) + row] = row_sums[i];
      shift[i] = log_sum_exp[layout.statistics(sample, head) + row];
    }
  }
  const int end = end_of_keys<Tiles::rows>(layout, first_query);

  const AttentionScores head_scores(layout, sample, head);
  float out[per][Tiles::elements] = {};
  for (int first_key = first_tile<Tiles::rows>(layout.first_key(layout.position(first_query))); first_key < end;
       first_key += Tiles::rows) {
    load_queries<Tiles::rows>(left_tile, head_dy, layout.y_stride, first_query, layout);
    load_keys<Tiles::rows>(right_tile, value, first_key, layout);
    __syncthreads();
    float dp[per][per];
    dot_products<per>(dp, left_tile, right_tile, head_dim);
    __syncthreads();
    load_queries<Tiles::rows>(left_tile, query, layout.qkv_stride, first_query, layout);
    load_keys<Tiles::rows>(right_tile, key, first_key, layout);
    __syncthreads();
    float scores[per][per];
    dot_products<per>(scores, left_tile, right_tile, head_dim);
#pragma unroll
    for (int i = 0; i < per; ++i) {
#pragma unroll
      for (int j = 0; j < per; ++j) {
        const int key_position = first_key + tx() + side * j;
        const bool sees = sees_key(layout, positions[i], key_position);
        float to_product;
        const float score = head_scores.of(scores[i][j], key_position - positions[i], to_product);
        scores[i][j] = sees ? expf(score - shift[i]) * (dp[i][j] - row_sums[i]) * to_product : 0.0f;
      }
    }
    store_scores<Tiles>(score_tile, scores);
    __syncthreads();
    add_product<Tiles>(out, score_tile, right_tile, head_dim);
    __syncthreads();
  }
  store_queries<Tiles>(out, layout.scale, dqkv + layout.query(sample, head), layout.qkv_stride, first_query,
                       layout.accumulates, layout);
}

// dk and dv of one tile of keys of one key/value head, over all query heads of its group; zeros
// where no query of this rank sees the keys. Rows are keys here, columns queries.
template <class T, class Tiles>
__global__ void __launch_bounds__(threads) key_value_gradients(AttentionLayout layout, const T* dy, const T* qkv,
                                                               const T* keys, const float* log_sum_exp,
                                                               const float* sums, T* dkeys) {
  constexpr int per = Tiles::per;
  const int head_dim = layout.head_dim;
  float* const left_tile = reinterpret_cast<float*>(dynamic_shared);         // keys, values, queries
  float* const right_tile = left_tile + Tiles::rows * row_stride(head_dim);  // queries, dy
  float* const probability_tile = right_tile + Tiles::rows * row_stride(head_dim);
  float* const ds_tile = probability_tile + Tiles::scores;

  const int first_key = static_cast<int>(blockIdx.x) * Tiles::rows;  // the first tile has the most queries
  const int kv_head = static_cast<int>(blockIdx.y);
  const int sample = static_cast<int>(blockIdx.z);
  const T* const key = keys + layout.key(sample, kv_head);
  const T* const value = keys + layout.value(sample, kv_head);
  // The rows of queries that see one of the keys.
  const int first_row = first_tile<Tiles::rows>(layout.rows_before(first_key));
  const int last_row = layout.rows_before(layout.last_query(min(first_key + Tiles::rows, layout.keys) - 1));

  float dk[per][Tiles::elements] = {};
  float dv[per][Tiles::elements] = {};
  for (int head = kv_head * layout.per_group; head < (kv_head + 1) * layout.per_group; ++head) {
    const T* const query = qkv + layout.query(sample, head);
    const T* const head_dy = dy + layout.y(sample, head);
    const std::int64_t statistics = layout.statistics(sample, head);
    const AttentionScores head_scores(layout, sample, head);
    for (int first_query = first_row; first_query < last_row; first_query += Tiles::rows) {
      load_keys<Tiles::rows>(left_tile, key, first_key, layout);
      load_queries<Tiles::rows>(right_tile, query, layout.qkv_stride, first_query, layout);
      __syncthreads();
      float probabilities[per][per];
      dot_products<per>(probabilities, left_tile, right_tile, head_dim);
      __syncthreads();
      load_keys<Tiles::rows>(left_tile, value, first_key, layout);
      load_queries<Tiles::rows>(right_tile, head_dy, layout.y_stride, first_query, layout);
      float row_sums[per];
      float to_product[per][per];
#pragma unroll
      for (int j = 0; j < per; ++j) {
        const int row = first_query + tx() + side * j;
        const int position = layout.position(row);
        const bool present = row < layout.sequence;
        const float shift = present ? log_sum_exp[statistics + row] : 0.0f;
        row_sums[j] = present ? sums[statistics + row] : 0.0f;
#pragma unroll
        for (int i = 0; i < per; ++i) {
          const int key_position = first_key + ty() * per + i;
          const bool sees = present && sees_key(layout, position, key_position);
          const float score = head_scores.of(probabilities[i][j], key_position - position, to_product[i][j]);
          probabilities[i][j] = sees ? expf(score - shift) : 0.0f;
        }
      }
      store_scores<Tiles>(probability_tile, probabilities);
      __syncthreads();
      float ds[per][per];
      dot_products<per>(ds, left_tile, right_tile, head_dim);
#pragma unroll
      for (int i = 0; i < per; ++i) {
#pragma unroll
        for (int j = 0; j < per; ++j) ds[i][j] = probabilities[i][j] * (ds[i][j] - row_sums[j]) * to_product[i][j];
      }
      store_scores<Tiles>(ds_tile, ds);
      add_product<Tiles>(dv, probability_tile, right_tile, head_dim);
      __syncthreads();
      load_queries<Tiles::rows>(left_tile, query, layout.qkv_stride, first_query, layout);
      __syncthreads();
      add_product<Tiles>(dk, ds_tile, left_tile, head_dim);
      __syncthreads();
    }
  }
  store_keys<Tiles>(dk, layout.scale, dkeys + layout.key(sample, kv_head), first_key, layout);
  store_keys<Tiles>(dv, 1.0f, dkeys + layout.value(sample, kv_head), first_key, layout);
}

// Sums by bucket of the gradients of one tile of queries' scores. A tile's diagonals are of one
// distance each: a thread sums one, then another those of its bucket.
template <class T, class Tiles>
__global__ void __launch_bounds__(threads)
    sum_by_bucket(AttentionLayout layout, BiasTable table, const T* dy, const T* qkv, const T* keys,
                  const float* log_sum_exp, const float* sums, float* parts) {
  constexpr int per = Tiles::per, diagonals = 2 * Tiles::rows - 1;
  static_assert(diagonals <= threads && 2 * diagonals <= Tiles::scores);
  const int head_dim = layout.head_dim;
  float* const left_tile = reinterpret_cast<float*>(dynamic_shared);
  float* const right_tile = left_tile + Tiles::rows * row_stride(head_dim);
  float* const score_tile = right_tile + Tiles::rows * row_stride(head_dim);
  float* const sum_of = score_tile + Tiles::scores;  // by diagonal
  int* const bucket_of = reinterpret_cast<int*>(sum_of + diagonals);

  const int first_query = static_cast<int>(blockIdx.x) * Tiles::rows;
  const int head = static_cast<int>(blockIdx.y), sample = static_cast<int>(blockIdx.z);
  const int thread = static_cast<int>(threadIdx.x);
  const T* const query = qkv + layout.query(sample, head);
  const T* const head_dy = dy + layout.y(sample, head);
  const T* const key = keys + layout.key(sample, head / layout.per_group);
  const T* const value = keys + layout.value(sample, head / layout.per_group);
  int positions[per];
  float row_sums[per], shift[per];
#pragma unroll
  for (int i = 0; i < per; ++i) {
    const int row = first_query + ty() * per + i;
    const bool present = row < layout.sequence;
    positions[i] = layout.position(row);
    row_sums[i] = present ? sums[layout.statistics(sample, head) + row] : 0.0f;
    shift[i] = present ? log_sum_exp[layout.statistics(sample, head) + row] : 0.0f;
  }
  const int end = end_of_keys<Tiles::rows>(layout, first_query);
  const AttentionScores head_scores(layout, sample, head);
  float total = 0.0f;  // of the bucket of this thread's number
  for (int first_key = 0; first_key < end; first_key += Tiles::rows) {
    load_queries<Tiles::rows>(left_tile, head_dy, layout.y_stride, first_query, layout);
    load_keys<Tiles::rows>(right_tile, value, first_key, layout);
    __syncthreads();
    float dp[per][per];
    dot_products<per>(dp, left_tile, right_tile, head_dim);
    __syncthreads();
    load_queries<Tiles::rows>(left_tile, query, layout.qkv_stride, first_query, layout);
    load_keys<Tiles::rows>(right_tile, key, first_key, layout);
    __syncthreads();
    float scores[per][per];
    dot_products<per>(scores, left_tile, right_tile, head_dim);
#pragma unroll
    for (int i = 0; i < per; ++i) {
      const bool present = first_query + ty() * per + i < layout.sequence;
#pragma unroll
      for (int j = 0; j < per; ++j) {
        const int key_position = first_key + tx() + side * j;
        const bool sees = present && sees_key(layout, positions[i], key_position);
        const float score = head_scores.of(scores[i][j], key_position - positions[i]);
        scores[i][j] = sees ? expf(score - shift[i]) * (dp[i][j] - row_sums[i]) : 0.0f;
      }
    }
    store_scores<Tiles>(score_tile, scores);
    __syncthreads();
    if (thread < diagonals) {
      const int offset = thread - (Tiles::rows - 1);  // key's column - query's row
      float sum = 0.0f;
      for (int row = max(0, -offset); row < min(Tiles::rows, Tiles::rows - offset); ++row)
        sum += score_tile[row * Tiles::score_stride + row + offset];
      sum_of[thread] = sum;
      bucket_of[thread] = static_cast<int>(
          relative_bucket(first_key - first_query + offset, table.buckets, table.most_distance, table.bidirectional));
    }
    __syncthreads();
    if (thread < table.buckets)
      for (int i = 0; i < diagonals; ++i)
        if (bucket_of[i] == thread) total += sum_of[i];
    __syncthreads();
  }
  if (thread < table.buckets)
    parts[((static_cast<std::int64_t>(sample) * layout.heads + head) * gridDim.x + blockIdx.x) * table.buckets +
          thread] = total;
}

// An element of the table's rows [rows, batch, inner] is a thread's.
template <class T>
__global__ void __launch_bounds__(threads) add_bias_parts(AttentionLayout layout, BiasTable table, int batch, int tiles,
                                                          const float* parts, T* gradients, std::int64_t count) {
  const std::int64_t place = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (place >= count) return;
  const std::int64_t element = place / table.inner / batch * table.inner + place % table.inner;
  const int sample = static_cast<int>(place / table.inner % batch);
  const int bucket = static_cast<int>(element / table.all_heads);
  const int head = static_cast<int>(element % table.all_heads) - table.first_head;
  float sum = 0.0f;
  if (bucket < table.buckets && head >= 0 && head < layout.heads)
    for (int tile = 0; tile < tiles; ++tile)
      sum += parts[((static_cast<std::int64_t>(sample) * layout.heads + head) * tiles + tile) * table.buckets + bucket];
  gradients[place] = static_cast<T>(sum);
}

// A bias of one sample and head is a thread's.
template <class T>
__global__ void __launch_bounds__(threads)
    biases_by_distance(AttentionLayout layout, BiasTable table, int batch, float* biases) {
  const int place = static_cast<int>(blockIdx.x) * threads + static_cast<int>(threadIdx.x);
  if (place >= layout.bias_width()) return;
  const int head = static_cast<int>(blockIdx.y), sample = static_cast<int>(blockIdx.z);
  const std::int64_t bucket = relative_bucket(place - attention_bias_margin - (layout.statistics_rows - 1),
                                              table.buckets, table.most_distance, table.bidirectional);
  const std::int64_t element = bucket * table.all_heads + table.first_head + head;
  biases[(static_cast<std::int64_t>(sample) * layout.heads + head) * layout.bias_width() + place] =
      static_cast<float>(static_cast<const T*>(
          table.rows)[(element / table.inner * batch + sample) * table.inner + element % table.inner]);
}

template <class Tiles, class... Parameters>
Grid grid_of(void (*kernel)(Parameters...), int rows, int head_dim, int score_tiles, int heads, int batch) {
  const std::size_t shared = sizeof(float) * (2 * Tiles::rows * row_stride(head_dim) + score_tiles * Tiles::scores);
  // By default, a block gets 48 KiB.
  if (shared > 48 * 1024) allow_shared_memory(kernel, shared);
  return {.blocks = dim3(static_cast<unsigned>(divide_up(rows, Tiles::rows)), static_cast<unsigned>(heads),
                         static_cast<unsigned>(batch)),
          .threads = dim3(threads),
          .shared = shared};
}

template <class T, class Tiles>
void forward(const AttentionForward& work, cudaStream_t stream) {
  const AttentionLayout& layout = work.layout;
  const auto kernel = attention_forward<T, Tiles>;
  launch("attention", kernel,
         grid_of<Tiles>(kernel, layout.sequence, layout.head_dim, 1, layout.heads, work.batch), stream, layout,
         static_cast<const T*>(work.qkv), static_cast<const T*>(work.keys), static_cast<T*>(work.y), work.log_sum_exp);
}

template <class T, class Tiles>
void backward(const AttentionBackward& work, cudaStream_t stream) {
  const AttentionLayout& layout = work.layout;
  const auto* const dy = static_cast<const T*>(work.dy);
  const auto* const qkv = static_cast<const T*>(work.qkv);
  const auto* const keys = static_cast<const T*>(work.keys);
  const auto* const y = static_cast<const T*>(work.y);
  const auto queries = query_gradients<T, Tiles>;
  launch("attention_gradient: queries", queries,
         grid_of<Tiles>(queries, layout.sequence, layout.head_dim, 1, layout.heads, work.batch), stream, layout, dy,
         qkv, keys, y, work.log_sum_exp, static_cast<T*>(work.dqkv), work.sums);
  const auto key_values = key_value_gradients<T, Tiles>;
  launch("attention_gradient: keys and values", key_values,
         grid_of<Tiles>(key_values, layout.keys, layout.head_dim, 2, layout.heads / layout.per_group, work.batch),
         stream, layout, dy, qkv, keys, work.log_sum_exp, static_cast<const float*>(work.sums),
         static_cast<T*>(work.dkeys));
}

template <class T>
void forward(const AttentionForward& work, cudaStream_t stream) {
  if (work.layout.head_dim <= Tiles<64>::most_head_dim) {
    forward<T, Tiles<64>>(work, stream);
  } else {
    forward<T, Tiles<32>>(work, stream);
  }
}

template <class T>
void backward(const AttentionBackward& work, cudaStream_t stream) {
  if (work.layout.head_dim <= Tiles<64>::most_head_dim) {
    backward<T, Tiles<64>>(work, stream);
  } else {
    backward<T, Tiles<32>>(work, stream);
  }
}

template <class T, class Tiles>
void sum_biases(const AttentionBackward& work, const BiasTable& table, float* parts, T* gradients,
                cudaStream_t stream) {
  const AttentionLayout& layout = work.layout;
  const auto by_bucket = sum_by_bucket<T, Tiles>;
  launch("packed_attention_gradient: biases", by_bucket,
         grid_of<Tiles>(by_bucket, layout.sequence, layout.head_dim, 2, layout.heads, work.batch), stream, layout,
         table, static_cast<const T*>(work.dy), static_cast<const T*>(work.qkv), static_cast<const T*>(work.keys),
         work.log_sum_exp, static_cast<const float*>(work.sums), parts);
  const std::int64_t rows = divide_up(std::int64_t{table.buckets} * table.all_heads, std::int64_t{table.inner});
  const std::int64_t count = rows * work.batch * table.inner;
  launch("packed_attention_gradient: rows of biases", add_bias_parts<T>,
         {.blocks = dim3(static_cast<unsigned>(divide_up(count, std::int64_t{threads}))), .threads = dim3(threads)},
         stream, layout, table, work.batch, divide_up(layout.sequence, Tiles::rows), static_cast<const float*>(parts),
         gradients, count);
}

template <class T>
void sum_biases(const AttentionBackward& work, const BiasTable& table, float* parts, T* gradients,
                cudaStream_t stream) {
  if (work.layout.head_dim <= Tiles<64>::most_head_dim) {
    sum_biases<T, Tiles<64>>(work, table, parts, gradients, stream);
  } else {
    sum_biases<T, Tiles<32>>(work, table, parts, gradients, stream);
  }
}

}  // namespace

void attention_general(const AttentionForward& work, DataType type, cudaStream_t stream) {
  if (type == DataType::bf16) {
    forward<__nv_bfloat16>(work, stream);
  } else if (type == DataType::fp16) {
    forward<__half>(work, stream);
  } else {
    forward<float>(work, stream);
  }
}

void attention_gradient_general(const AttentionBackward& work, DataType type, cudaStream_t stream) {
  if (type == DataType::bf16) {
    backward<__nv_bfloat16>(work, stream);
  } else if (type == DataType::fp16) {
    backward<__half>(work, stream);
  } else {
    backward<float>(work, stream);
  }
}

void expand_biases(const AttentionLayout& layout, int batch, const BiasTable& table, float* biases, DataType type,
                   cudaStream_t stream) {
  const Grid grid{.blocks = dim3(static_cast<unsigned>(divide_up(layout.bias_width(), std::int64_t{threads})),
                                 static_cast<unsigned>(layout.heads), static_cast<unsigned>(batch)),
                  .threads = dim3(threads)};
  dispatch(type, [&](auto number) {
    using T = typename decltype(number)::Type;
    launch("packed_attention: biases", biases_by_distance<T>, grid, stream, layout, table, batch, biases);
  });
}

void bias_gradients(const AttentionBackward& work, const BiasTable& table, float* parts, void* gradients, DataType type,
                    cudaStream_t stream) {
  dispatch(type, [&](auto number) {
    using T = typename decltype(number)::Type;
    sum_biases<T>(work, table, parts, static_cast<T*>(gradients), stream);
  });
}

}  // namespace parplan
