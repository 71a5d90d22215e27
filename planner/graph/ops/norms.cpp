#include "planner/graph/ops/op_rows.h"

#include "planner/graph/cuda_workspace.h"
#include "planner/graph/ops/row_parts.h"

namespace parplan {
namespace {

using enum OperandSource;
using enum Access;

// Operands ----------------------------------------------------------------------------------------

constexpr OperandRow layer_norm_operands[] = {{input, 0, read, matrix},    {parameter, 0, read, per_column},
                                              beta_of(1, per_column),      {output, 0, write, matrix},
                                              {output, 1, write, per_row}, {output, 2, write, per_row}};
// In steps it keeps its result before it is scaled, and its input in fp32, for the gradient, which
// reads no input in half precision.
constexpr OperandRow rms_norm_operands[] = {{input, 0, read, matrix},
                                            {parameter, 0, read, per_column},
                                            {output, 0, write, matrix},
                                            {output, 1, write, per_row},
                                            {output, 2, write, matrix, if_composed},
                                            {output, 3, write, in_fp32(matrix), if_widened}};
constexpr OperandRow add_layer_norm_operands[] = {{input, 0, read, matrix},
                                                  {input, 1, read, matrix, if_second},
                                                  {parameter, 0, read, per_column, if_bias},
                                                  {parameter, 1, read, per_column},
                                                  beta_of(2, per_column),
                                                  {output, 0, write, matrix},
                                                  {output, 1, write, matrix},
                                                  {output, 2, write, per_row},
                                                  {output, 3, write, per_row}};
constexpr OperandRow add_rms_norm_operands[] = {
    {input, 0, read, matrix},         {input, 1, read, matrix, if_second}, {parameter, 0, read, per_column, if_bias},
    {parameter, 1, read, per_column}, {output, 0, write, matrix},          {output, 1, write, matrix},
    {output, 2, write, per_row}};

constexpr OperandRow layer_norm_gradient_operands[] = {
    {output_gradient, 0, read, matrix}, {input, 0, read, matrix},       {parameter, 0, read, per_column},
    {output, 1, read, per_row},         {output, 2, read, per_row},     {input_gradient, 0, write, matrix},
    of_first(in_fp32(per_column)),      of_second(in_fp32(per_column)), {workspace, 0, update}};
constexpr OperandRow rms_norm_gradient_operands[] = {{output_gradient, 0, read, matrix},
                                                     {input, 0, read, matrix, nullptr, if_widened},
                                                     {parameter, 0, read, per_column},
                                                     {output, 1, read, per_row},
                                                     {output, 2, read, matrix, if_composed},
                                                     {output, 3, read, in_fp32(matrix), if_widened},
                                                     {input_gradient, 0, write, matrix},
                                                     of_first(in_fp32(per_column)),
                                                     {workspace, 0, update}};

constexpr OpKind layer_norm_gradients[] = {OpKind::layer_norm_gradient};
constexpr OpKind rms_norm_gradients[] = {OpKind::rms_norm_gradient};

// Local shapes ------------------------------------------------------------------------------------

void localize_layer_norm(const LocalOp& local, OpShape& shape) {
  localize_elementwise(local, shape);
  shape.without_beta = local.op.parameters.size() < 2;
}

// Work --------------------------------------------------------------------------------------------

// Mean 1, variance 3, normalise 2, scale and shift 2.
OpWork layer_norm_work(const OpShape& s, DataType type) {
  const std::int64_t parameters = s.without_beta ? 1 : 2;
  return {flops((6 + parameters) * s.rows * s.columns),
          Bytes((2 * s.rows + parameters) * s.columns * e(type) + 8 * s.rows)};
}
// Bytes of each element where each step is a kernel (torchtitan@9dec370 torchtitan/models/norms.py,
// RMSNorm: x.float(), pow, mean, add, rsqrt, a product, type_as, a product), and of the steps that
// PyTorch's autograd makes of them (counted by a TorchDispatchMode, without those of a row each).
std::int64_t composed_bytes(DataType type) { return (is_half(type) ? 2 * (e(type) + 4) : 0) + 20 + 2 * e(type); }
std::int64_t composed_gradient_bytes(DataType type) {
  return (is_half(type) ? 2 * (e(type) + 4) : 0) + 68 + 6 * e(type);
}
OpWork rms_norm_work(const OpShape& s, DataType type) {  // mean square 2, normalise 1, scale 1
  if (s.composed) return {flops(4 * s.rows * s.columns), Bytes(composed_bytes(type) * s.rows * s.columns)};
  return {flops(4 * s.rows * s.columns), Bytes((2 * s.rows + 1) * s.columns * e(type) + 4 * s.rows)};
}
int rms_norm_launches(const OpShape& s) { return s.composed ? 8 : 1; }
// Kernels of their own: one reads both again for the gradients of parameters (apex's
// cuComputePartGradGammaBeta, PyTorch's GammaBetaBackward), one reads both gradients to add them.
bool adds_apart(const OpShape& s) { return s.stepwise && s.accumulate; }
std::int64_t gradient_passes(const OpShape& s, std::int64_t trained) {
  return 2 + input_gradient_passes(s) + (s.apart && trained > 0 ? 2 : 0) + (adds_apart(s) ? 2 : 0);
}
int launches_apart(const OpShape& s, std::int64_t trained) {
  return 1 + (s.apart && trained > 0 ? 1 : 0) + (adds_apart(s) ? 1 : 0);
}
int layer_norm_gradient_launches(const OpShape& s) { return launches_apart(s, trained_of_two(s)); }
int rms_norm_gradient_launches(const OpShape& s) {
  return s.composed ? 16 + (adds_apart(s) ? 1 : 0) : launches_apart(s, trained_of_one(s));
}
// Normalise again 2, dgamma 2, dbeta 1, dy gamma 1, its two sums 3, dx 4, and 1 to add to the
// present value.
OpWork layer_norm_gradient_work(const OpShape& s, DataType type) {
  return {flops((s.accumulate ? 14 : 13) * s.rows * s.columns),
          Bytes((gradient_passes(s, trained_of_two(s)) * s.rows + 1) * s.columns * e(type) + 8 * s.rows +
                8 * trained_of_two(s) * s.columns)};
}
OpWork rms_norm_gradient_work(const OpShape& s, DataType type) {
  if (s.composed)
    return {flops((s.accumulate ? 10 : 9) * s.rows * s.columns),
            Bytes((composed_gradient_bytes(type) + (adds_apart(s) ? 3 : s.accumulate ? 1 : 0) * e(type)) * s.rows *
                  s.columns)};
  return {flops((s.accumulate ? 10 : 9) * s.rows * s.columns),
          Bytes((gradient_passes(s, trained_of_one(s)) * s.rows + 1) * s.columns * e(type) + 4 * s.rows +
                8 * trained_of_one(s) * s.columns)};
}

// Two kernels in one: what the first writes is not read again.
OpWork add_layer_norm_work(const OpShape& s, DataType type) {
  const OpWork add = row_of(OpKind::add).work(s, type);
  const OpWork norm = layer_norm_work(s, type);
  return {add.flops + norm.flops, add.bytes + norm.bytes - Bytes(s.rows * s.columns * e(type))};
}
OpWork add_rms_norm_work(const OpShape& s, DataType type) {
  const OpWork add = row_of(OpKind::add).work(s, type);
  const OpWork norm = rms_norm_work(s, type);
  return {add.flops + norm.flops, add.bytes + norm.bytes - Bytes(s.rows * s.columns * e(type))};
}

// Workspaces on CUDA ------------------------------------------------------------------------------

Bytes layer_norm_gradient_cuda_workspace(const OpShape& s) {
  return column_sums_workspace(s.rows, s.columns, 2);
}
Bytes rms_norm_gradient_cuda_workspace(const OpShape& s) {
  return column_sums_workspace(s.rows, s.columns, 1);
}

// Rows --------------------------------------------------------------------------------------------

constexpr OpRow rows[] = {
    {.kind = OpKind::layer_norm,
     .name = "layer_norm",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_layer_norm,
     .operands = layer_norm_operands,
     .gradients = layer_norm_gradients,
     .module = OpModule::norm,
     .work = layer_norm_work,
     .measured_over = MeasuredOver::elementwise},
    {.kind = OpKind::rms_norm,
     .name = "rms_norm",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .operands = rms_norm_operands,
     .gradients = rms_norm_gradients,
     .module = OpModule::norm,
     .work = rms_norm_work,
     .launches = rms_norm_launches,
     .measured_over = MeasuredOver::elementwise},
    {.kind = OpKind::add_layer_norm,
     .name = "add_layer_norm",
     .operands = add_layer_norm_operands,
     .in_place = InPlace{.read = 1, .write = 5},
     .work = add_layer_norm_work,
     .made_of = OpKind::layer_norm,
     .measured_over = MeasuredOver::elementwise,
     .measured_with = with_second},
    {.kind = OpKind::add_rms_norm,
     .name = "add_rms_norm",
     .operands = add_rms_norm_operands,
     .in_place = InPlace{.read = 1, .write = 4},
     .work = add_rms_norm_work,
     .made_of = OpKind::rms_norm,
     .measured_over = MeasuredOver::elementwise,
     .measured_with = with_second},
    {.kind = OpKind::layer_norm_gradient,
     .name = "layer_norm_gradient",
     .operands = layer_norm_gradient_operands,
     .accumulates = true,
     .work = layer_norm_gradient_work,
     .launches = layer_norm_gradient_launches,
     .measured_over = MeasuredOver::elementwise,
     .cuda_workspace = layer_norm_gradient_cuda_workspace},
    {.kind = OpKind::rms_norm_gradient,
     .name = "rms_norm_gradient",
     .operands = rms_norm_gradient_operands,
     .accumulates = true,
     .work = rms_norm_gradient_work,
     .launches = rms_norm_gradient_launches,
     .measured_over = MeasuredOver::elementwise,
     .cuda_workspace = rms_norm_gradient_cuda_workspace},
};

}  // namespace

std::span<const OpRow> norm_rows() {
  return rows;
}

}  // namespace parplan
