#pragma once

#include "runtime/device/cpu/kernels/instruction_set.h"
#include "runtime/device/cpu/kernels/kernel_table.h"

// One function per op kind, named after it; operands in the order of the op's row in
// planner/graph/ops/.
namespace parplan::PARPLAN_CPU_NAMESPACE {

// embedding.cpp
void embedding(const CpuKernelArguments& a);
void normalize_pixels(const CpuKernelArguments& a);
void embedding_gradient(const CpuKernelArguments& a);
void add_position(const CpuKernelArguments& a);
void add_position_gradient(const CpuKernelArguments& a);

// normalization.cpp
void layer_norm(const CpuKernelArguments& a);
void layer_norm_gradient(const CpuKernelArguments& a);
void add_layer_norm(const CpuKernelArguments& a);
void rms_norm(const CpuKernelArguments& a);
void rms_norm_gradient(const CpuKernelArguments& a);
void add_rms_norm(const CpuKernelArguments& a);

// query_key_norm.cpp
void head_norm(const CpuKernelArguments& a);
void head_norm_gradient(const CpuKernelArguments& a);
void query_key_squares(const CpuKernelArguments& a);
void query_key_squares_gradient(const CpuKernelArguments& a);
void query_key_norm(const CpuKernelArguments& a);
void query_key_norm_gradient(const CpuKernelArguments& a);

// linear.cpp
void linear(const CpuKernelArguments& a);
void linear_gelu(const CpuKernelArguments& a);
void linear_input_gradient(const CpuKernelArguments& a);
void linear_input_gradient_gelu(const CpuKernelArguments& a);
void linear_weight_gradient(const CpuKernelArguments& a);

// attention.cpp
void attention(const CpuKernelArguments& a);
void attention_gradient(const CpuKernelArguments& a);
void packed_attention(const CpuKernelArguments& a);
void packed_attention_gradient(const CpuKernelArguments& a);

// rotary.cpp
void rotary(const CpuKernelArguments& a);
void rotary_gradient(const CpuKernelArguments& a);

// elementwise.cpp
void activation(const CpuKernelArguments& a);
void activation_gradient(const CpuKernelArguments& a);
void gate(const CpuKernelArguments& a);
void gate_gradient(const CpuKernelArguments& a);
void scale(const CpuKernelArguments& a);
void scale_gradient(const CpuKernelArguments& a);
void softcap(const CpuKernelArguments& a);
void softcap_gradient(const CpuKernelArguments& a);
void add(const CpuKernelArguments& a);
void bias_gradient(const CpuKernelArguments& a);
void accumulate(const CpuKernelArguments& a);

// movement.cpp
void fill_zero(const CpuKernelArguments& a);
void copy(const CpuKernelArguments& a);
void transpose_blocks(const CpuKernelArguments& a);
void take_columns(const CpuKernelArguments& a);
void put_columns(const CpuKernelArguments& a);
void take_rows(const CpuKernelArguments& a);
void take_rows_gradient(const CpuKernelArguments& a);
void put_rows(const CpuKernelArguments& a);
void put_rows_gradient(const CpuKernelArguments& a);
void append_rows(const CpuKernelArguments& a);
void append_rows_gradient(const CpuKernelArguments& a);

// cross_entropy.cpp
void cross_entropy_max(const CpuKernelArguments& a);
void cross_entropy_sums(const CpuKernelArguments& a);
void cross_entropy_loss(const CpuKernelArguments& a);
void cross_entropy_gradient(const CpuKernelArguments& a);

// optimizer.cpp
void sum_squares(const CpuKernelArguments& a);
void adamw(const CpuKernelArguments& a);
void adamw_8bit(const CpuKernelArguments& a);
void sgd(const CpuKernelArguments& a);
void muon_momentum(const CpuKernelArguments& a);
void normalize_matrix(const CpuKernelArguments& a);
void newton_schulz_polynomial(const CpuKernelArguments& a);
void muon(const CpuKernelArguments& a);
void update_loss_scale(const CpuKernelArguments& a);

// ordered_reduction.cpp, for the communicators
void sum_in_order(float* out, const float* const* inputs, int count, std::int64_t elements);
void max_in_order(float* out, const float* const* inputs, int count, std::int64_t elements);

// Elements of a flat op: rows of `columns`, or just `rows` where `columns` is 0.
inline std::int64_t elements(const OpShape& shape) { return shape.rows * (shape.columns > 0 ? shape.columns : 1); }

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
