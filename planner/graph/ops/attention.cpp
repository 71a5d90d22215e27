#include "planner/graph/ops/op_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include <fmt/format.h>

#include "planner/graph/cpu_workspace.h"
#include "planner/graph/cuda_workspace.h"
#include "planner/graph/attention_span.h"
#include "planner/graph/ops/fused_qkv.h"
#include "planner/graph/ops/row_parts.h"

namespace parplan {
namespace {

using enum OperandSource;
using enum Access;
using enum OperandContent;

// Operands ----------------------------------------------------------------------------------------

std::int64_t head_elements(const OpShape& s) {
  return s.sequence * s.batch * s.heads * s.head_dim;
}
constexpr OperandSize queries{head_elements};
constexpr OperandSize per_query_head{[](const OpShape& s) { return s.sequence * s.batch * s.heads; }, fp32};

constexpr OperandSize all_keys_and_values{gathered_elements};

constexpr OperandRow rotary_operands[] = {{input, 0, read, fused}, {output, 0, write, fused}};
constexpr OperandRow attention_operands[] = {{input, 0, read, fused},
                                             {gathered, 0, read, all_keys_and_values, if_gathered},
                                             {output, 0, write, queries},
                                             {output, 1, write, per_query_head},
                                             {workspace, 0, update}};

constexpr OperandRow rotary_gradient_operands[] = {{output_gradient, 0, read, fused},
                                                   {input_gradient, 0, write, fused}};
constexpr OperandRow attention_gradient_operands[] = {{output_gradient, 0, read, queries},
                                                      {input, 0, read, fused},
                                                      {gathered, 0, read, all_keys_and_values, if_gathered},
                                                      {output, 0, read, queries},
                                                      {output, 1, read, per_query_head},
                                                      {input_gradient, 0, write, fused},
                                                      {gathered_gradient, 0, write, all_keys_and_values, if_gathered},
                                                      {workspace, 0, update}};

constexpr OpKind rotary_gradients[] = {OpKind::rotary_gradient};
constexpr OpKind attention_gradients[] = {OpKind::attention_gradient};

// Local shapes ------------------------------------------------------------------------------------

// Where the ranks of the context axis hold chunks, each gets the keys and values of all.
void localize_attention(const LocalOp& local, OpShape& shape) {
  localize_heads(local, shape);
  shape.gathered = shape.chunks.any();
}

// Widths and faults -------------------------------------------------------------------------------

std::vector<OperandWidth> rotary_widths(const OpShape& s) {
  return {{input, 0, fused_width(s)}, {output, 0, fused_width(s)}};
}
std::vector<OperandWidth> attention_widths(const OpShape& s) {
  return {{input, 0, fused_width(s)}, {output, 0, s.heads * s.head_dim}};
}

std::string rotary_fault(const OpShape& s) {
  if (s.rotary_dim % 2 == 0 && s.rotary_dim >= 0 && s.rotary_dim <= s.head_dim) return {};
  return fmt::format("turns {} features of heads of {}; expected an even number up to that", s.rotary_dim, s.head_dim);
}

// Products and work -------------------------------------------------------------------------------

// Pairs of query and key of one head and sample, as if attention were not causal: every token with
// every token, or, with a window, with the tokens fewer than `window` places before or after it.
// This is a little less than twice what a causal kernel computes.
double uncausal_pairs(std::int64_t sequence, std::int64_t window) {
  const double n = static_cast<double>(sequence);
  const double w = window > 0 ? static_cast<double>(std::min(window, sequence)) : n;
  return n * (2 * w - 1) - w * (w - 1);
}
// Scores and the weighted sum.
ModelProducts attention_model_products(const OpShape& s) {
  return {static_cast<double>(s.batch) * uncausal_pairs(s.sequence, s.window),
          2.0 * static_cast<double>(s.heads * s.head_dim)};
}
// The share of a product's rate that attention reaches where it was not measured. FlashAttention-2
// reaches 50 to 73% of the A100's peak, backward up to 63% (Dao 2023, abstract and section 4.1),
// with causal attention and heads of 64 at the lower end; products reach 86% there.
constexpr double attention_share = 0.6;
constexpr double attention_gradient_share = 0.5;

// Three operations per rotated element. The rest of a head and the values are unchanged, but belong
// to the operand.
// As complex numbers, queries and keys are widened, turned and narrowed again, forward and
// backward.
OpWork rotary_work(const OpShape& s, DataType type) {
  const std::int64_t turning = s.rotary_dim > 0 ? s.rotary_dim : s.head_dim;
  const std::int64_t turned = s.sequence * s.batch * (s.heads + s.kv_heads) * turning;
  constexpr std::int64_t wide = 4;
  const std::int64_t bytes =
      s.stepwise ? turned * (is_half(type) ? 2 * e(type) + 4 * wide : 2 * wide) : 2 * fused_elements(s) * e(type);
  return {flops(3 * turned), Bytes(bytes)};
}
// Those of queries and those of keys.
int rotary_launches(const OpShape& s) { return s.stepwise ? 2 * 3 : 1; }
// Causal: query i meets i + 1 keys, which makes sequence (sequence + 1) / 2 pairs per head; a
// window leaves out earlier keys. Scores and the weighted sum take 2 head_dim each per pair.
// FlashAttention (Dao 2023, section 4.1) counts the same products, causal as one half. Operations
// on a score (scale, softcap, ALiBi, exp) are not counted, as there.
double attention_pairs(const OpShape& s) {
  const auto triangle = [](std::int64_t n) { return static_cast<double>(n) * static_cast<double>(n + 1) / 2; };
  const auto up_to = [&](std::int64_t n) {
    return triangle(n) - (s.window > 0 && s.window < n ? triangle(n - s.window) : 0.0);
  };
  const AttentionSpan span = attention_span(s);
  if (!span.causal)
    return static_cast<double>(span.last - span.first) * static_cast<double>(span.keys * s.batch * s.heads);
  return (up_to(span.last) - up_to(span.first)) * static_cast<double>(s.batch * s.heads);
}
// What a kernel reads or writes of queries, keys and values: with gathered ones, the queries alone
// of the fused operand.
std::int64_t query_key_value_elements(const OpShape& s) {
  return s.gathered ? head_elements(s) + gathered_elements(s) : fused_elements(s);
}
// The output so far is read, too, where a ring adds to it.
OpWork attention_work(const OpShape& s, DataType type) {
  const std::int64_t outputs = s.accumulate ? 2 : 1;
  return {Flops(4 * static_cast<double>(s.head_dim) * attention_pairs(s)),
          Bytes((query_key_value_elements(s) + outputs * head_elements(s)) * e(type) +
                outputs * 4 * s.sequence * s.batch * s.heads),
          true};
}
// Five products instead of two: scores again, dP, dV, dQ, dK.
OpWork attention_gradient_work(const OpShape& s, DataType type) {
  const std::int64_t there = s.accumulate ? head_elements(s) : 0;
  return {Flops(10 * static_cast<double>(s.head_dim) * attention_pairs(s)),
          Bytes((2 * (query_key_value_elements(s) + head_elements(s)) + there) * e(type) +
                4 * s.sequence * s.batch * s.heads),
          true};
}

// Workspaces --------------------------------------------------------------------------------------

Bytes attention_cpu_workspace(const OpShape& s) {
  return attention_workspace(run_of_queries(s), room_for_keys(s), s.head_dim);
}
Bytes attention_gradient_cpu_workspace(const OpShape& s) {
  return attention_gradient_workspace(run_of_queries(s), room_for_keys(s), s.head_dim);
}
Bytes attention_gradient_cuda_workspace(const OpShape& s) {
  return cuda_attention_gradient_workspace(s.sequence, s.batch, s.heads);
}

// Rows --------------------------------------------------------------------------------------------

constexpr OpRow rows[] = {
    {.kind = OpKind::rotary,
     .name = "rotary",
     .sharding = ShardingRule::heads,
     .localize = localize_heads,
     .widths = rotary_widths,
     .fault = rotary_fault,
     .operands = rotary_operands,
     .gradients = rotary_gradients,
     .in_place = InPlace{.read = 0, .write = 1},
     .work = rotary_work,
     .launches = rotary_launches,
     .measured_over = MeasuredOver::heads,
     .measured_sizes = head_sizes},
    {.kind = OpKind::attention,
     .name = "attention",
     .sharding = ShardingRule::heads,
     .localize = localize_attention,
     .widths = attention_widths,
     .operands = attention_operands,
     .gradients = attention_gradients,
     .module = OpModule::core_attention,
     .work = attention_work,
     .cost = CostClass::attention,
     .model_products = attention_model_products,
     .unmeasured_share = attention_share,
     .measured_over = MeasuredOver::attention,
     .measured_sizes = head_sizes,
     .cpu_workspace = attention_cpu_workspace},
    {.kind = OpKind::rotary_gradient,
     .name = "rotary_gradient",
     .operands = rotary_gradient_operands,
     .in_place = InPlace{.read = 0, .write = 1},
     .work = rotary_work,
     .launches = rotary_launches,
     .made_of = OpKind::rotary,
     .measured_sizes = head_sizes},
    {.kind = OpKind::attention_gradient,
     .name = "attention_gradient",
     .operands = attention_gradient_operands,
     .work = attention_gradient_work,
     .cost = CostClass::attention,
     .unmeasured_share = attention_gradient_share,
     .measured_over = MeasuredOver::attention,
     .measured_sizes = head_sizes,
     .cpu_workspace = attention_gradient_cpu_workspace,
     .cuda_workspace = attention_gradient_cuda_workspace},
};

}  // namespace

std::span<const OpRow> attention_rows() {
  return rows;
}

double alibi_slope(std::int64_t head, std::int64_t all_heads) {
  const auto floor_of = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(all_heads)));
  const bool beyond = head >= floor_of;  // every other slope of twice as many heads
  const std::int64_t power = beyond ? 2 * (head - floor_of) + 1 : head + 1;
  return std::exp2(-8.0 * static_cast<double>(power) / static_cast<double>(beyond ? 2 * floor_of : floor_of));
}

}  // namespace parplan
