#include "planner/graph/ops/op_rows.h"

#include <fmt/format.h>

#include "planner/base/units.h"
#include "planner/graph/cpu_workspace.h"
#include "planner/graph/cuda_workspace.h"
#include "planner/graph/ops/row_parts.h"

// Attention whose queries are a tensor of their own, [positions, batch, heads, head_dim], and whose
// keys and values are packed in another, [positions, batch, heads, 2, head_dim]: cross-attention,
// and that of models with relative position biases. The biases lie in rows of an activation,
// [rows, batch, inner], as elements bucket x all heads + head, the rest zeros (append_rows).
namespace parplan {
namespace {

using enum OperandSource;
using enum Access;

// Operands ----------------------------------------------------------------------------------------

std::int64_t query_elements(const OpShape& s) {
  return s.sequence * s.batch * s.heads * s.head_dim;
}
std::int64_t packed_elements(const OpShape& s) {
  return s.keys * s.batch * 2 * s.kv_heads * s.head_dim;
}
std::int64_t table_elements(const OpShape& s) {
  return s.second ? ceil_div(s.buckets * s.all_heads, s.inner) * s.batch * s.inner : 0;
}
constexpr OperandSize queries{query_elements};
constexpr OperandSize keys_and_values{packed_elements};
constexpr OperandSize biases{table_elements};
constexpr OperandSize per_query_head{[](const OpShape& s) { return s.sequence * s.batch * s.heads; },
                                     OperandContent::fp32};

constexpr OperandRow packed_attention_operands[] = {
    {input, 0, read, queries},   {input, 1, read, keys_and_values},  {input, 2, read, biases, if_second},
    {output, 0, write, queries}, {output, 1, write, per_query_head}, {workspace, 0, update}};
constexpr OperandRow packed_attention_gradient_operands[] = {{output_gradient, 0, read, queries},
                                                             {input, 0, read, queries},
                                                             {input, 1, read, keys_and_values},
                                                             {input, 2, read, biases, if_second},
                                                             {output, 0, read, queries},
                                                             {output, 1, read, per_query_head},
                                                             {input_gradient, 0, write, queries},
                                                             {input_gradient, 1, write, keys_and_values},
                                                             {input_gradient, 2, write, biases, if_second},
                                                             {workspace, 0, update}};
constexpr OpKind packed_attention_gradients[] = {OpKind::packed_attention_gradient};

// Local shapes, widths and faults -----------------------------------------------------------------

void localize_packed(const LocalOp& local, OpShape& shape) {
  const OpShape& of = local.op.attributes;
  shape.columns = local.output.size;
  shape.sequence = local.sequence.size;
  shape.batch = local.batch;
  shape.heads = local.input.size / of.head_dim;
  shape.kv_heads = shape.heads;
  shape.second = local.op.inputs.size() > 2;
  if (!shape.second) return;
  shape.all_heads = of.heads;
  shape.first_head = local.input.begin / of.head_dim;
}

std::vector<OperandWidth> packed_widths(const OpShape& s) {
  return {{input, 0, s.heads * s.head_dim}, {input, 1, 2 * s.kv_heads * s.head_dim}, {output, 0, s.heads * s.head_dim}};
}
std::string packed_fault(const OpShape& s) {
  if (s.keys < 1) return fmt::format("meets {} keys; expected at least 1", s.keys);
  if (s.heads != s.kv_heads) return fmt::format("has {} query heads and {} of keys", s.heads, s.kv_heads);
  return {};
}

// Products and work -------------------------------------------------------------------------------

// Pairs as if attention were not causal, by the convention of model FLOPs; scores and the weighted
// sum.
ModelProducts packed_model_products(const OpShape& s) {
  return {static_cast<double>(s.batch) * static_cast<double>(s.sequence) * static_cast<double>(s.keys),
          2.0 * static_cast<double>(s.heads * s.head_dim)};
}
double pairs_of_heads(const OpShape& s) {
  const auto n = static_cast<double>(s.sequence), k = static_cast<double>(s.keys);
  const double pairs = s.bidirectional ? n * k : n * (n + 1) / 2;
  return pairs * static_cast<double>(s.batch * s.heads);
}
// The shares of a product's rate of attention (planner/graph/ops/attention.cpp).
constexpr double packed_share = 0.6;
constexpr double packed_gradient_share = 0.5;

OpWork packed_attention_work(const OpShape& s, DataType type) {
  return {Flops(4 * static_cast<double>(s.head_dim) * pairs_of_heads(s)),
          Bytes((2 * query_elements(s) + packed_elements(s) + table_elements(s)) * e(type) +
                4 * s.sequence * s.batch * s.heads),
          true};
}
// Five products instead of two: scores again, dP, dV, dQ, dK. The gradients of biases are sums of
// dS.
OpWork packed_attention_gradient_work(const OpShape& s, DataType type) {
  return {Flops(10 * static_cast<double>(s.head_dim) * pairs_of_heads(s)),
          Bytes((4 * query_elements(s) + 2 * packed_elements(s) + 2 * table_elements(s)) * e(type) +
                4 * s.sequence * s.batch * s.heads),
          true};
}

// Workspaces --------------------------------------------------------------------------------------

Bytes packed_cpu_workspace(const OpShape& s) {
  const std::int64_t extra = s.second ? biases_by_distance(s.sequence, s.keys) : 0;
  return attention_workspace(s.sequence, s.keys, s.head_dim) + Bytes(4 * extra);
}
Bytes packed_gradient_cpu_workspace(const OpShape& s) {
  const std::int64_t extra = s.second ? 2 * biases_by_distance(s.sequence, s.keys) : 0;
  return attention_gradient_workspace(s.sequence, s.keys, s.head_dim) + Bytes(4 * extra);
}
// A kernel whose row has a workspace receives one; without biases, nothing is in it.
Bytes packed_cuda_workspace(const OpShape& s) {
  return s.second ? cuda_biases_workspace(s.sequence, s.keys, s.batch, s.heads) : Bytes(4);
}
Bytes packed_gradient_cuda_workspace(const OpShape& s) {
  const Bytes sums = cuda_attention_gradient_workspace(s.sequence, s.batch, s.heads);
  if (!s.second) return sums;
  return sums + cuda_biases_workspace(s.sequence, s.keys, s.batch, s.heads) +
         cuda_bias_sums_workspace(s.sequence, s.buckets, s.batch, s.heads);
}

// Rows --------------------------------------------------------------------------------------------

constexpr OpRow rows[] = {
    {.kind = OpKind::packed_attention,
     .name = "packed_attention",
     .sharding = ShardingRule::heads,
     .localize = localize_packed,
     .widths = packed_widths,
     .fault = packed_fault,
     .operands = packed_attention_operands,
     .gradients = packed_attention_gradients,
     .module = OpModule::core_attention,
     .work = packed_attention_work,
     .cost = CostClass::attention,
     .model_products = packed_model_products,
     .made_of = OpKind::attention,
     .unmeasured_share = packed_share,
     .measured_sizes = head_sizes,
     .cpu_workspace = packed_cpu_workspace,
     .cuda_workspace = packed_cuda_workspace},
    {.kind = OpKind::packed_attention_gradient,
     .name = "packed_attention_gradient",
     .operands = packed_attention_gradient_operands,
     .work = packed_attention_gradient_work,
     .cost = CostClass::attention,
     .made_of = OpKind::attention_gradient,
     .unmeasured_share = packed_gradient_share,
     .measured_sizes = head_sizes,
     .cpu_workspace = packed_gradient_cpu_workspace,
     .cuda_workspace = packed_gradient_cuda_workspace},
};

}  // namespace

std::span<const OpRow> packed_attention_rows() {
  return rows;
}

}  // namespace parplan
