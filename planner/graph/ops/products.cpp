#include "planner/graph/ops/op_rows.h"

#include <algorithm>

#include "planner/graph/cpu_workspace.h"
#include "planner/graph/cuda_workspace.h"
#include "planner/graph/ops/row_parts.h"

namespace parplan {
namespace {

using enum OperandSource;
using enum Access;

// Operands ----------------------------------------------------------------------------------------

// The input, and the weight.
constexpr OperandSize inner_matrix{[](const OpShape& s) { return s.rows * s.inner; }};
constexpr OperandSize weights{[](const OpShape& s) { return s.columns * s.inner; }};

constexpr OperandRow linear_operands[] = {{input, 0, read, inner_matrix},
                                          {parameter, 0, read, weights},
                                          {parameter, 1, read, per_column, if_bias},
                                          {output, 0, write, matrix},
                                          {workspace, 0, update}};
// The two outputs may share storage: then nobody needs `before`, and y alone is written.
constexpr OperandRow linear_gelu_operands[] = {{input, 0, read, inner_matrix},
                                               {parameter, 0, read, weights},
                                               {parameter, 1, read, per_column, if_bias},
                                               {output, 0, write, matrix},
                                               {output, 1, write, matrix},
                                               {workspace, 0, update}};

constexpr OperandRow linear_input_gradient_operands[] = {{output_gradient, 0, read, matrix},
                                                         {parameter, 0, read, weights},
                                                         {input_gradient, 0, write, inner_matrix},
                                                         {workspace, 0, update}};
constexpr OperandRow linear_input_gradient_gelu_operands[] = {{output_gradient, 0, read, matrix},
                                                              {parameter, 0, read, weights},
                                                              {input, 0, read, inner_matrix},
                                                              {input_gradient, 0, write, inner_matrix},
                                                              {workspace, 0, update}};
constexpr OperandRow linear_weight_gradient_operands[] = {{output_gradient, 0, read, matrix},
                                                          {input, 0, read, inner_matrix},
                                                          {parameter_gradient, 0, update, in_fp32(weights)},
                                                          {parameter_gradient, 1, update, in_fp32(per_column), if_bias},
                                                          {workspace, 0, update}};

// The input gradient comes first: its all-reduce over the tensor axis and the blocks before wait
// for it, while nothing waits for the weight's.
constexpr OpKind linear_gradients[] = {OpKind::linear_input_gradient, OpKind::linear_weight_gradient};

// Local shapes ------------------------------------------------------------------------------------

void localize_linear(const LocalOp& local, OpShape& shape) {
  const LocalParameter& weight = local.parameters[0];
  shape.columns = weight.rows.size;
  shape.inner = weight.columns.size;
  shape.bias = local.op.parameters.size() > 1;
  // The attribute is of a group of heads, whose end ranks that share it all hold.
  const LocalDim& rows = weight.rows;
  shape.key_columns = local.op.attributes.key_columns * std::max<std::int64_t>(rows.size / rows.granule, 1);
}

// Factors in fp8 ----------------------------------------------------------------------------------

// Each of their two factors where every product casts its own. Where a tensor is cast once, an op
// before does it for the input (OpKind::quantize), and the input's gradient for the output's, where
// it may transpose the weight.
std::int64_t weight_casts(const OpShape& s) {
  return s.fp8 == Fp8Casts::each_product ? s.columns * s.inner : std::int64_t{0};
}
CastElements linear_casts(const OpShape& s) {
  if (casts_once(s.fp8)) return {};
  return {.left = s.rows * s.inner, .right = weight_casts(s)};
}
CastElements linear_input_gradient_casts(const OpShape& s) {
  const std::int64_t transposed = s.fp8 == Fp8Casts::once_transposed ? s.columns * s.inner : 0;
  return {.left = s.rows * s.columns, .right = weight_casts(s) + transposed};
}
CastElements linear_weight_gradient_casts(const OpShape& s) {
  if (casts_once(s.fp8)) return {};
  return {.left = s.rows * s.columns, .right = s.rows * s.inner};
}

// Products ----------------------------------------------------------------------------------------
// `linear` has m = rows, n = columns, k = inner; its gradients have the same three sizes in another
// order.

struct ProductSizes {
  std::int64_t rows, columns, inner;
};
ProductSizes product_sizes_of(const OpShape& s) {
  return {std::max<std::int64_t>(s.rows, 1), std::max<std::int64_t>(s.columns, 1), std::max<std::int64_t>(s.inner, 1)};
}
Product linear_product(const OpShape& s, DataType type) {
  const auto [r, c, k] = product_sizes_of(s);
  return {.m = r, .n = c, .k = k, .result = Bytes(r * c * size_of(type))};
}
Product linear_gelu_product(const OpShape& s, DataType type) {
  const auto [r, c, k] = product_sizes_of(s);
  return {.m = r, .n = c, .k = k, .result = Bytes(2 * r * c * size_of(type))};
}
Product linear_input_gradient_product(const OpShape& s, DataType type) {
  const auto [r, c, k] = product_sizes_of(s);
  return {.m = r, .n = k, .k = c, .result = Bytes((s.accumulate ? 2 : 1) * r * k * size_of(type))};
}
Product linear_input_gradient_gelu_product(const OpShape& s, DataType type) {
  const auto [r, c, k] = product_sizes_of(s);
  return {.m = r, .n = k, .k = c, .result = Bytes(2 * r * k * size_of(type))};
}
// Bytes that move for each weight: its gradient is written, and the sum before it read where it is
// added.
std::int64_t weight_gradient_bytes(const OpShape& s, DataType type) {
  return s.in_half ? (s.accumulate ? 2 : 1) * size_of(type) : 8;
}
// The sum before is read while a tile is computed: so the 40 products into sums in fp32 that
// SimuMax measured on an A100 take (4dcaae513b configs/system/a100_pcie.json; mean error 1.2 %,
// where reading behind the arithmetic would make 5.8).
Product linear_weight_gradient_product(const OpShape& s, DataType type) {
  const auto [r, c, k] = product_sizes_of(s);
  return {.m = c, .n = k, .k = r, .result = Bytes((s.in_half ? size_of(type) : 4) * c * k)};
}

ModelProducts linear_model_products(const OpShape& s) {
  return {static_cast<double>(s.rows), static_cast<double>(s.columns) * static_cast<double>(s.inner)};
}

// Work --------------------------------------------------------------------------------------------

// Products of sizes are computed in floating point: those of a whole model exceed 63 bits sooner
// than expected.
Flops product(double factor, std::int64_t a, std::int64_t b, std::int64_t c) {
  return Flops(factor * static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c));
}

// Bytes of a number of a factor, as the product reads it.
std::int64_t factor(const OpShape& s, DataType type) {
  return multiplies_in_fp8(s) ? 1 : e(type);
}

OpWork linear_work(const OpShape& s, DataType type) {
  return {product(2, s.rows, s.columns, s.inner) + flops(s.bias ? s.rows * s.columns : 0),
          Bytes((s.rows + s.columns) * s.inner * factor(s, type) +
                (s.rows * s.columns + (s.bias ? s.columns : 0)) * e(type)),
          true};
}
OpWork linear_gelu_work(const OpShape& s, DataType type) {
  const OpWork linear = linear_work(s, type);
  return {linear.flops + flops(9 * s.rows * s.columns), linear.bytes + Bytes(s.rows * s.columns * e(type)), true};
}
OpWork linear_input_gradient_work(const OpShape& s, DataType type) {
  return {product(2, s.rows, s.columns, s.inner),
          Bytes((s.rows * s.columns + s.columns * s.inner) * factor(s, type) +
                input_gradient_passes(s) * s.rows * s.inner * e(type)),
          true};
}
// `columns` and `inner` are linear's: dbefore has `inner` columns.
OpWork linear_input_gradient_gelu_work(const OpShape& s, DataType type) {
  const OpWork linear = linear_input_gradient_work(s, type);
  return {linear.flops + flops(17 * s.rows * s.inner), linear.bytes + Bytes(s.rows * s.inner * e(type)), true};
}
OpWork linear_weight_gradient_work(const OpShape& s, DataType type) {
  return {product(2, s.rows, s.columns, s.inner) + flops(s.bias ? s.rows * s.columns : 0),
          Bytes((s.rows * s.columns + s.rows * s.inner) * factor(s, type) +
                weight_gradient_bytes(s, type) * (s.columns * s.inner + (s.bias ? s.columns : 0))),
          true};
}
// Queries, keys and values may be three products.
int products_of(const OpShape& s) { return s.key_columns > 0 ? 3 : 1; }
// The gradients that the three leave of their input are summed by two kernels, or in the norm's,
// which then reads two more.
int linear_input_gradient_launches(const OpShape& s) {
  return products_of(s) + (s.key_columns > 0 && s.stepwise ? 2 : 0);
}
Bytes summed_inputs(const OpShape& s, DataType type) {
  return Bytes(s.key_columns == 0 ? 0 : (s.stepwise ? 2 * 3 : 2) * s.rows * s.inner * e(type));
}
// The sum of rows that is the bias's gradient, where a kernel of its own reads them.
int linear_weight_gradient_launches(const OpShape& s) { return products_of(s) + (s.apart && s.bias ? 1 : 0); }
Bytes bias_summed_apart(const OpShape& s, DataType type) {
  return Bytes(s.apart && s.bias ? s.rows * s.columns * e(type) : 0);
}

// Workspaces on CPU (cpu_workspace.h) -------------------------------------------------------------

Bytes linear_cpu_workspace(const OpShape& s) {
  return linear_workspace(s.rows, s.columns, s.inner);
}
Bytes linear_input_gradient_cpu_workspace(const OpShape& s) {
  return linear_input_gradient_workspace(s.rows, s.columns, s.inner);
}
Bytes linear_weight_gradient_cpu_workspace(const OpShape& s) {
  return linear_weight_gradient_workspace(s.rows, s.columns, s.inner);
}

// Workspaces on CUDA (cuda_workspace.h) -----------------------------------------------------------

// cuBLASLt's, and behind it the factors in fp8.
Bytes matrix_cuda_workspace(const OpShape& s, const CastElements& casts) {
  return Bytes(matrix_workspace_bytes) + (multiplies_in_fp8(s) ? fp8_workspace(casts.left, casts.right) : Bytes(0));
}
Bytes linear_cuda_workspace(const OpShape& s) {
  return matrix_cuda_workspace(s, linear_casts(s));
}
Bytes linear_input_gradient_cuda_workspace(const OpShape& s) {
  return matrix_cuda_workspace(s, linear_input_gradient_casts(s));
}
// The sums of the bias come first and are finished before the product; with many columns they need
// more than the product does.
Bytes linear_weight_gradient_cuda_workspace(const OpShape& s) {
  const std::int64_t depth = ceil_div(s.rows, fp8_multiple) * fp8_multiple;
  return std::max(matrix_cuda_workspace(s, {.left = depth * s.columns, .right = depth * s.inner}),
                  s.bias ? column_sums_workspace(s.rows, s.columns, 1) : Bytes(0));
}

// Rows --------------------------------------------------------------------------------------------

constexpr OpRow rows[] = {
    {.kind = OpKind::linear,
     .name = "linear",
     .sharding = ShardingRule::contraction,
     .localize = localize_linear,
     .operands = linear_operands,
     .gradients = linear_gradients,
     .work = linear_work,
     .launches = products_of,
     .cost = CostClass::product,
     .product = linear_product,
     .casts = linear_casts,
     .model_products = linear_model_products,
     .measured_over = MeasuredOver::products,
     .measured_sizes = product_sizes,
     .cpu_workspace = linear_cpu_workspace,
     .cuda_workspace = linear_cuda_workspace},
    {.kind = OpKind::linear_gelu,
     .name = "linear_gelu",
     .operands = linear_gelu_operands,
     .work = linear_gelu_work,
     .cost = CostClass::product,
     .product = linear_gelu_product,
     .casts = linear_casts,
     .made_of = OpKind::linear,
     .measured_over = MeasuredOver::products,
     .measured_sizes = product_sizes,
     .cpu_workspace = linear_cpu_workspace,
     .cuda_workspace = linear_cuda_workspace},
    {.kind = OpKind::linear_input_gradient,
     .name = "linear_input_gradient",
     .operands = linear_input_gradient_operands,
     .accumulates = true,
     .work = linear_input_gradient_work,
     .launches = linear_input_gradient_launches,
     .cost = CostClass::product,
     .product = linear_input_gradient_product,
     .casts = linear_input_gradient_casts,
     .beside = summed_inputs,
     .measured_over = MeasuredOver::products,
     .measured_sizes = product_sizes,
     .cpu_workspace = linear_input_gradient_cpu_workspace,
     .cuda_workspace = linear_input_gradient_cuda_workspace},
    {.kind = OpKind::linear_input_gradient_gelu,
     .name = "linear_input_gradient_gelu",
     .operands = linear_input_gradient_gelu_operands,
     .work = linear_input_gradient_gelu_work,
     .cost = CostClass::product,
     .product = linear_input_gradient_gelu_product,
     .casts = linear_input_gradient_casts,
     .made_of = OpKind::linear_input_gradient,
     .measured_over = MeasuredOver::products,
     .measured_sizes = product_sizes,
     .cpu_workspace = linear_input_gradient_cpu_workspace,
     .cuda_workspace = linear_input_gradient_cuda_workspace},
    {.kind = OpKind::linear_weight_gradient,
     .name = "linear_weight_gradient",
     .operands = linear_weight_gradient_operands,
     .of_weights = true,
     .of_bias_alone = OpKind::bias_gradient,
     .work = linear_weight_gradient_work,
     .launches = linear_weight_gradient_launches,
     .cost = CostClass::product,
     .product = linear_weight_gradient_product,
     .casts = linear_weight_gradient_casts,
     .beside = bias_summed_apart,
     .measured_over = MeasuredOver::products,
     .measured_sizes = product_sizes,
     .cpu_workspace = linear_weight_gradient_cpu_workspace,
     .cuda_workspace = linear_weight_gradient_cuda_workspace},
};

}  // namespace

std::span<const OpRow> product_rows() {
  return rows;
}

}  // namespace parplan
