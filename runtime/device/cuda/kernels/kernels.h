#pragma once

#include <cstdint>

#include "runtime/device/cuda/kernels/attention.h"
#include "runtime/device/cuda/kernels/kernel_arguments.h"

// One host function per op kind, named after it; operands in the order of the op's row in
// planner/graph/ops/. Formulas and layouts are those of runtime/device/cpu/kernels. Matrix
// products: runtime/device/cuda/linear.h.
namespace parplan {

// embedding.cu
void embedding(const CudaKernelArguments& a);
void normalize_pixels(const CudaKernelArguments& a);
void embedding_gradient(const CudaKernelArguments& a);
void add_position(const CudaKernelArguments& a);
void add_position_gradient(const CudaKernelArguments& a);

// normalization.cu
void layer_norm(const CudaKernelArguments& a);
void add_layer_norm(const CudaKernelArguments& a);
void rms_norm(const CudaKernelArguments& a);
void add_rms_norm(const CudaKernelArguments& a);

// normalization_gradient.cu
void layer_norm_gradient(const CudaKernelArguments& a);
void rms_norm_gradient(const CudaKernelArguments& a);

// query_key_norm.cu
void head_norm(const CudaKernelArguments& a);
void head_norm_gradient(const CudaKernelArguments& a);
void query_key_squares(const CudaKernelArguments& a);
void query_key_squares_gradient(const CudaKernelArguments& a);
void query_key_norm(const CudaKernelArguments& a);
void query_key_norm_gradient(const CudaKernelArguments& a);

// rotary.cu
void rotary(const CudaKernelArguments& a);
void rotary_gradient(const CudaKernelArguments& a);

// elementwise.cu
void activation(const CudaKernelArguments& a);
void activation_gradient(const CudaKernelArguments& a);
void gate(const CudaKernelArguments& a);
void gate_gradient(const CudaKernelArguments& a);
void scale(const CudaKernelArguments& a);
void scale_gradient(const CudaKernelArguments& a);
void softcap(const CudaKernelArguments& a);
void softcap_gradient(const CudaKernelArguments& a);
void add(const CudaKernelArguments& a);
void accumulate(const CudaKernelArguments& a);

// movement.cu
void fill_zero(const CudaKernelArguments& a);
void copy(const CudaKernelArguments& a);
void transpose_blocks(const CudaKernelArguments& a);
void take_columns(const CudaKernelArguments& a);
void put_columns(const CudaKernelArguments& a);
void take_rows(const CudaKernelArguments& a);
void take_rows_gradient(const CudaKernelArguments& a);
void put_rows(const CudaKernelArguments& a);
void put_rows_gradient(const CudaKernelArguments& a);
void append_rows(const CudaKernelArguments& a);
void append_rows_gradient(const CudaKernelArguments& a);

// column_sums.cu
void bias_gradient(const CudaKernelArguments& a);
// sums[c] += sum of rows[r][c] over r, of a matrix [rows, columns] of `type`. Workspace:
// column_sums_workspace(rows, columns, 1).
void add_column_sums(const void* matrix, DataType type, std::int64_t rows, std::int64_t columns, float* sums,
                     void* workspace, cudaStream_t stream);
// The second step: sums[c] += sum of parts[p][c] over p.
void add_parts(const float* parts, std::int64_t count, std::int64_t columns, float* sums, cudaStream_t stream);

// cross_entropy.cu
void cross_entropy_max(const CudaKernelArguments& a);
void cross_entropy_sums(const CudaKernelArguments& a);
void cross_entropy_loss(const CudaKernelArguments& a);
void cross_entropy_gradient(const CudaKernelArguments& a);

// optimizer.cu
void sum_squares(const CudaKernelArguments& a);
void adamw(const CudaKernelArguments& a);
void adamw_8bit(const CudaKernelArguments& a);
void sgd(const CudaKernelArguments& a);
void muon_momentum(const CudaKernelArguments& a);
void normalize_matrix(const CudaKernelArguments& a);
void newton_schulz_polynomial(const CudaKernelArguments& a);
void muon(const CudaKernelArguments& a);
void update_loss_scale(const CudaKernelArguments& a);

// memory_pattern.cu, for Backend::fill and end_of_unlike
void fill_words(std::uint32_t* words, std::uint32_t pattern, std::int64_t count, cudaStream_t stream);
// Writes to device memory: one past the index of the last word that differs from `pattern`, 0 when
// none does.
void find_end_of_unlike(const std::uint32_t* words, std::uint32_t pattern, std::int64_t count, std::int64_t* end,
                        cudaStream_t stream);

// Elements of a flat op: rows of `columns`, or just `rows` where `columns` is 0.
inline std::int64_t elements(const OpShape& shape) { return shape.rows * (shape.columns > 0 ? shape.columns : 1); }

}  // namespace parplan
