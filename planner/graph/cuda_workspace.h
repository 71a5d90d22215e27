#pragma once

#include <cstdint>

#include "planner/base/units.h"

namespace parplan {

// Workspaces of the CUDA kernels. They are in this room because they are operands, which the plan
// counts to the byte; the kernels (runtime/device/cuda/kernels) use the same numbers.

// cuBLASLt: algorithms that need more are refused. 32 MiB is what cuBLAS itself takes on Hopper
// (cuBLAS 13 documentation, cublasSetWorkspace).
inline constexpr std::int64_t matrix_workspace_bytes = 32 << 20;

// A product in fp8: of each factor the largest numbers of so many blocks of threads, and what its
// cast is multiplied by to be itself again; then the two factors in 8 bits. All at multiples of 256
// bytes.
inline constexpr std::int64_t fp8_maxima = 512;
inline constexpr std::int64_t fp8_scales_bytes = 2 * (4 * fp8_maxima + 256);
constexpr std::int64_t fp8_factor_bytes(std::int64_t elements) { return ceil_div(elements, 256) * 256; }
constexpr Bytes fp8_workspace(std::int64_t left, std::int64_t right) {
  return Bytes(fp8_scales_bytes + fp8_factor_bytes(left) + fp8_factor_bytes(right));
}

// Sums over many rows take two steps, so that their order does not depend on which block comes
// first: each of this many blocks sums a contiguous part of the rows, then the parts are added in
// order.
inline constexpr std::int64_t most_partial_sums = 256;
// Blocks that sum `rows` rows: at least 16 rows each, where there are as many.
constexpr std::int64_t partial_sums(std::int64_t rows) {
  const std::int64_t blocks = (rows + 15) / 16;
  return blocks < 1 ? 1 : blocks < most_partial_sums ? blocks : most_partial_sums;
}
// `vectors` sums of `columns` columns each over `rows` rows, each in fp32 [partial_sums, columns].
constexpr Bytes column_sums_workspace(std::int64_t rows, std::int64_t columns, std::int64_t vectors) {
  return Bytes(4 * partial_sums(rows) * columns * vectors);
}

// sum_squares: one partial sum for each block.
inline constexpr std::int64_t sum_squares_blocks = 1024;
inline constexpr std::int64_t sum_squares_workspace_bytes = 4 * sum_squares_blocks;

// attention_gradient: the sum of dy * y for each query and head, fp32 [batch, heads, sequence].
// (Query gradients are computed by a kernel of their own, not added up across blocks: this needs no
// fp32 accumulator and gives the same bits in every run.)
constexpr Bytes cuda_attention_gradient_workspace(std::int64_t sequence, std::int64_t batch, std::int64_t heads) {
  return Bytes(4 * sequence * batch * heads);
}

// packed_attention with relative position biases: those of each sample and head by distance, fp32
// [batch, heads, queries + keys + margins], since tiles reach beyond the last query and key.
inline constexpr int attention_bias_margin = 128;
constexpr Bytes cuda_biases_workspace(std::int64_t queries, std::int64_t keys, std::int64_t batch, std::int64_t heads) {
  return Bytes(4 * (queries + keys + 2 * attention_bias_margin) * batch * heads);
}
// Its gradient: the sums of each tile of queries by bucket, fp32 [batch, heads, tiles, buckets].
// Tiles have at least `least_query_tile` queries.
inline constexpr std::int64_t least_query_tile = 32;
constexpr Bytes cuda_bias_sums_workspace(std::int64_t queries, std::int64_t buckets, std::int64_t batch,
                                         std::int64_t heads) {
  return Bytes(4 * batch * heads * ceil_div(queries, least_query_tile) * buckets);
}

}  // namespace parplan
