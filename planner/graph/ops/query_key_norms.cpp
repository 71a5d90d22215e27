#include "planner/graph/ops/op_rows.h"

#include "planner/graph/cuda_workspace.h"
#include "planner/graph/ops/fused_qkv.h"
#include "planner/graph/ops/row_parts.h"

namespace parplan {
namespace {

using enum OperandSource;
using enum Access;
using enum OperandContent;

// Operands ----------------------------------------------------------------------------------------

// Statistics of a head, or of all of a row's heads.
constexpr OperandSize per_head{[](const OpShape& s) { return s.sequence * s.batch * (s.heads + s.kv_heads); }, fp32};
constexpr OperandSize two_sums{[](const OpShape& s) { return 2 * s.sequence * s.batch; }, fp32};
constexpr OperandSize query_row{[](const OpShape& s) { return s.heads * s.head_dim; }};
constexpr OperandSize key_row{[](const OpShape& s) { return s.kv_heads * s.head_dim; }};
// Gammas of head_norm.
std::int64_t query_gammas(const OpShape& s) {
  return s.centered ? s.heads * s.head_dim : s.head_dim;
}
std::int64_t key_gammas(const OpShape& s) {
  return s.centered ? s.kv_heads * s.head_dim : s.head_dim;
}
constexpr OperandSize of_query_heads{query_gammas};
constexpr OperandSize of_key_heads{key_gammas};

constexpr OperandRow head_norm_operands[] = {{input, 0, read, fused},
                                             {parameter, 0, read, of_query_heads},
                                             {parameter, 1, read, of_key_heads},
                                             {output, 0, write, fused},
                                             {output, 1, write, per_head}};
constexpr OperandRow query_key_squares_operands[] = {{input, 0, read, fused}, {output, 0, write, two_sums}};
constexpr OperandRow query_key_norm_operands[] = {{input, 0, read, fused},
                                                  {input, 1, read, two_sums},
                                                  {parameter, 0, read, query_row},
                                                  {parameter, 1, read, key_row},
                                                  {output, 0, write, fused}};

constexpr OperandRow head_norm_gradient_operands[] = {
    {output_gradient, 0, read, fused},  {input, 0, read, fused},          {parameter, 0, read, of_query_heads},
    {parameter, 1, read, of_key_heads}, {output, 1, read, per_head},      {input_gradient, 0, write, fused},
    of_first(in_fp32(of_query_heads)),  of_second(in_fp32(of_key_heads)), {workspace, 0, update}};
constexpr OperandRow query_key_squares_gradient_operands[] = {
    {output_gradient, 0, read, two_sums}, {input, 0, read, fused}, {input_gradient, 0, write, fused}};
constexpr OperandRow query_key_norm_gradient_operands[] = {
    {output_gradient, 0, read, fused},    {input, 0, read, fused},
    {input, 1, read, two_sums},           {parameter, 0, read, query_row},
    {parameter, 1, read, key_row},        {input_gradient, 0, write, fused},
    {input_gradient, 1, write, two_sums}, of_first(in_fp32(query_row)),
    of_second(in_fp32(key_row)),          {workspace, 0, update}};

constexpr OpKind head_norm_gradients[] = {OpKind::head_norm_gradient};
constexpr OpKind query_key_squares_gradients[] = {OpKind::query_key_squares_gradient};
constexpr OpKind query_key_norm_gradients[] = {OpKind::query_key_norm_gradient};

// Local shapes and widths -------------------------------------------------------------------------

void localize_query_key_norm(const LocalOp& local, OpShape& shape) {
  localize_heads(local, shape);
  shape.all_heads = local.op.attributes.heads;
}

std::vector<OperandWidth> head_norm_widths(const OpShape& s) {
  return {{input, 0, fused_width(s)},
          {output, 0, fused_width(s)},
          {output, 1, s.heads + s.kv_heads},
          {parameter, 0, query_gammas(s)},
          {parameter, 1, key_gammas(s)}};
}
std::vector<OperandWidth> query_key_squares_widths(const OpShape& s) {
  return {{input, 0, fused_width(s)}, {output, 0, 2}};
}
std::vector<OperandWidth> query_key_norm_widths(const OpShape& s) {
  return {{input, 0, fused_width(s)},
          {output, 0, fused_width(s)},
          {input, 1, 2},
          {parameter, 0, s.heads * s.head_dim},
          {parameter, 1, s.kv_heads * s.head_dim}};
}

// Work --------------------------------------------------------------------------------------------

std::int64_t query_key_elements(const OpShape& s) {
  return s.sequence * s.batch * (s.heads + s.kv_heads) * s.head_dim;
}
std::int64_t query_key_width(const OpShape& s) {
  return (s.heads + s.kv_heads) * s.head_dim;
}
std::int64_t trained_width(const OpShape& s) {
  return ((s.freezes_first ? 0 : s.heads) + (s.freezes_second ? 0 : s.kv_heads)) * s.head_dim;
}

// As rms_norm, or layer_norm without a beta, for queries and keys. Values are copied; there is one
// statistic per head, or two sums per row. The mean is computed again in the gradient.
OpWork head_norm_work(const OpShape& s, DataType type) {
  return {flops((s.centered ? 7 : 4) * query_key_elements(s)),
          Bytes((2 * fused_elements(s) + query_gammas(s) + key_gammas(s)) * e(type) +
                4 * s.sequence * s.batch * (s.heads + s.kv_heads))};
}
OpWork head_norm_gradient_work(const OpShape& s, DataType type) {
  const std::int64_t trained = (s.freezes_first ? 0 : query_gammas(s)) + (s.freezes_second ? 0 : key_gammas(s));
  return {flops((s.centered ? 13 : 9) * query_key_elements(s)),
          Bytes((3 * fused_elements(s) + query_gammas(s) + key_gammas(s)) * e(type) +
                4 * s.sequence * s.batch * (s.heads + s.kv_heads) + 8 * trained)};
}
OpWork query_key_squares_work(const OpShape& s, DataType type) {
  return {flops(2 * query_key_elements(s)), Bytes(query_key_elements(s) * e(type) + 8 * s.sequence * s.batch)};
}
// Twice the sum's gradient times the element, added.
OpWork query_key_squares_gradient_work(const OpShape& s, DataType type) {
  return {flops((s.accumulate ? 2 : 1) * query_key_elements(s)),
          Bytes((s.accumulate ? 3 * query_key_elements(s) : query_key_elements(s) + fused_elements(s)) * e(type) +
                8 * s.sequence * s.batch)};
}
OpWork query_key_norm_work(const OpShape& s, DataType type) {
  return {flops(2 * query_key_elements(s)),
          Bytes((2 * fused_elements(s) + query_key_width(s)) * e(type) + 8 * s.sequence * s.batch)};
}
OpWork query_key_norm_gradient_work(const OpShape& s, DataType type) {  // dy gamma rstd 2, dgamma 2, the sum's 2
  return {flops(6 * query_key_elements(s)), Bytes((3 * fused_elements(s) + query_key_width(s)) * e(type) +
                                                  16 * s.sequence * s.batch + 8 * trained_width(s))};
}

// Workspaces on CUDA ------------------------------------------------------------------------------

Bytes head_norm_gradient_cuda_workspace(const OpShape& s) {
  return column_sums_workspace(s.sequence * s.batch, query_gammas(s) + key_gammas(s), 1);
}
Bytes query_key_norm_gradient_cuda_workspace(const OpShape& s) {
  return column_sums_workspace(s.sequence * s.batch, query_key_width(s), 1);
}

// Rows --------------------------------------------------------------------------------------------

constexpr OpRow rows[] = {
    {.kind = OpKind::head_norm,
     .name = "head_norm",
     .sharding = ShardingRule::heads,
     .localize = localize_heads,
     .widths = head_norm_widths,
     .operands = head_norm_operands,
     .gradients = head_norm_gradients,
     .module = OpModule::norm,
     .work = head_norm_work,
     .made_of = OpKind::rms_norm,
     .measured_sizes = head_sizes},
    {.kind = OpKind::query_key_squares,
     .name = "query_key_squares",
     .sharding = ShardingRule::head_sums,
     .localize = localize_heads,
     .widths = query_key_squares_widths,
     .operands = query_key_squares_operands,
     .gradients = query_key_squares_gradients,
     .work = query_key_squares_work,
     .made_of = OpKind::rms_norm,
     .measured_sizes = head_sizes},
    {.kind = OpKind::query_key_norm,
     .name = "query_key_norm",
     .sharding = ShardingRule::heads,
     .localize = localize_query_key_norm,
     .widths = query_key_norm_widths,
     .operands = query_key_norm_operands,
     .gradients = query_key_norm_gradients,
     .module = OpModule::norm,
     .work = query_key_norm_work,
     .made_of = OpKind::rms_norm,
     .measured_sizes = head_sizes},
    {.kind = OpKind::head_norm_gradient,
     .name = "head_norm_gradient",
     .operands = head_norm_gradient_operands,
     .in_place = InPlace{.read = 0, .write = 5},
     .work = head_norm_gradient_work,
     .made_of = OpKind::rms_norm_gradient,
     .measured_sizes = head_sizes,
     .cuda_workspace = head_norm_gradient_cuda_workspace},
    {.kind = OpKind::query_key_squares_gradient,
     .name = "query_key_squares_gradient",
     .operands = query_key_squares_gradient_operands,
     .accumulates = true,
     .work = query_key_squares_gradient_work,
     .made_of = OpKind::accumulate,
     .measured_sizes = head_sizes},
    {.kind = OpKind::query_key_norm_gradient,
     .name = "query_key_norm_gradient",
     .operands = query_key_norm_gradient_operands,
     .in_place = InPlace{.read = 0, .write = 5},
     .work = query_key_norm_gradient_work,
     .made_of = OpKind::rms_norm_gradient,
     .measured_sizes = head_sizes,
     .cuda_workspace = query_key_norm_gradient_cuda_workspace},
};

}  // namespace

std::span<const OpRow> query_key_norm_rows() {
  return rows;
}

}  // namespace parplan
