#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "planner/graph/tensor.h"

namespace parplan {

// A factor of a product in fp8: the matrix as it is, and what the product reads.
struct Fp8Factor {
  const void* matrix = nullptr;  // [rows, columns]
  DataType type = DataType::bf16;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  bool transposes = false;    // `cast` is [columns, rows], with zeros behind each row up to `padded`
  std::int64_t padded = 0;
  bool is_gradient = false;   // e5m2; else e4m3
  void* cast = nullptr;       // numbers of 8 bits
  float* maxima = nullptr;    // fp8_maxima of them (planner/graph/cuda_workspace.h)
  float* divisor = nullptr;   // what the cast numbers are multiplied by to be the matrix again
};

// Casts by the largest power of two with which no number overflows. A power of two leaves each
// number's fraction as it is, so that the cast hardly depends on what other numbers there are: on
// how ranks divide the tensor. (TransformerEngine's `force_pow_2_scales`, torchao's
// `round_scales_to_power_of_2`.) Where the largest number is not finite, the divisor is NaN.
void cast_to_fp8(const Fp8Factor& factor, cudaStream_t stream);

}  // namespace parplan
