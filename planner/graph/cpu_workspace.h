#pragma once

#include <cstdint>

#include "planner/base/units.h"

namespace parplan {

// How the CPU kernels cut matrix products y[n, m] += x[n, k] w[m, k] into blocks that are packed
// for the caches. This is in this room because the packing buffers are workspace operands, which
// the plan counts to the byte; the kernels (runtime/device/cpu/kernels/gemm.cpp) use the same
// numbers.
struct GemmBlocking {
  std::int64_t m = 0;  // output features
  std::int64_t n = 0;  // tokens
  std::int64_t k = 0;  // summed
  bool operator==(const GemmBlocking&) const = default;
};

// The best of 24 blockings by the mean over the GPT-2 124M shapes with 256 and 1024 tokens on one
// core of a Sapphire Rapids Xeon (2 MiB L2), Eigen 3.4, AVX-512; tests/bench/gemm_bench.cpp prints
// what they reach.
inline constexpr GemmBlocking forward_blocking{.m = 384, .n = 256, .k = 768};   // w is stored [m, k]: costly to pack
inline constexpr GemmBlocking backward_blocking{.m = 960, .n = 256, .k = 256};  // w is stored [k, m]

// Query rows that attention handles at a time: its scratch is this times the sequence.
inline constexpr std::int64_t attention_query_block = 128;

// Sections of a workspace start at multiples of 16 floats (64 bytes, a cache line and an AVX-512
// register).
constexpr std::int64_t align_elements(std::int64_t elements) { return (elements + 15) / 16 * 16; }

// The blocking of a product that is smaller than a block. Tokens are packed in groups of four.
constexpr GemmBlocking clipped(GemmBlocking blocking, std::int64_t m, std::int64_t n, std::int64_t k) {
  const std::int64_t groups = (n + 3) / 4 * 4;
  return {.m = m < blocking.m ? m : blocking.m,
          .n = groups < blocking.n ? groups : blocking.n,
          .k = k < blocking.k ? k : blocking.k};
}

// In floats: one packed block of w, one of x, and space for the last up to three tokens, padded to
// four.
constexpr std::int64_t gemm_workspace_elements(GemmBlocking blocking, std::int64_t m, std::int64_t n, std::int64_t k) {
  const GemmBlocking b = clipped(blocking, m, n, k);
  return align_elements(b.m * b.k) + align_elements(b.n * b.k) + align_elements(4 * b.k) + align_elements(4 * b.m);
}
constexpr Bytes gemm_workspace(GemmBlocking blocking, std::int64_t m, std::int64_t n, std::int64_t k) {
  return Bytes(4 * gemm_workspace_elements(blocking, m, n, k));
}

// linear: y[rows, columns] = x[rows, inner] weight[columns, inner]; its gradients.
constexpr Bytes linear_workspace(std::int64_t rows, std::int64_t columns, std::int64_t inner) {
  return gemm_workspace(forward_blocking, columns, rows, inner);
}
constexpr Bytes linear_input_gradient_workspace(std::int64_t rows, std::int64_t columns, std::int64_t inner) {
  return gemm_workspace(backward_blocking, inner, rows, columns);
}
constexpr Bytes linear_weight_gradient_workspace(std::int64_t rows, std::int64_t columns, std::int64_t inner) {
  return gemm_workspace(backward_blocking, inner, columns, rows);
}

constexpr std::int64_t attention_block(std::int64_t sequence) {
  return sequence < attention_query_block ? sequence : attention_query_block;
}
// The largest packing that any product inside attention needs: queries x keys over head_dim,
// queries x head_dim over keys, and in the gradient keys x head_dim over queries.
constexpr std::int64_t attention_packing_elements(std::int64_t queries, std::int64_t keys, std::int64_t head_dim) {
  const std::int64_t block = attention_block(queries);
  const std::int64_t sizes[] = {gemm_workspace_elements(forward_blocking, keys, block, head_dim),
                                gemm_workspace_elements(backward_blocking, head_dim, block, keys),
                                gemm_workspace_elements(backward_blocking, head_dim, keys, block)};
  std::int64_t largest = 0;
  for (const std::int64_t size : sizes) largest = size > largest ? size : largest;
  return largest;
}
// Scores of one block of queries, and packing. `queries`: of a run of consecutive positions.
constexpr Bytes attention_workspace(std::int64_t queries, std::int64_t keys, std::int64_t head_dim) {
  return Bytes(4 * (align_elements(attention_block(queries) * keys) +
                    attention_packing_elements(queries, keys, head_dim)));
}
constexpr Bytes attention_workspace(std::int64_t sequence, std::int64_t head_dim) {
  return attention_workspace(sequence, sequence, head_dim);
}
// Probabilities and their gradient of one block of queries, a number per query, and packing.
constexpr Bytes attention_gradient_workspace(std::int64_t queries, std::int64_t keys, std::int64_t head_dim) {
  return Bytes(4 * (2 * align_elements(attention_block(queries) * keys) + align_elements(attention_block(queries)) +
                    attention_packing_elements(queries, keys, head_dim)));
}
constexpr Bytes attention_gradient_workspace(std::int64_t sequence, std::int64_t head_dim) {
  return attention_gradient_workspace(sequence, sequence, head_dim);
}
// The relative position biases of one head by distance, from the last query's to the first key, on
// to the last key's; sixteen are read at a time.
constexpr std::int64_t biases_by_distance(std::int64_t queries, std::int64_t keys) {
  return align_elements(queries + keys + 15);
}

}  // namespace parplan
