#pragma once

#include <cstdint>

#include "planner/base/units.h"
#include "planner/graph/op.h"

namespace parplan {

// Ops whose row says so are products: linear and its gradients, alone or fused with GELU.
bool is_product(OpKind kind);
Product product_of(OpKind kind, const OpShape& shape, DataType type);

// How matrix products reach less than the rate of ever larger ones.
struct ProductRates {
  FlopsPerSecond rate;         // of products that fill all multiprocessors for long
  // Of the summed dim, at which a tile runs at half of `rate` (what it takes to start and end); on
  // a CPU the multiply-adds that packing or storing one number of an operand costs.
  double half_length = 0.0;
  BytesPerSecond memory;
  int multiprocessors = 0;     // 0: no tiles (CPU, or not known)
};

// The time of a product's arithmetic is a / rate + b half_length / rate + bytes / memory, linear in
// 1 / rate and half_length / rate:
struct ProductWork {
  double flops = 0.0;    // a: arithmetic, that of places of tiles and waves with nothing in them included
  double starts =
      0.0;  // b: arithmetic of one step along the summed dim, for every tile that is started (CPU: 2 for every number)
  Bytes bytes;           // results written when arithmetic is over, and partial sums
};
inline Seconds time_of(const ProductWork& work, const ProductRates& rates) {
  return Seconds((work.flops + work.starts * rates.half_length) / rates.rate.value) + work.bytes / rates.memory;
}

// Without multiprocessors: the arithmetic itself, and each number of the three matrices handled
// once.
//
// With them, what NVIDIA, "Matrix Multiplication Background User's Guide" (DU-09799-001, 2023),
// chapter 3 describes: C is cut into tiles, a tile is the work of one multiprocessor, and both the
// last tiles of a row and the last wave of tiles are paid in full:
//
//     waves = ceil(ceil(m / tile m) * ceil(n / tile n) * splits / multiprocessors)
//     flops = waves * multiprocessors * 2 * tile m * tile n * ceil(k / splits) / reuse
//
// The fastest of the tiles and splits counts, as the library's heuristic wants it.
//   tiles    256x128, 128x256, 128x128 (the guide, 2.3), and smaller ones that are bound by what a
//   multiprocessor can load: 64 bytes a
//            clock (Jia et al., Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking,
//            2018, table 3.1: L1 from L2) are just what a 128x128 tile of two-byte numbers needs on
//            Hopper (4096 FLOP a clock and multiprocessor), so below it the rate falls as tile m *
//            tile n / (tile m + tile n), `reuse`
//   splits   of the sum, as cuBLASLt's split-K; partial sums are written and read in fp32 results
//   are written after a tile's arithmetic: two large tiles do not fit on a multiprocessor side by
//   side (NVIDIA/cutlass
//            media/docs/efficient_gemm.md), so nothing hides it
//
// 4096 cubed in bf16 on H100 SXM: 3.88 waves of 256x128 make 4, with 794.5 TFLOP/s and 2.97 TB/s
// 726 TFLOP/s; measured 716 (P. Shankhdhar, Outperforming cuBLAS on H100, 2024).
//
// The time never falls when a size grows: each tile's and split's time rises with every size, and
// so does their least.
ProductWork best_tiling(const Product& product, const ProductRates& rates);

}  // namespace parplan
