#include "runtime/device/cuda/kernel_table.h"

#include <array>

#include "planner/base/enum_index.h"
#include "runtime/device/cuda/kernels/kernels.h"
#include "runtime/device/cuda/linear.h"

namespace parplan {
namespace {

struct Row {
  OpKind kind;
  CudaKernel kernel;
};

constexpr Row rows[] = {
    {OpKind::embedding, embedding},
    {OpKind::normalize_pixels, normalize_pixels},
    {OpKind::add_position, add_position},
    {OpKind::layer_norm, layer_norm},
    {OpKind::rms_norm, rms_norm},
    {OpKind::head_norm, head_norm},
    {OpKind::query_key_squares, query_key_squares},
    {OpKind::query_key_norm, query_key_norm},
    {OpKind::linear, linear},
    {OpKind::rotary, rotary},
    {OpKind::attention, attention},
    {OpKind::packed_attention, packed_attention},
    {OpKind::activation, activation},
    {OpKind::gate, gate},
    {OpKind::scale, scale},
    {OpKind::softcap, softcap},
    {OpKind::add, add},
    {OpKind::take_rows, take_rows},
    {OpKind::put_rows, put_rows},
    {OpKind::append_rows, append_rows},
    {OpKind::cross_entropy_max, cross_entropy_max},
    {OpKind::cross_entropy_sums, cross_entropy_sums},
    {OpKind::cross_entropy_loss, cross_entropy_loss},
    {OpKind::add_layer_norm, add_layer_norm},
    {OpKind::add_rms_norm, add_rms_norm},
    {OpKind::linear_gelu, linear_gelu},
    {OpKind::embedding_gradient, embedding_gradient},
    {OpKind::add_position_gradient, add_position_gradient},
    {OpKind::layer_norm_gradient, layer_norm_gradient},
    {OpKind::rms_norm_gradient, rms_norm_gradient},
    {OpKind::head_norm_gradient, head_norm_gradient},
    {OpKind::query_key_squares_gradient, query_key_squares_gradient},
    {OpKind::query_key_norm_gradient, query_key_norm_gradient},
    {OpKind::linear_input_gradient, linear_input_gradient},
    {OpKind::linear_weight_gradient, linear_weight_gradient},
    {OpKind::rotary_gradient, rotary_gradient},
    {OpKind::attention_gradient, attention_gradient},
    {OpKind::packed_attention_gradient, packed_attention_gradient},
    {OpKind::activation_gradient, activation_gradient},
    {OpKind::gate_gradient, gate_gradient},
    {OpKind::scale_gradient, scale_gradient},
    {OpKind::softcap_gradient, softcap_gradient},
    {OpKind::bias_gradient, bias_gradient},
    {OpKind::take_rows_gradient, take_rows_gradient},
    {OpKind::put_rows_gradient, put_rows_gradient},
    {OpKind::append_rows_gradient, append_rows_gradient},
    {OpKind::cross_entropy_gradient, cross_entropy_gradient},
    {OpKind::linear_input_gradient_gelu, linear_input_gradient_gelu},
    {OpKind::accumulate, accumulate},
    {OpKind::fill_zero, fill_zero},
    {OpKind::copy, copy},
    {OpKind::transpose_blocks, transpose_blocks},
    {OpKind::take_columns, take_columns},
    {OpKind::put_columns, put_columns},
    {OpKind::sum_squares, sum_squares},
    {OpKind::adamw, adamw},
    {OpKind::adamw_8bit, adamw_8bit},
    {OpKind::sgd, sgd},
    {OpKind::muon_momentum, muon_momentum},
    {OpKind::normalize_matrix, normalize_matrix},
    {OpKind::newton_schulz_polynomial, newton_schulz_polynomial},
    {OpKind::muon, muon},
    {OpKind::update_loss_scale, update_loss_scale},
};

constexpr std::size_t kinds = static_cast<std::size_t>(OpKind::count_);

constexpr std::array<CudaKernel, kinds> make_table() {
  std::array<CudaKernel, kinds> table{};
  for (const Row& row : rows) table[index_of(row.kind)] = row.kernel;
  return table;
}

constexpr std::array<CudaKernel, kinds> table = make_table();

constexpr bool is_complete() {
  std::size_t present = 0;
  for (std::size_t kind = 0; kind < kinds; ++kind) {
    const bool is_loaders = OpKind(kind) == OpKind::load_tokens || OpKind(kind) == OpKind::load_targets;
    const bool is_absent = is_loaders || is_foreign(OpKind(kind));
    if ((table[kind] == nullptr) != is_absent) return false;
    present += is_absent ? 0 : 1;
  }
  return std::size(rows) == present;
}
static_assert(is_complete(), "one row for each op but the data loader's and other engines'");

}  // namespace

CudaKernel cuda_kernel(OpKind kind) { return table[index_of(kind)]; }

}  // namespace parplan
