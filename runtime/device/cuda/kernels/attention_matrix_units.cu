#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "runtime/device/cuda/kernel_launch.h"
#include "runtime/device/cuda/kernels/attention_kernels.h"
#include "runtime/device/cuda/ptx.h"

extern __shared__ __align__(16) unsigned char dynamic_shared[];

namespace parplan {

namespace {

// Gathered keys (attention_kernels.h) are an option of the form that is not plain. Chunks are then
// whole tiles, so that the rows of a tile follow one another among positions and among the rows of
// keys: a tile's first number is mapped, and the others follow it.
//
// Letters: a warp computes row_tiles x 16 rows of a product (queries; keys in key_value_gradients),
// a block `warps` times as many. Fragments of mma_m16n8k16 (ptx.h): lane = 4g + t holds, in
// accumulators [m][n][e], row 16m + g (+ 8 where e > 1) and column 8n + 2t + (e odd).
constexpr int warps = 4;
constexpr int threads = 32 * warps;
constexpr float log2_e = 1.44269504088896340736f;
constexpr float ln_2 = 0.69314718055994530942f;

__device__ inline int lane() {
  return static_cast<int>(threadIdx.x) % 32;
}
__device__ inline int warp() {
  return static_cast<int>(threadIdx.x) / 32;
}

// Rows of head_dim 2-byte elements in shared memory, cut into chunks of 16 bytes. A chunk's place
// within its row depends on the row, so that the eight rows that ldmatrix reads at once are in
// eight different groups of four banks.
template <int head_dim>
struct Rows {
  static_assert(head_dim % 16 == 0);
  static constexpr int chunks = head_dim / 8;
  static constexpr int bytes = 2 * head_dim;

  // Chunks that exchange places, and how a row permutes them.
  static constexpr int group = chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : 2;
  static __device__ int permutation(int row) { return row / (8 / group) % group; }
  static __device__ int offset(int row, int chunk) { return row * bytes + ((chunk ^ permutation(row)) << 4); }

  // `further` chunks (an even number) from the place of chunk 0 or 1 of a row, counted from
  // dynamic_shared, where tiles begin at multiples of the bytes of a group. Offsets of all chunks
  // thus come from one register instead of one each.
  static __device__ int along(int place, int further) {
    return (place ^ (further % group << 4)) + further / group * (group << 4);
  }
};

__device__ inline int place_of(const unsigned char* tile) { return static_cast<int>(tile - dynamic_shared); }

// Starts copying rows [first, first + rows) of a head; writes zeros from `limit` on, where nothing
// is read.
template <int head_dim, int rows>
__device__ void load_rows(unsigned char* tile, const std::uint16_t* from, std::int64_t stride, int first, int limit) {
  // A thread keeps to one chunk of each `across` and to rows with the same permutation, so that its
  // places differ by constants.
  constexpr int chunks = Rows<head_dim>::chunks;
  constexpr int across = chunks & -chunks;  // the largest power of two that divides them
  constexpr int step = threads / across;
  static_assert(threads % across == 0 && (rows % step == 0 || step % rows == 0) && step % 8 == 0);
  const int chunk = static_cast<int>(threadIdx.x) % across;
  const int row = static_cast<int>(threadIdx.x) / across;
  if (step > rows && row >= rows) return;
  unsigned char* const to = tile + Rows<head_dim>::offset(row, chunk);
  const std::uint16_t* place = from + (first + row) * stride + 8 * chunk;
#pragma unroll
  for (int i = 0; i < (rows + step - 1) / step; ++i) {
#pragma unroll
    for (int j = 0; j < chunks / across; ++j) {
      ptx::cp_async_16(to + i * step * Rows<head_dim>::bytes + j * across * 16, place + 8 * across * j,
                       first + row + i * step < limit);
    }
    place += step * stride;
  }
}

// Statistics of `count` queries; zeros from `limit` on.
template <int count>
__device__ void load_statistics(float* to, const float* from, int first, int limit) {
  static_assert(count <= threads);
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) {
    ptx::cp_async_4(to + i, from + first + i, first + i < limit);
  }
}

// The left operand of a product: this warp's rows of a tile, kept in registers or read again each
// time.
template <int head_dim, int row_tiles, bool keep>
struct Left {
  const unsigned char* tile;
  int first_row;
  std::uint32_t kept[keep ? head_dim / 16 : 1][row_tiles][4];

  __device__ void read(int depth, std::uint32_t (&fragments)[row_tiles][4]) const {
    const int place = place_of(tile) + Rows<head_dim>::offset(first_row + lane() % 16, lane() / 16);
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      ptx::ldmatrix_x4(fragments[m],
                       dynamic_shared + Rows<head_dim>::along(place, 2 * depth) + 16 * m * Rows<head_dim>::bytes);
    }
  }
  // Called once the tile is loaded.
  __device__ void start() {
    if constexpr (keep) {
#pragma unroll
      for (int depth = 0; depth < head_dim / 16; ++depth) read(depth, kept[depth]);
    }
  }
};

// d[rows of the warp, columns] += left tile^T, where the tile has `columns` rows.
template <class T, int head_dim, int row_tiles, int columns, bool keep>
__device__ void add_product_transposed(float (&d)[row_tiles][columns / 8][4],
                                       const Left<head_dim, row_tiles, keep>& left, const unsigned char* tile) {
  const int place = place_of(tile) + Rows<head_dim>::offset(lane() % 8 + lane() / 16 * 8, lane() / 8 % 2);
#pragma unroll
  for (int depth = 0; depth < head_dim / 16; ++depth) {
    std::uint32_t a[row_tiles][4];
    if constexpr (!keep) left.read(depth, a);
#pragma unroll
    for (int n = 0; n < columns / 16; ++n) {
      std::uint32_t b[4];
      ptx::ldmatrix_x4(b, dynamic_shared + Rows<head_dim>::along(place, 2 * depth) + 16 * n * Rows<head_dim>::bytes);
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
        if constexpr (keep) {
          ptx::mma_m16n8k16<T>(d[m][2 * n], left.kept[depth][m], b[0], b[1]);
          ptx::mma_m16n8k16<T>(d[m][2 * n + 1], left.kept[depth][m], b[2], b[3]);
        } else {
          ptx::mma_m16n8k16<T>(d[m][2 * n], a[m], b[0], b[1]);
          ptx::mma_m16n8k16<T>(d[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
}

// d[rows of the warp, head_dim] += left tile, where left [rows of the warp, depth] are packed
// accumulators.
template <class T, int head_dim, int row_tiles, int depth>
__device__ void add_product(float (&d)[row_tiles][head_dim / 8][4],
                            const std::uint32_t (&left)[row_tiles][depth / 16][4], const unsigned char* tile) {
  const int place = place_of(tile) + Rows<head_dim>::offset(lane() % 16, lane() / 16);
#pragma unroll
  for (int k = 0; k < depth / 16; ++k) {
#pragma unroll
    for (int n = 0; n < head_dim / 16; ++n) {
      std::uint32_t b[4];
      ptx::ldmatrix_x4_transposed(
          b, dynamic_shared + Rows<head_dim>::along(place, 2 * n) + 16 * k * Rows<head_dim>::bytes);
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
        ptx::mma_m16n8k16<T>(d[m][2 * n], left[m][k], b[0], b[1]);
        ptx::mma_m16n8k16<T>(d[m][2 * n + 1], left[m][k], b[2], b[3]);
      }
    }
  }
}

// Two adjacent accumulators, rounded to T, are one left operand.
template <class T, int row_tiles, int columns>
__device__ void pack(const float (&d)[row_tiles][columns / 8][4], std::uint32_t (&left)[row_tiles][columns / 16][4]) {
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
    for (int k = 0; k < columns / 16; ++k) {
      left[m][k][0] = ptx::pack<T>(d[m][2 * k][0], d[m][2 * k][1]);
      left[m][k][1] = ptx::pack<T>(d[m][2 * k][2], d[m][2 * k][3]);
      left[m][k][2] = ptx::pack<T>(d[m][2 * k + 1][0], d[m][2 * k + 1][1]);
      left[m][k][3] = ptx::pack<T>(d[m][2 * k + 1][2], d[m][2 * k + 1][3]);
    }
  }
}

template <int row_tiles, int columns>
__device__ void clear(float (&d)[row_tiles][columns][4]) {
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
    for (int n = 0; n < columns; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) d[m][n][e] = 0.0f;
    }
  }
}

// Writes the warp's rows, which are rows first_number + row of a head, below `limit`. They go
// through the warp's own rows of a tile that it no longer needs, so that neighbouring lanes write
// neighbouring 16 bytes.
template <class T, int head_dim, int row_tiles>
__device__ void store_rows(const float (&d)[row_tiles][head_dim / 8][4], float factor, unsigned char* tile,
                           int first_row, std::uint16_t* to, std::int64_t stride, int first_number, int limit) {
  __syncwarp();
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) {
    const int row = first_row + 16 * m + lane() / 4;
#pragma unroll
    for (int n = 0; n < head_dim / 8; ++n) {
      const float(&e)[4] = d[m][n];
      *reinterpret_cast<std::uint32_t*>(tile + Rows<head_dim>::offset(row, n) + lane() % 4 * 4) =
          ptx::pack<T>(factor * e[0], factor * e[1]);
      *reinterpret_cast<std::uint32_t*>(tile + Rows<head_dim>::offset(row + 8, n) + lane() % 4 * 4) =
          ptx::pack<T>(factor * e[2], factor * e[3]);
    }
  }
  __syncwarp();
  constexpr int chunks = Rows<head_dim>::chunks;
#pragma unroll
  for (int place = lane(); place < 16 * row_tiles * chunks; place += 32) {
    const int row = place / chunks;
    const int chunk = place % chunks;
    if (first_number + row < limit) {
      *reinterpret_cast<uint4*>(to + (first_number + row) * stride + 8 * chunk) =
          *reinterpret_cast<const uint4*>(tile + Rows<head_dim>::offset(first_row + row, chunk));
    }
  }
}

// d += kept * what is there: the warp's rows, which are rows first_number + row of a head, below
// `limit`. `store_rows` waits until all lanes have read.
template <class T, int head_dim, int row_tiles>
__device__ void add_rows(float (&d)[row_tiles][head_dim / 8][4], const float (&kept)[row_tiles][2],
                         const std::uint16_t* from, std::int64_t stride, int first_number, int limit) {
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_number + 16 * m + lane() / 4 + 8 * half;
      if (row >= limit) continue;
      const std::uint16_t* const place = from + row * stride + lane() % 4 * 2;
#pragma unroll
      for (int n = 0; n < head_dim / 8; ++n) {
        const float2 there = ptx::unpack<T>(*reinterpret_cast<const std::uint32_t*>(place + 8 * n));
        d[m][n][2 * half] += kept[m][half] * there.x;
        d[m][n][2 * half + 1] += kept[m][half] * there.y;
      }
    }
  }
}

// The sum (largest) of four neighbouring lanes, which hold parts of the same row.
__device__ inline float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ inline float row_maximum(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// The tiles of each kernel. Shared memory stays below 99 KiB, which every device since sm_80 grants
// a block (CUDA C++ Programming Guide, technical specifications). `blocks` of them share a
// multiprocessor's 65536 registers: 255 per thread for two, 168 for three. More rows per warp mean
// fewer reads of shared memory per product, which is why the forward, with one accumulator per row,
// takes two row tiles.
template <int head_dim>
struct ForwardTiles {
  static constexpr int blocks = 2;
  static constexpr int row_tiles = 2;
  static constexpr int queries = warps * 16 * row_tiles;
  static constexpr int keys = 64;
  static constexpr bool keep = head_dim <= 64;
  static constexpr int slots = head_dim <= 64 ? 4 : 2;  // tiles of keys or values in flight
  static constexpr int shared = (queries + slots * keys) * Rows<head_dim>::bytes;
};

// One block computes one tile of queries of one head. The tiles key 0, value 0, key 1, value 1, ...
// pass through a ring of slots: each is waited for before its product, and then the load into the
// slot of the previous tile is started.
template <class T, int head_dim, bool plain>
__global__ void __launch_bounds__(threads, ForwardTiles<head_dim>::blocks)
    attention_forward(AttentionLayout layout, const std::uint16_t* qkv, const std::uint16_t* keys_and_values,
                      std::uint16_t* y, float* log_sum_exp) {
  using Tiles = ForwardTiles<head_dim>;
  constexpr int row_tiles = Tiles::row_tiles;
  constexpr int keys = Tiles::keys;
  constexpr int slots = Tiles::slots;
  constexpr int tile_bytes = keys * Rows<head_dim>::bytes;
  unsigned char* const query_tile = dynamic_shared;
  unsigned char* const ring = dynamic_shared + Tiles::queries * Rows<head_dim>::bytes;

  // The tile with the most keys comes first: the last blocks to run are short.
  const int first_query = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Tiles::queries;
  const int head = static_cast<int>(blockIdx.y);
  const int sample = static_cast<int>(blockIdx.z);
  const int first_row = warp() * 16 * row_tiles;  // of this warp in the tile
  const int first_position = plain ? layout.plain_position(first_query) : layout.position(first_query);
  const int warp_position = first_position + first_row;
  const std::uint16_t* const key = keys_and_values + layout.key(sample, head / layout.per_group);
  const int visible = min(first_position + Tiles::queries, layout.keys);
  const int first_tile = plain ? 0 : layout.first_key(first_position) / keys;
  const int key_tiles = (visible + keys - 1) / keys - first_tile;

  const auto start_load = [&](int step) {
    if (step < 2 * key_tiles) {
      const int first_key = (first_tile + step / 2) * keys;
      load_rows<head_dim, keys>(ring + step % slots * tile_bytes, key + (step % 2 == 0 ? 0 : head_dim),
                                layout.key_stride, plain ? first_key : layout.key_row(first_key), layout.keys);
    }
    ptx::cp_async_commit();
  };
  load_rows<head_dim, Tiles::queries>(query_tile, qkv + layout.query(sample, head), layout.qkv_stride, first_query,
                                      layout.sequence);
#pragma unroll
  for (int step = 0; step < slots - 1; ++step) start_load(step);
  const auto next = [&](int step) {
    ptx::cp_async_wait<slots - 2>();
    __syncthreads();
    start_load(step + slots - 1);
    return ring + step % slots * tile_bytes;
  };

  // exp(scale x) = 2^(this x). Scores that are not plain are brought to base 2 one by one.
  const AttentionScores head_scores(layout, sample, head);
  const float scale = plain ? layout.scale * log2_e : 1.0f;
  Left<head_dim, row_tiles, Tiles::keep> query{.tile = query_tile, .first_row = first_row, .kept = {}};
  float out[row_tiles][head_dim / 8][4];
  clear(out);
  float largest[row_tiles][2];
  float sum[row_tiles][2];  // this lane's part
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) {
    largest[m][0] = largest[m][1] = -INFINITY;
    sum[m][0] = sum[m][1] = 0.0f;
  }

  for (int tile = 0; tile < key_tiles; ++tile) {
    const int first_key = (first_tile + tile) * keys;
    // In the last tiles the first warps' queries may see nothing; with a window, neither may the
    // last warps' in the first tiles.
    const bool sees =
        first_key < warp_position + 16 * row_tiles && (plain || first_key + keys > layout.first_key(warp_position));
    float scores[row_tiles][keys / 8][4];
    clear(scores);
    const unsigned char* const key_tile = next(2 * tile);
    if (tile == 0) query.start();
    if (sees) add_product_transposed<T, head_dim, row_tiles, keys>(scores, query, key_tile);
    const unsigned char* const value_tile = next(2 * tile + 1);
    if (!sees) continue;

    if (!plain || first_key + keys - 1 > warp_position) {
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int n = 0; n < keys / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int key_position = first_key + 8 * n + lane() % 4 * 2 + e % 2;
            const int position = warp_position + 16 * m + lane() / 4 + e / 2 * 8;
            if constexpr (!plain) scores[m][n][e] = head_scores.of(scores[m][n][e], key_position - position) * log2_e;
            if (key_position > position || (!plain && key_position < layout.first_key(position)))
              scores[m][n][e] = -INFINITY;
          }
        }
      }
    }
    // Plain: key 0 is in the first tile and every query sees it, so `largest` is finite from there
    // on. With a window, a query may have seen nothing yet.
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float tile_largest = largest[m][half];
#pragma unroll
        for (int n = 0; n < keys / 8; ++n)
          tile_largest = fmaxf(tile_largest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        tile_largest = row_maximum(tile_largest);
        const float reference = !plain && tile_largest == -INFINITY ? 0.0f : tile_largest;
        const float correction = ptx::exp2_approximate((largest[m][half] - reference) * scale);
        largest[m][half] = tile_largest;
        const float shift = reference * scale;
        float tile_sum = 0.0f;
#pragma unroll
        for (int n = 0; n < keys / 8; ++n) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            scores[m][n][e] = ptx::exp2_approximate(scores[m][n][e] * scale - shift);
            tile_sum += scores[m][n][e];
          }
        }
        sum[m][half] = sum[m][half] * correction + tile_sum;
#pragma unroll
        for (int n = 0; n < head_dim / 8; ++n) {
          out[m][n][2 * half] *= correction;
          out[m][n][2 * half + 1] *= correction;
        }
      }
    }
    std::uint32_t probabilities[row_tiles][keys / 16][4];
    pack<T, row_tiles, keys>(scores, probabilities);
    add_product<T, head_dim, row_tiles, keys>(out, probabilities, value_tile);
  }

  float* const row_log_sum_exp = log_sum_exp + layout.statistics(sample, head);
  std::uint16_t* const head_y = y + layout.y(sample, head);
  float kept[row_tiles][2] = {};
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = row_sum(sum[m][half]);
      float inverse = 1.0f / total;
      const int row = first_query + first_row + 16 * m + lane() / 4 + 8 * half;
      float after = largest[m][half] * (plain ? layout.scale : ln_2) + log2f(total) * ln_2;
      if (layout.accumulates) {
        const MergedRow merged(row < layout.sequence ? row_log_sum_exp[row] : after, after);
        __syncwarp();  // (the lanes of a row have read)
        after = merged.log_sum_exp;
        kept[m][half] = merged.kept;
        inverse *= merged.added;
      }
#pragma unroll
      for (int n = 0; n < head_dim / 8; ++n) {
        out[m][n][2 * half] *= inverse;
        out[m][n][2 * half + 1] *= inverse;
      }
      if (lane() % 4 == 0 && row < layout.sequence) row_log_sum_exp[row] = after;
    }
  }
  if (layout.accumulates)
    add_rows<T, head_dim, row_tiles>(out, kept, head_y, layout.y_stride, first_query + first_row, layout.sequence);
  store_rows<T, head_dim, row_tiles>(out, 1.0f, query_tile, first_row, head_y, layout.y_stride,
                                     first_query + first_row, layout.sequence);
}

template <int head_dim>
struct QueryGradientTiles {
  static constexpr int blocks = head_dim <= 64 ? 3 : 2;
  static constexpr int row_tiles = 1;
  static constexpr int queries = warps * 16 * row_tiles;
  static constexpr int keys = head_dim <= 64 ? 64 : 32;
  static constexpr bool keep = true;
  static constexpr int stages = 2;
  static constexpr int stage_bytes = 2 * keys * Rows<head_dim>::bytes;  // keys and values
  // The last term holds the sums of dy * y.
  static constexpr int shared = 2 * queries * Rows<head_dim>::bytes + stages * stage_bytes + 4 * queries;
};

// dq of one tile of queries of one head, and its sums of dy * y, which key_value_gradients reads.
template <class T, int head_dim, bool plain>
__global__ void __launch_bounds__(threads, QueryGradientTiles<head_dim>::blocks)
    query_gradients(AttentionLayout layout, const std::uint16_t* dy, const std::uint16_t* qkv,
                    const std::uint16_t* keys_and_values, const std::uint16_t* y, const float* log_sum_exp,
                    std::uint16_t* dqkv, float* sums) {
  using Tiles = QueryGradientTiles<head_dim>;
  constexpr int row_tiles = Tiles::row_tiles;
  constexpr int keys = Tiles::keys;
  constexpr int stages = Tiles::stages;
  constexpr int query_bytes = Tiles::queries * Rows<head_dim>::bytes;
  unsigned char* const query_tile = dynamic_shared;
  unsigned char* const dy_tile = dynamic_shared + query_bytes;
  unsigned char* const ring = dynamic_shared + 2 * query_bytes;
  float* const tile_sums = reinterpret_cast<float*>(ring + stages * Tiles::stage_bytes);

  const int first_query = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Tiles::queries;
  const int head = static_cast<int>(blockIdx.y);
  const int sample = static_cast<int>(blockIdx.z);
  const int first_row = warp() * 16 * row_tiles;
  const int first_position = plain ? layout.plain_position(first_query) : layout.position(first_query);
  const int warp_position = first_position + first_row;
  const std::uint16_t* const key = keys_and_values + layout.key(sample, head / layout.per_group);
  const int visible = min(first_position + Tiles::queries, layout.keys);
  const int first_tile = plain ? 0 : layout.first_key(first_position) / keys;
  const int key_tiles = (visible + keys - 1) / keys - first_tile;

  const auto start_load = [&](int tile) {
    if (tile < key_tiles) {
      unsigned char* const stage = ring + tile % stages * Tiles::stage_bytes;
      const int first_key = (first_tile + tile) * keys;
      const int row = plain ? first_key : layout.key_row(first_key);
      load_rows<head_dim, keys>(stage, key, layout.key_stride, row, layout.keys);
      load_rows<head_dim, keys>(stage + Tiles::stage_bytes / 2, key + head_dim, layout.key_stride, row, layout.keys);
    }
    ptx::cp_async_commit();
  };
  load_rows<head_dim, Tiles::queries>(query_tile, qkv + layout.query(sample, head), layout.qkv_stride, first_query,
                                      layout.sequence);
  load_rows<head_dim, Tiles::queries>(dy_tile, dy + layout.y(sample, head), layout.y_stride, first_query,
                                      layout.sequence);
  ptx::cp_async_commit();
#pragma unroll
  for (int tile = 0; tile < stages - 1; ++tile) start_load(tile);
  ptx::cp_async_wait<stages - 1>();
  __syncthreads();

  Left<head_dim, row_tiles, Tiles::keep> query{.tile = query_tile, .first_row = first_row, .kept = {}};
  Left<head_dim, row_tiles, Tiles::keep> gradient{.tile = dy_tile, .first_row = first_row, .kept = {}};
  query.start();
  gradient.start();

  // D, by neighbouring threads for each query.
  {
    constexpr int parts = threads / Tiles::queries;
    static_assert(parts == 1 || parts == 2);
    const int row = static_cast<int>(threadIdx.x) / parts;
    const int part = static_cast<int>(threadIdx.x) % parts;
    const int query_row = first_query + row;
    float d = 0.0f;
    if (query_row < layout.sequence) {
      const std::uint16_t* const y_row = y + layout.y(sample, head) + query_row * layout.y_stride;
#pragma unroll
      for (int chunk = part; chunk < Rows<head_dim>::chunks; chunk += parts) {
        const uint4 a = *reinterpret_cast<const uint4*>(y_row + 8 * chunk);
        const uint4 b = *reinterpret_cast<const uint4*>(dy_tile + Rows<head_dim>::offset(row, chunk));
        const auto add = [&](std::uint32_t left, std::uint32_t right) {
          const float2 u = ptx::unpack<T>(left);
          const float2 v = ptx::unpack<T>(right);
          d += u.x * v.x;
          d += u.y * v.y;
        };
        add(a.x, b.x);
        add(a.y, b.y);
        add(a.z, b.z);
        add(a.w, b.w);
      }
    }
    if constexpr (parts == 2) d += __shfl_xor_sync(0xffffffffu, d, 1);
    if (part == 0) {
      tile_sums[row] = d;
      if (query_row < layout.sequence) sums[layout.statistics(sample, head) + query_row] = d;
    }
  }
  __syncthreads();

  const AttentionScores head_scores(layout, sample, head);
  const float scale = layout.scale * log2_e;
  float shift[row_tiles][2];  // log-sum-exp, to the base 2
  float row_sums[row_tiles][2];
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * m + lane() / 4 + 8 * half;
      shift[m][half] = first_query + row < layout.sequence
                           ? log_sum_exp[layout.statistics(sample, head) + first_query + row] * log2_e
                           : 0.0f;
      row_sums[m][half] = tile_sums[row];
    }
  }

  float out[row_tiles][head_dim / 8][4];
  clear(out);
  for (int tile = 0; tile < key_tiles; ++tile) {
    ptx::cp_async_wait<stages - 2>();
    __syncthreads();
    start_load(tile + stages - 1);
    const int first_key = (first_tile + tile) * keys;
    if (first_key >= warp_position + 16 * row_tiles) continue;
    if (!plain && first_key + keys <= layout.first_key(warp_position)) continue;
    const unsigned char* const key_tile = ring + tile % stages * Tiles::stage_bytes;

    float scores[row_tiles][keys / 8][4];
    clear(scores);
    add_product_transposed<T, head_dim, row_tiles, keys>(scores, query, key_tile);
    float dp[row_tiles][keys / 8][4];
    clear(dp);
    add_product_transposed<T, head_dim, row_tiles, keys>(dp, gradient, key_tile + Tiles::stage_bytes / 2);
    if (plain && first_key + keys - 1 > warp_position) {
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int n = 0; n < keys / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (first_key + 8 * n + lane() % 4 * 2 + e % 2 > warp_position + 16 * m + lane() / 4 + e / 2 * 8)
              scores[m][n][e] = -INFINITY;
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < keys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (plain) {
            const float probability = ptx::exp2_approximate(scores[m][n][e] * scale - shift[m][e / 2]);
            scores[m][n][e] = probability * (dp[m][n][e] - row_sums[m][e / 2]);
          } else {
            const int key_position = first_key + 8 * n + lane() % 4 * 2 + e % 2;
            const int position = warp_position + 16 * m + lane() / 4 + e / 2 * 8;
            const bool sees = key_position <= position && key_position >= layout.first_key(position);
            float to_product;
            const float score = head_scores.of(scores[m][n][e], key_position - position, to_product) * log2_e;
            scores[m][n][e] =
                sees ? ptx::exp2_approximate(score - shift[m][e / 2]) * (dp[m][n][e] - row_sums[m][e / 2]) * to_product
                     : 0.0f;
          }
        }
      }
    }
    std::uint32_t ds[row_tiles][keys / 16][4];
    pack<T, row_tiles, keys>(scores, ds);
    add_product<T, head_dim, row_tiles, keys>(out, ds, key_tile);
  }
  std::uint16_t* const dquery = dqkv + layout.query(sample, head);
  if (layout.accumulates) {
    // (In units of the scale, by which they are multiplied again.)
    float kept[row_tiles][2];
    for (float(&of_tile)[2] : kept) of_tile[0] = of_tile[1] = 1.0f / layout.scale;
    add_rows<T, head_dim, row_tiles>(out, kept, dquery, layout.qkv_stride, first_query + first_row, layout.sequence);
  }
  store_rows<T, head_dim, row_tiles>(out, layout.scale, query_tile, first_row, dquery, layout.qkv_stride,
                                     first_query + first_row, layout.sequence);
}

template <int head_dim>
struct KeyValueGradientTiles {
  static constexpr int blocks = head_dim <= 64 ? 3 : 2;
  static constexpr int row_tiles = 1;
  static constexpr int keys = warps * 16 * row_tiles;
  static constexpr int queries = head_dim <= 64 ? 64 : 32;
  static constexpr bool keep = head_dim <= 64;
  static constexpr int stages = 2;
  static constexpr int tile_bytes = queries * Rows<head_dim>::bytes;
  static constexpr int stage_bytes = 2 * tile_bytes + 2 * 4 * queries;  // queries, dy, log-sum-exp, sums of dy * y
  static_assert(stage_bytes % 128 == 0, "where tiles begin: Rows::along");
  static constexpr int shared = 2 * keys * Rows<head_dim>::bytes + stages * stage_bytes;
};

// dk and dv of one tile of keys of one key/value head, over all query heads of its group; zeros
// where no query of this rank sees the keys. Rows are keys here, columns queries.
template <class T, int head_dim, bool plain>
__global__ void __launch_bounds__(threads, plain ? KeyValueGradientTiles<head_dim>::blocks
                                                 : 2)  // (Three of the other form spill.)
    key_value_gradients(AttentionLayout layout, const std::uint16_t* dy, const std::uint16_t* qkv,
                        const std::uint16_t* keys_and_values, const float* log_sum_exp, const float* sums,
                        std::uint16_t* dkeys) {
  using Tiles = KeyValueGradientTiles<head_dim>;
  constexpr int row_tiles = Tiles::row_tiles;
  constexpr int queries = Tiles::queries;
  constexpr int stages = Tiles::stages;
  constexpr int key_bytes = Tiles::keys * Rows<head_dim>::bytes;
  unsigned char* const key_tile = dynamic_shared;
  unsigned char* const value_tile = dynamic_shared + key_bytes;
  unsigned char* const ring = dynamic_shared + 2 * key_bytes;

  const int first_key = static_cast<int>(blockIdx.x) * Tiles::keys;  // the first tile has the most queries
  const int kv_head = static_cast<int>(blockIdx.y);
  const int sample = static_cast<int>(blockIdx.z);
  const int first_row = warp() * 16 * row_tiles;
  const int warp_key = first_key + first_row;
  static_assert(Tiles::keys % queries == 0);
  const int first_tile = (plain ? layout.plain_rows_before(first_key) : layout.rows_before(first_key)) / queries;
  const int last_query =
      plain ? layout.sequence : layout.rows_before(layout.last_query(first_key + Tiles::keys - 1));
  const int tiles = (last_query + queries - 1) / queries;
  const int steps = (tiles - first_tile) * layout.per_group;
  const int first_head = kv_head * layout.per_group;
  const std::uint16_t* const group_query = qkv + layout.group(sample, kv_head);
  const std::uint16_t* const group_dy = dy + layout.y(sample, first_head);
  const float* const group_log_sum_exp = log_sum_exp + layout.statistics(sample, first_head);
  const float* const group_sums = sums + layout.statistics(sample, first_head);

  // The target of the next load: a query head of the group and a tile of its queries.
  int load_head = 0;
  int load_tile = first_tile;
  const auto start_load = [&](int step) {
    // (The same where there are steps; the first takes fewer registers.)
    if (plain ? load_head < layout.per_group : step < steps) {
      unsigned char* const stage = ring + step % stages * Tiles::stage_bytes;
      float* const statistics = reinterpret_cast<float*>(stage + 2 * Tiles::tile_bytes);
      const int first_query = load_tile * queries;
      load_rows<head_dim, queries>(stage, group_query + load_head * head_dim, layout.qkv_stride, first_query,
                                   layout.sequence);
      load_rows<head_dim, queries>(stage + Tiles::tile_bytes, group_dy + load_head * head_dim, layout.y_stride,
                                   first_query, layout.sequence);
      const std::int64_t of_head = load_head * static_cast<std::int64_t>(layout.statistics_rows);
      load_statistics<queries>(statistics, group_log_sum_exp + of_head, first_query, layout.sequence);
      load_statistics<queries>(statistics + queries, group_sums + of_head, first_query, layout.sequence);
      if (++load_tile == tiles) {
        load_tile = first_tile;
        ++load_head;
      }
    }
    ptx::cp_async_commit();
  };
  const int first_key_row = plain ? first_key : layout.key_row(first_key);
  load_rows<head_dim, Tiles::keys>(key_tile, keys_and_values + layout.key(sample, kv_head), layout.key_stride,
                                   first_key_row, layout.keys);
  load_rows<head_dim, Tiles::keys>(value_tile, keys_and_values + layout.value(sample, kv_head), layout.key_stride,
                                   first_key_row, layout.keys);
#pragma unroll
  for (int step = 0; step < stages - 1; ++step) start_load(step);

  const float scale = layout.scale * log2_e;
  Left<head_dim, row_tiles, Tiles::keep> key{.tile = key_tile, .first_row = first_row, .kept = {}};
  Left<head_dim, row_tiles, Tiles::keep> value{.tile = value_tile, .first_row = first_row, .kept = {}};
  float dk[row_tiles][head_dim / 8][4];
  float dv[row_tiles][head_dim / 8][4];
  clear(dk);
  clear(dv);
  for (int step = 0, tile = first_tile, query_head = first_head; step < steps; ++step) {
    ptx::cp_async_wait<stages - 2>();
    __syncthreads();
    start_load(step + stages - 1);
    if (step == 0) {
      key.start();
      value.start();
    }
    const int first_query = tile * queries;
    const int head = query_head;
    if (++tile == tiles) {
      tile = first_tile;
      ++query_head;
    }
    const int first_position = plain ? layout.plain_position(first_query) : layout.position(first_query);
    if (first_position + queries <= warp_key) continue;  // they see none of this warp's keys
    if (!plain && first_position >= layout.last_query(warp_key + 16 * row_tiles - 1)) continue;
    const unsigned char* const query_tile = ring + step % stages * Tiles::stage_bytes;
    const unsigned char* const dy_tile = query_tile + Tiles::tile_bytes;
    const float* const statistics = reinterpret_cast<const float*>(query_tile + 2 * Tiles::tile_bytes) + lane() % 4 * 2;

    float probabilities[row_tiles][queries / 8][4];
    clear(probabilities);
    add_product_transposed<T, head_dim, row_tiles, queries>(probabilities, key, query_tile);
    if constexpr (!plain) {
      float ds[row_tiles][queries / 8][4];
      clear(ds);
      add_product_transposed<T, head_dim, row_tiles, queries>(ds, value, dy_tile);
      const AttentionScores head_scores(layout, sample, head);
#pragma unroll
      for (int n = 0; n < queries / 8; ++n) {
        const float2 shift = *reinterpret_cast<const float2*>(statistics + 8 * n);
        const float2 sum = *reinterpret_cast<const float2*>(statistics + queries + 8 * n);
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int key_position = warp_key + 16 * m + lane() / 4 + e / 2 * 8;
            const int position = first_position + 8 * n + lane() % 4 * 2 + e % 2;
            const bool sees =
                position < layout.positions && key_position <= position && key_position >= layout.first_key(position);
            float to_product;
            const float score = head_scores.of(probabilities[m][n][e], key_position - position, to_product);
            const float probability =
                sees ? ptx::exp2_approximate((score - (e % 2 == 0 ? shift.x : shift.y)) * log2_e) : 0.0f;
            probabilities[m][n][e] = probability;
            ds[m][n][e] = probability * (ds[m][n][e] - (e % 2 == 0 ? sum.x : sum.y)) * to_product;
          }
        }
      }
      std::uint32_t left[row_tiles][queries / 16][4];
      pack<T, row_tiles, queries>(probabilities, left);
      add_product<T, head_dim, row_tiles, queries>(dv, left, dy_tile);
      pack<T, row_tiles, queries>(ds, left);
      add_product<T, head_dim, row_tiles, queries>(dk, left, query_tile);
      continue;
    }
    if (first_position < warp_key + 16 * row_tiles - 1) {
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int n = 0; n < queries / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (warp_key + 16 * m + lane() / 4 + e / 2 * 8 > first_position + 8 * n + lane() % 4 * 2 + e % 2) {
              probabilities[m][n][e] = -INFINITY;
            }
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < queries / 8; ++n) {
      const float2 shift = *reinterpret_cast<const float2*>(statistics + 8 * n);
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          probabilities[m][n][e] =
              ptx::exp2_approximate(probabilities[m][n][e] * scale - (e % 2 == 0 ? shift.x : shift.y) * log2_e);
        }
      }
    }
    std::uint32_t left[row_tiles][queries / 16][4];
    pack<T, row_tiles, queries>(probabilities, left);
    add_product<T, head_dim, row_tiles, queries>(dv, left, dy_tile);

    float ds[row_tiles][queries / 8][4];
    clear(ds);
    add_product_transposed<T, head_dim, row_tiles, queries>(ds, value, dy_tile);
#pragma unroll
    for (int n = 0; n < queries / 8; ++n) {
      const float2 sum = *reinterpret_cast<const float2*>(statistics + queries + 8 * n);
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) ds[m][n][e] = probabilities[m][n][e] * (ds[m][n][e] - (e % 2 == 0 ? sum.x : sum.y));
      }
    }
    pack<T, row_tiles, queries>(ds, left);
    add_product<T, head_dim, row_tiles, queries>(dk, left, query_tile);
  }
  if (!plain && steps == 0) {  // the tiles that are stored through may still be arriving
    ptx::cp_async_wait<0>();
    __syncthreads();
  }
  store_rows<T, head_dim, row_tiles>(dk, layout.scale, key_tile, first_row, dkeys + layout.key(sample, kv_head),
                                     layout.key_stride, first_key_row + first_row, layout.keys);
  store_rows<T, head_dim, row_tiles>(dv, 1.0f, value_tile, first_row, dkeys + layout.value(sample, kv_head),
                                     layout.key_stride, first_key_row + first_row, layout.keys);
}

template <class Tiles, class... Parameters>
Grid grid_of(void (*kernel)(Parameters...), std::int64_t tiles, int heads, int batch) {
  static_assert(Tiles::shared <= 99 * 1024);
  // By default, a block gets 48 KiB.
  if constexpr (Tiles::shared > 48 * 1024) allow_shared_memory(kernel, Tiles::shared);
  return {.blocks = dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(heads), static_cast<unsigned>(batch)),
          .threads = dim3(threads),
          .shared = Tiles::shared};
}

template <class T, int head_dim, bool plain>
void forward(const AttentionForward& work, cudaStream_t stream) {
  using Tiles = ForwardTiles<head_dim>;
  const auto kernel = attention_forward<T, head_dim, plain>;
  launch("attention", kernel,
         grid_of<Tiles>(kernel, divide_up(work.layout.sequence, Tiles::queries), work.layout.heads, work.batch), stream,
         work.layout, static_cast<const std::uint16_t*>(work.qkv), static_cast<const std::uint16_t*>(work.keys),
         static_cast<std::uint16_t*>(work.y), work.log_sum_exp);
}

template <class T, int head_dim, bool plain>
void backward(const AttentionBackward& work, cudaStream_t stream) {
  const AttentionLayout& layout = work.layout;
  const auto* const dy = static_cast<const std::uint16_t*>(work.dy);
  const auto* const qkv = static_cast<const std::uint16_t*>(work.qkv);
  const auto* const y = static_cast<const std::uint16_t*>(work.y);
  const auto* const keys_and_values = static_cast<const std::uint16_t*>(work.keys);
  using QueryTiles = QueryGradientTiles<head_dim>;
  const auto queries = query_gradients<T, head_dim, plain>;
  launch("attention_gradient: queries", queries,
         grid_of<QueryTiles>(queries, divide_up(layout.sequence, QueryTiles::queries), layout.heads, work.batch),
         stream, layout, dy, qkv, keys_and_values, y, work.log_sum_exp, static_cast<std::uint16_t*>(work.dqkv),
         work.sums);
  using KeyTiles = KeyValueGradientTiles<head_dim>;
  const auto keys = key_value_gradients<T, head_dim, plain>;
  launch(
      "attention_gradient: keys and values", keys,
      grid_of<KeyTiles>(keys, divide_up(layout.keys, KeyTiles::keys), layout.heads / layout.per_group, work.batch),
      stream, layout, dy, qkv, keys_and_values, work.log_sum_exp, static_cast<const float*>(work.sums),
      static_cast<std::uint16_t*>(work.dkeys));
}

struct Row {
  DataType type{};
  int head_dim = 0;
  // [1]: plain
  void (*forward[2])(const AttentionForward&, cudaStream_t) = {};
  void (*backward[2])(const AttentionBackward&, cudaStream_t) = {};
};

template <class T, int head_dim>
constexpr Row row(DataType type) {
  return {.type = type,
          .head_dim = head_dim,
          .forward = {forward<T, head_dim, false>, forward<T, head_dim, true>},
          .backward = {backward<T, head_dim, false>, backward<T, head_dim, true>}};
}

constexpr Row rows[] = {
    row<__nv_bfloat16, 32>(DataType::bf16),  row<__nv_bfloat16, 64>(DataType::bf16),
    row<__nv_bfloat16, 80>(DataType::bf16),  row<__nv_bfloat16, 96>(DataType::bf16),
    row<__nv_bfloat16, 128>(DataType::bf16), row<__half, 32>(DataType::fp16),
    row<__half, 64>(DataType::fp16),         row<__half, 80>(DataType::fp16),
    row<__half, 96>(DataType::fp16),         row<__half, 128>(DataType::fp16),
};

// The kernels of the type and head dim, where chunks of gathered keys are whole tiles, and so are
// keys that no query is before.
const Row* find_row(DataType type, const AttentionLayout& layout, int largest_tile) {
  if (layout.chunks.any() && layout.chunks.size % largest_tile != 0) return nullptr;
  if (layout.ahead > 0 && layout.keys % largest_tile != 0) return nullptr;
  for (const Row& row : rows) {
    if (row.type == type && row.head_dim == layout.head_dim) return &row;
  }
  return nullptr;
}

// Tiles are powers of two up to these, whatever the head dim.
constexpr int forward_tile = 2 * 16 * warps, gradient_tile = 16 * warps;
template <int head_dim>
constexpr bool tiles_divide() {
  using Forward = ForwardTiles<head_dim>;
  using Queries = QueryGradientTiles<head_dim>;
  using Keys = KeyValueGradientTiles<head_dim>;
  return forward_tile % Forward::queries == 0 && forward_tile % Forward::keys == 0 &&
         gradient_tile % Queries::queries == 0 && gradient_tile % Queries::keys == 0 &&
         gradient_tile % Keys::queries == 0 && gradient_tile % Keys::keys == 0;
}
static_assert(tiles_divide<32>() && tiles_divide<64>() && tiles_divide<80>() && tiles_divide<96>() &&
              tiles_divide<128>());

}  // namespace

bool attention_on_matrix_units(const AttentionForward& work, DataType type, cudaStream_t stream) {
  const Row* const row = find_row(type, work.layout, forward_tile);
  if (row == nullptr) return false;
  row->forward[work.layout.is_plain()](work, stream);
  return true;
}

bool attention_gradient_on_matrix_units(const AttentionBackward& work, DataType type, cudaStream_t stream) {
  const Row* const row = find_row(type, work.layout, gradient_tile);
  if (row == nullptr) return false;
  row->backward[work.layout.is_plain()](work, stream);
  return true;
}

}  // namespace parplan
