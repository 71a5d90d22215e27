#pragma once

#include <algorithm>
#include <cstdint>

#include "planner/base/units.h"
#include "planner/graph/op_kind.h"

namespace parplan {

// Ops with this cost class in their row are products: linear and its gradients, alone or fused with
// GELU.
bool is_product(OpKind kind);
Product product_of(OpKind kind, const OpShape& shape, DataType type);

// How matrix products fall short of the rate of ever larger ones.
struct ProductRates {
  FlopsPerSecond rate;  // of products that fill all multiprocessors for a long time
  // The size of the summed dim at which a tile runs at half of `rate` (the cost of starting and
  // ending it); on a CPU the multiply-adds that packing or storing one element of an operand costs.
  double half_length = 0.0;
  BytesPerSecond memory;
  int multiprocessors = 0;  // 0: no tiles (CPU, or unknown)
  bool hides_results = false;  // the results of a tile are written beside the arithmetic of the next one
};

// The time of a product's arithmetic is a / rate + b half_length / rate + bytes / memory, linear in
// 1 / rate and half_length / rate, and never less than it takes to write what is hidden:
struct ProductWork {
  double flops = 0.0;  // a: arithmetic, including that of empty places in tiles and waves
  // b: arithmetic of one step along the summed dim, for every tile that is started (CPU: 2 for
  // every element).
  double starts = 0.0;
  Bytes bytes;   // results written after the arithmetic, and partial sums
  Bytes hidden;  // results of which all but the last wave's are written beside it
};
inline Seconds time_of(const ProductWork& work, const ProductRates& rates) {
  const Seconds arithmetic((work.flops + work.starts * rates.half_length) / rates.rate.value);
  return std::max(arithmetic, work.hidden / rates.memory) + work.bytes / rates.memory;
}

// Without multiprocessors: the arithmetic itself, and each element of the three matrices handled
// once.
//
// With them, the model of NVIDIA, "Matrix Multiplication Background User's Guide" (DU-09799-001,
// 2023), chapter 3: C is cut into tiles, a tile is the work of one multiprocessor, and both the
// last tiles of a row and the last wave of tiles cost as much as full ones:
//
//     waves = ceil(ceil(m / tile m) * ceil(n / tile n) * splits / multiprocessors)
//     flops = waves * multiprocessors * 2 * tile m * tile n * ceil(k / splits) / reuse
//
// The fastest combination of tile and splits counts, which is what the library's heuristic aims at.
//   tiles    256x128, 128x256, 128x128 (the guide, 2.3), and smaller ones that are bound by the
//            loads of a multiprocessor. A 128x128 tile of two-byte numbers needs the 64 bytes per
//            clock (Jia et al., Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking,
//            2018, table 3.1: L1 from L2) on Hopper (4096 FLOP per clock and multiprocessor), so
//            below it the rate falls as tile m * tile n / (tile m + tile n), `reuse`
//   splits   of the sum, as cuBLASLt's split-K; partial sums are written and read in fp32
//   results  are written after a tile's arithmetic: two large tiles do not fit on a multiprocessor
//            side by side (NVIDIA/cutlass media/docs/efficient_gemm.md), so nothing hides it. From
//            Hopper on a multiprocessor computes the next tile meanwhile (warps that specialise,
//            the same page), so that only the last wave's are left (hides_results)
//
// 4096 cubed in bf16 on H100 SXM: 3.88 waves of 256x128 become 4, which at 794.5 TFLOP/s and 2.97
// TB/s gives 761 TFLOP/s, and 726 if nothing were hidden; 716 were measured (P. Shankhdhar,
// Outperforming cuBLAS on H100, 2024), where the clock fell to the limit of power.
//
// The time never falls when a size grows: each tile's and split's time rises with every size, and
// so does the minimum.
ProductWork best_tiling(const Product& product, const ProductRates& rates);

}  // namespace parplan
