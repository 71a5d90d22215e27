#include "planner/graph/ops/op_rows.h"

#include "planner/graph/cuda_workspace.h"
#include "planner/graph/dynamic_quantization.h"
#include "planner/graph/ops/row_parts.h"

namespace parplan {
namespace {

using enum OperandSource;
using enum Access;
using enum OperandContent;

// Operands ----------------------------------------------------------------------------------------

constexpr OperandSize second_moment{[](const OpShape& s) { return s.rows; }, non_negative};

constexpr OperandSize state_codes{flat.elements, codes};
constexpr OperandSize state_scales{[](const OpShape& s) { return quantization_blocks(s.rows); }, block_scales};

constexpr OperandRow sum_squares_operands[] = {
    {input, 0, read, in_fp32(flat)}, {output, 0, update, one}, {workspace, 0, update}};
constexpr OperandRow update_loss_scale_operands[] = {{input, 0, read, one}, {loss_scale, 0, update, scale_state}};
// gradient, parameter, m, v, (norm), (master), (loss scale)
constexpr OperandRow adamw_operands[] = {{input, 0, read, in_fp32(flat)},
                                         {parameter, 0, update, flat},
                                         {output, 0, update, in_fp32(flat)},
                                         {output, 1, update, second_moment},
                                         {input, 1, read, one, if_norm},
                                         {output, 2, update, in_fp32(flat), if_master},
                                         {loss_scale, 0, read, scale_state, if_scaled}};
// gradient, parameter, m, v, scales of m, scales of v, (norm), (master), (loss scale)
constexpr OperandRow adamw_8bit_operands[] = {{input, 0, read, in_fp32(flat)},
                                              {parameter, 0, update, flat},
                                              {output, 0, update, state_codes},
                                              {output, 1, update, state_codes},
                                              {output, 2, update, state_scales},
                                              {output, 3, update, state_scales},
                                              {input, 1, read, one, if_norm},
                                              {output, 4, update, in_fp32(flat), if_master},
                                              {loss_scale, 0, read, scale_state, if_scaled}};
// gradient, parameter, (momentum), (norm), (master), (loss scale)
constexpr OperandRow sgd_operands[] = {{input, 0, read, in_fp32(flat)},
                                       {parameter, 0, update, flat},
                                       {output, 0, update, in_fp32(flat), if_second},
                                       {input, 1, read, one, if_norm},
                                       {output, 1, update, in_fp32(flat), if_master},
                                       {loss_scale, 0, read, scale_state, if_scaled}};

// gradient, momentum, (norm), (loss scale)
constexpr OperandRow muon_momentum_operands[] = {{input, 0, update, in_fp32(flat)},
                                                 {output, 0, update, in_fp32(flat)},
                                                 {input, 1, read, one, if_norm},
                                                 {loss_scale, 0, read, scale_state, if_scaled}};
// x in fp32, its sum of squares, the result
constexpr OperandRow normalize_matrix_operands[] = {
    {input, 0, read, in_fp32(matrix)}, {input, 1, read, one}, {output, 0, write, matrix}};
constexpr OperandRow newton_schulz_polynomial_operands[] = {{input, 0, read, matrix}, {output, 0, update, matrix}};
// direction, parameter, (norm), (master), (loss scale)
constexpr OperandRow muon_operands[] = {{input, 0, read, flat},
                                        {parameter, 0, update, flat},
                                        {input, 1, read, one, if_norm},
                                        {output, 0, update, in_fp32(flat), if_master},
                                        {loss_scale, 0, read, scale_state, if_scaled}};

// Work --------------------------------------------------------------------------------------------

OpWork sum_squares_work(const OpShape& s, DataType) {
  return {flops(2 * s.rows), Bytes(4 * s.rows + 8)};
}
// A parameter is updated directly, or rewritten from the fp32 master copy, which is updated.
std::int64_t parameter_bytes(const OpShape& s, DataType type) {
  return s.master ? 8 + e(type) : 2 * e(type);
}
// m 3, v 4, two corrections, sqrt, epsilon, divide, step 2; decay 2.
// Step by step, kernels read and write as they go: m beta (2), plus gradient (3), v beta (2), plus
// gradient squared (4), square root (2), plus epsilon (2), parameter minus m by that (4); decay
// (2), gradient times the factor of its norm (2).
std::int64_t adamw_passes(const OpShape& s) { return 19 + (s.weight_decay ? 2 : 0) + (s.norm ? 2 : 0); }
int adamw_launches(const OpShape& s) { return s.stepwise ? 7 + (s.weight_decay ? 1 : 0) + (s.norm ? 1 : 0) : 1; }
OpWork adamw_work(const OpShape& s, DataType type) {
  if (s.stepwise) return {flops((s.weight_decay ? 16 : 14) * s.rows), Bytes(adamw_passes(s) * 4 * s.rows)};
  return {flops((s.weight_decay ? 16 : 14) * s.rows), Bytes((4 + 16 + parameter_bytes(s, type)) * s.rows)};
}
// Elements a second of adamw_8bit on one multiprocessor, whose compares and branches are its limit:
// 891 GB/s of 16 bytes in fp32, and 980 of 18 in bf16, on the 132 of an H200
// (configs/devices/h200-sxm-141gb.yaml, measured). CUDA's table of throughputs has as many compares
// a clock and multiprocessor from Volta to Hopper.
constexpr double quantized_of_multiprocessor = 4.17e8;
// What adamw does, and for each moment: its code's value times the scale 1, largest magnitude 2,
// times the inverse 1, in each of seven decades compare, step, smaller, choose 4, sign and
// conversion 3.
constexpr std::int64_t quantization_flops = 1 + 2 + 1 + 7 * 4 + 3;
OpWork adamw_8bit_work(const OpShape& s, DataType type) {
  return {flops(((s.weight_decay ? 16 : 14) + 2 * quantization_flops) * s.rows),
          Bytes((4 + 4 + parameter_bytes(s, type)) * s.rows + 16 * quantization_blocks(s.rows))};
}
OpWork sgd_work(const OpShape& s, DataType type) {  // `second`: with momentum
  return {flops((2 + (s.weight_decay ? 2 : 0) + (s.second ? 2 : 0)) * s.rows),
          Bytes((4 + (s.second ? 8 : 0) + parameter_bytes(s, type)) * s.rows)};
}
// Times the factor of its norm 1; momentum: difference, product, sum 3; for the direction as many.
OpWork muon_momentum_work(const OpShape& s, DataType) {
  return {flops(7 * s.rows), Bytes(16 * s.rows)};
}
OpWork normalize_matrix_work(const OpShape& s, DataType type) {
  return {flops(s.rows * s.columns), Bytes((4 + e(type)) * s.rows * s.columns + 4)};
}
// Two products and a sum; what the diagonal adds is not counted.
OpWork newton_schulz_polynomial_work(const OpShape& s, DataType type) {
  return {flops(3 * s.rows * s.columns), Bytes(3 * e(type) * s.rows * s.columns)};
}
OpWork muon_work(const OpShape& s, DataType type) {
  return {flops((s.weight_decay ? 3 : 2) * s.rows), Bytes((e(type) + parameter_bytes(s, type)) * s.rows)};
}
OpWork update_loss_scale_work(const OpShape&, DataType) {
  return {flops(4), Bytes(4 + 2 * static_cast<std::int64_t>(sizeof(LossScale)))};
}

void with_decay_and_master(OpShape& shape, DataType type) {
  shape.weight_decay = true;
  shape.master = is_half(type);
}

Bytes sum_squares_cuda_workspace(const OpShape&) {
  return Bytes(sum_squares_workspace_bytes);
}

// Rows --------------------------------------------------------------------------------------------

constexpr OpRow rows[] = {
    {.kind = OpKind::sum_squares,
     .name = "sum_squares",
     .operands = sum_squares_operands,
     .work = sum_squares_work,
     .listed = true,
     .measured_over = MeasuredOver::flat_fp32,
     .measured_sizes = flat_sizes,
     .cuda_workspace = sum_squares_cuda_workspace},
    {.kind = OpKind::adamw,
     .name = "adamw",
     .operands = adamw_operands,
     .work = adamw_work,
     .launches = adamw_launches,
     .listed = true,
     .measured_over = MeasuredOver::flat,
     .measured_sizes = flat_sizes,
     .measured_with = with_decay_and_master},
    {.kind = OpKind::adamw_8bit,
     .name = "adamw_8bit",
     .operands = adamw_8bit_operands,
     .work = adamw_8bit_work,
     .elements_of_multiprocessor = quantized_of_multiprocessor,
     .measured_over = MeasuredOver::flat,
     .measured_sizes = flat_sizes,
     .measured_with = with_decay_and_master},
    {.kind = OpKind::sgd,
     .name = "sgd",
     .operands = sgd_operands,
     .work = sgd_work,
     .listed = true,
     .measured_sizes = flat_sizes},
    {.kind = OpKind::muon_momentum,
     .name = "muon_momentum",
     .operands = muon_momentum_operands,
     .work = muon_momentum_work,
     .measured_sizes = flat_sizes},
    {.kind = OpKind::normalize_matrix,
     .name = "normalize_matrix",
     .operands = normalize_matrix_operands,
     .work = normalize_matrix_work},
    {.kind = OpKind::newton_schulz_polynomial,
     .name = "newton_schulz_polynomial",
     .operands = newton_schulz_polynomial_operands,
     .work = newton_schulz_polynomial_work},
    {.kind = OpKind::muon, .name = "muon", .operands = muon_operands, .work = muon_work, .measured_sizes = flat_sizes},
    {.kind = OpKind::update_loss_scale,
     .name = "update_loss_scale",
     .operands = update_loss_scale_operands,
     .work = update_loss_scale_work},
};

}  // namespace

std::span<const OpRow> optimizer_rows() {
  return rows;
}

}  // namespace parplan
