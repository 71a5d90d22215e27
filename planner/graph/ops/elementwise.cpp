#include "planner/graph/ops/op_rows.h"

#include <fmt/format.h>

#include "planner/graph/cuda_workspace.h"
#include "planner/graph/ops/row_parts.h"

namespace parplan {
namespace {

using enum OperandSource;
using enum Access;

// Operands ----------------------------------------------------------------------------------------

constexpr OperandRow activation_operands[] = {{input, 0, read, matrix}, {output, 0, write, matrix}};
constexpr OperandRow gate_operands[] = {
    {input, 0, read, matrix}, {input, 1, read, matrix}, {output, 0, write, matrix}};
constexpr OperandRow scale_operands[] = {{input, 0, read, matrix}, {output, 0, write, matrix}};
constexpr OperandRow softcap_operands[] = {{input, 0, read, matrix}, {output, 0, write, matrix}};
constexpr OperandRow add_operands[] = {{input, 0, read, matrix},
                                       {input, 1, read, matrix, if_second},
                                       {parameter, 0, read, per_column, if_bias},
                                       {output, 0, write, matrix}};

constexpr OperandRow activation_gradient_operands[] = {
    {output_gradient, 0, read, matrix}, {input, 0, read, matrix}, {input_gradient, 0, write, matrix}};
constexpr OperandRow gate_gradient_operands[] = {{output_gradient, 0, read, matrix},
                                                 {input, 0, read, matrix},
                                                 {input, 1, read, matrix},
                                                 {input_gradient, 0, write, matrix},
                                                 {input_gradient, 1, write, matrix}};
constexpr OperandRow scale_gradient_operands[] = {{output_gradient, 0, read, matrix},
                                                  {input_gradient, 0, write, matrix}};
constexpr OperandRow softcap_gradient_operands[] = {
    {output_gradient, 0, read, matrix}, {output, 0, read, matrix}, {input_gradient, 0, write, matrix}};
constexpr OperandRow bias_gradient_operands[] = {{output_gradient, 0, read, matrix},
                                                 {parameter_gradient, 0, update, in_fp32(per_column), if_bias},
                                                 {workspace, 0, update}};

constexpr OpKind activation_gradients[] = {OpKind::activation_gradient};
constexpr OpKind gate_gradients[] = {OpKind::gate_gradient};
constexpr OpKind scale_gradients[] = {OpKind::scale_gradient};
constexpr OpKind softcap_gradients[] = {OpKind::softcap_gradient};
constexpr OpKind add_gradients[] = {OpKind::bias_gradient};

// Local shapes and faults -------------------------------------------------------------------------

void localize_add(const LocalOp& local, OpShape& shape) {
  shape.columns = local.output.size;
  shape.second = local.op.inputs.size() > 1;
  shape.bias = !local.op.parameters.empty();
}
std::string softcap_fault(const OpShape& s) {
  if (s.softcap > 0.0) return {};
  return fmt::format("its cap is {}; expected more than 0", s.softcap);
}

void with_bias(OpShape& shape, DataType) {
  shape.bias = true;
}
void with_silu(OpShape& shape, DataType) {
  shape.activation = ActivationKind::silu;
}

// Work --------------------------------------------------------------------------------------------

// Operations of an activation, and of its slope times the gradient.
std::int64_t value_operations(ActivationKind activation) {
  switch (activation) {
    case ActivationKind::gelu_tanh: return 9;
    case ActivationKind::gelu_erf: return 5;
    case ActivationKind::relu: return 1;
    case ActivationKind::silu: return 4;  // exp, add, divide, product
  }
  return 0;
}
std::int64_t slope_operations(ActivationKind activation) {
  switch (activation) {
    case ActivationKind::gelu_tanh: return 17;
    case ActivationKind::gelu_erf: return 11;
    case ActivationKind::relu: return 2;
    case ActivationKind::silu: return 8;  // sigmoid 3, g s (1 - s) + s 4, times dy
  }
  return 0;
}
// The passes over all elements, read or written, of 0.5 x (1 + tanh(k (x + 0.044715 x^3))) as eight
// kernels, of which a sum and a product read two tensors: 0.5 x, x^3, times 0.044715, plus x, times
// k, tanh, plus 1, product.
constexpr std::int64_t gelu_passes = 6 * 2 + 2 * 3;
int activation_launches(const OpShape& s) { return s.stepwise ? 6 + 2 : 1; }
// The same of its gradient by automatic differentiation: two factors of the product (3 each), slope
// of tanh (3), times k (2), times 0.044715 (2), slope of the cube in three kernels (2, 2, 3), times
// 0.5 (2), and two sums of what x gets (3 each).
constexpr std::int64_t gelu_gradient_passes = 2 * 3 + 3 + 2 + 2 + (2 + 2 + 3) + 2 + 2 * 3;
int activation_gradient_launches(const OpShape& s) { return s.stepwise ? 2 + 1 + 1 + 1 + 3 + 1 + 2 : 1; }
OpWork activation_work(const OpShape& s, DataType type) {
  return {flops(value_operations(s.activation) * s.rows * s.columns),
          Bytes((s.stepwise ? gelu_passes : 2) * s.rows * s.columns * e(type))};
}
OpWork activation_gradient_work(const OpShape& s, DataType type) {
  return {flops(slope_operations(s.activation) * s.rows * s.columns),
          Bytes((s.stepwise ? gelu_gradient_passes : 3) * s.rows * s.columns * e(type))};
}
// The activation times the other operand.
OpWork gate_work(const OpShape& s, DataType type) {
  return {flops((value_operations(s.activation) + 1) * s.rows * s.columns),
          Bytes(3 * s.rows * s.columns * e(type))};
}
// dy up slope; dy activation, whose parts are already computed: a product of two and one more.
OpWork gate_gradient_work(const OpShape& s, DataType type) {
  return {flops((slope_operations(s.activation) + 3) * s.rows * s.columns),
          Bytes(5 * s.rows * s.columns * e(type))};
}
OpWork scale_work(const OpShape& s, DataType type) {
  return {flops(s.rows * s.columns), Bytes(2 * s.rows * s.columns * e(type))};
}
OpWork softcap_work(const OpShape& s, DataType type) {  // divide, tanh, product
  return {flops(3 * s.rows * s.columns), Bytes(2 * s.rows * s.columns * e(type))};
}
OpWork softcap_gradient_work(const OpShape& s, DataType type) {  // dy (1 - (y / softcap)^2)
  return {flops(4 * s.rows * s.columns), Bytes(3 * s.rows * s.columns * e(type))};
}
OpWork add_work(const OpShape& s, DataType type) {
  const std::int64_t terms = (s.second ? 1 : 0) + (s.bias ? 1 : 0);
  return {flops(terms * s.rows * s.columns),
          Bytes((s.rows * s.columns * (s.second ? 3 : 2) + (s.bias ? s.columns : 0)) * e(type))};
}
OpWork bias_gradient_work(const OpShape& s, DataType type) {
  return {flops(s.rows * s.columns), Bytes(s.rows * s.columns * e(type) + 8 * s.columns)};
}

Bytes bias_gradient_cuda_workspace(const OpShape& s) {
  return column_sums_workspace(s.rows, s.columns, 1);
}

// Rows --------------------------------------------------------------------------------------------

constexpr OpRow rows[] = {
    {.kind = OpKind::activation,
     .name = "activation",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .operands = activation_operands,
     .gradients = activation_gradients,
     .module = OpModule::activation,
     .in_place = InPlace{.read = 0, .write = 1},
     .work = activation_work,
     .launches = activation_launches,
     .measured_over = MeasuredOver::elementwise},
    {.kind = OpKind::gate,
     .name = "gate",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .operands = gate_operands,
     .gradients = gate_gradients,
     .module = OpModule::activation,
     .in_place = InPlace{.read = 0, .write = 2},
     .work = gate_work,
     .measured_over = MeasuredOver::elementwise,
     .measured_with = with_silu},
    {.kind = OpKind::scale,
     .name = "scale",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .operands = scale_operands,
     .gradients = scale_gradients,
     .in_place = InPlace{.read = 0, .write = 1},
     .work = scale_work,
     .made_of = OpKind::copy},
    {.kind = OpKind::softcap,
     .name = "softcap",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .fault = softcap_fault,
     .operands = softcap_operands,
     .gradients = softcap_gradients,
     .in_place = InPlace{.read = 0, .write = 1},
     .work = softcap_work,
     .made_of = OpKind::activation},
    {.kind = OpKind::add,
     .name = "add",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_add,
     .operands = add_operands,
     .gradients = add_gradients,
     .passes_gradient = true,
     .in_place = InPlace{.read = 1, .write = 3},
     .work = add_work,
     .cost = CostClass::streaming,
     .measured_over = MeasuredOver::elementwise,
     .measured_with = with_second},
    {.kind = OpKind::activation_gradient,
     .name = "activation_gradient",
     .operands = activation_gradient_operands,
     .in_place = InPlace{.read = 0, .write = 2},
     .work = activation_gradient_work,
     .launches = activation_gradient_launches,
     .measured_over = MeasuredOver::elementwise},
    {.kind = OpKind::gate_gradient,
     .name = "gate_gradient",
     .operands = gate_gradient_operands,
     .in_place = InPlace{.read = 0, .write = 3},
     .work = gate_gradient_work,
     .measured_over = MeasuredOver::elementwise,
     .measured_with = with_silu},
    {.kind = OpKind::scale_gradient,
     .name = "scale_gradient",
     .operands = scale_gradient_operands,
     .in_place = InPlace{.read = 0, .write = 1},
     .work = scale_work,
     .made_of = OpKind::copy},
    {.kind = OpKind::softcap_gradient,
     .name = "softcap_gradient",
     .operands = softcap_gradient_operands,
     .in_place = InPlace{.read = 0, .write = 2},
     .work = softcap_gradient_work,
     .made_of = OpKind::activation_gradient},
    {.kind = OpKind::bias_gradient,
     .name = "bias_gradient",
     .operands = bias_gradient_operands,
     .work = bias_gradient_work,
     .measured_over = MeasuredOver::elementwise,
     .measured_with = with_bias,
     .cuda_workspace = bias_gradient_cuda_workspace},
};

}  // namespace

std::span<const OpRow> elementwise_rows() {
  return rows;
}

}  // namespace parplan
