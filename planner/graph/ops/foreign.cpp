#include "planner/graph/ops/op_rows.h"

#include "planner/graph/ops/fused_qkv.h"
#include "planner/graph/ops/row_parts.h"

// What engines other than parplan's runtime do in kernels of their own: attention that writes its
// scores, as matrix products of all heads and samples at once (torch.baddbmm, torch.bmm in
// Megatron-LM's CoreAttention), dropout, and logits in fp32. Scores are computed for all keys: the
// mask is applied to them, and nothing is left out.
namespace parplan {
namespace {

using enum OperandSource;
using enum Access;

// Operands ----------------------------------------------------------------------------------------

// Queries of all heads and samples: the rows of products with keys and values.
std::int64_t query_rows(const OpShape& s) { return s.sequence * s.batch * s.heads; }
std::int64_t head_elements(const OpShape& s) { return query_rows(s) * s.head_dim; }
std::int64_t score_elements(const OpShape& s) { return query_rows(s) * s.sequence; }
std::int64_t key_value_elements(const OpShape& s) { return s.sequence * s.batch * key_value_width(s); }
constexpr OperandSize queries{head_elements};
constexpr OperandSize keys_and_values{key_value_elements};
constexpr OperandSize scores{score_elements};
constexpr OperandSize per_query_row = in_fp32({query_rows});
std::int64_t repeated_elements(const OpShape& s) { return 3 * head_elements(s); }
constexpr OperandSize repeated{repeated_elements};
constexpr ShapeFlag if_later = &OpShape::accumulate;
constexpr OperandSize mask{matrix.elements, OperandContent::mask};
constexpr OperandSize bytes_of_matrix{matrix.elements, OperandContent::codes};

constexpr OperandRow attention_scores_operands[] = {{input, 0, read, fused}, {output, 0, write, scores}};
constexpr OperandRow attention_softmax_operands[] = {
    {input, 0, read, matrix}, {output, 0, write, matrix}, {workspace, 0, update}};
constexpr OperandRow dropout_operands[] = {
    {input, 0, read, matrix}, {output, 0, write, matrix}, {output, 1, write, mask}};
constexpr OperandRow attention_values_operands[] = {
    {input, 0, read, scores}, {input, 1, read, fused}, {output, 0, write, queries}};
constexpr OperandRow multiply_operands[] = {
    {input, 0, read, matrix}, {input, 1, read, matrix}, {output, 0, write, matrix}};
constexpr OperandRow copy_keys_operands[] = {
    {input, 0, read, fused}, {output, 0, write, fused}, {output, 1, write, keys_and_values, if_second}};
constexpr OperandRow repeat_keys_operands[] = {{input, 0, read, fused}, {output, 0, write, repeated}};
constexpr OperandRow merge_attention_operands[] = {{input, 0, read, queries, nullptr, if_later},
                                                   {input, 0, read, in_fp32(queries), if_later},
                                                   {input, 1, read, per_query_row},
                                                   {input, 2, read, queries},
                                                   {input, 3, read, per_query_row},
                                                   {output, 0, write, queries, nullptr, if_second},
                                                   {output, 0, write, in_fp32(queries), if_second},
                                                   {output, 1, write, per_query_row}};
constexpr OperandRow join_magnitudes_operands[] = {{output, 0, write, flat}};
constexpr OperandRow update_scales_operands[] = {{input, 0, read, flat}};
constexpr OperandRow quantize_operands[] = {{input, 0, read, matrix}, {output, 0, write, bytes_of_matrix}};
constexpr OperandRow widen_operands[] = {{input, 0, read, matrix}, {output, 0, write, in_fp32(matrix)}};

constexpr OperandRow attention_probabilities_gradient_operands[] = {
    {output_gradient, 0, read, queries}, {input, 1, read, fused}, {input_gradient, 0, write, scores}};
constexpr OperandRow attention_values_gradient_operands[] = {
    {output_gradient, 0, read, queries}, {input, 0, read, scores}, {input_gradient, 1, write, fused}};
constexpr OperandRow attention_softmax_gradient_operands[] = {
    {output_gradient, 0, read, matrix},
    {output, 0, read, matrix},
    {input_gradient, 0, write, matrix},
    {workspace, 0, update}};
constexpr OperandRow attention_scores_gradient_operands[] = {
    {output_gradient, 0, read, scores}, {input, 0, read, fused}, {input_gradient, 0, write, fused}};
constexpr OperandRow dropout_gradient_operands[] = {
    {output_gradient, 0, read, matrix}, {output, 1, read, mask}, {input_gradient, 0, write, matrix}};
constexpr OperandRow multiply_gradient_operands[] = {{output_gradient, 0, read, matrix},
                                                     {input, 0, read, matrix},
                                                     {input, 1, read, matrix},
                                                     {input_gradient, 0, write, matrix},
                                                     {input_gradient, 1, write, matrix}};
constexpr OperandRow copy_keys_gradient_operands[] = {{output_gradient, 0, read, fused},
                                                      {output, 1, read, keys_and_values, if_second},
                                                      {input_gradient, 0, write, fused}};
constexpr OperandRow repeat_keys_gradient_operands[] = {{output_gradient, 0, read, repeated},
                                                        {input_gradient, 0, write, fused}};
constexpr OperandRow widen_gradient_operands[] = {{output_gradient, 0, read, in_fp32(matrix)},
                                                  {input_gradient, 0, write, matrix}};

constexpr OpKind attention_scores_gradients[] = {OpKind::attention_scores_gradient};
constexpr OpKind attention_softmax_gradients[] = {OpKind::attention_softmax_gradient};
constexpr OpKind dropout_gradients[] = {OpKind::dropout_gradient};
constexpr OpKind attention_values_gradients[] = {OpKind::attention_probabilities_gradient,
                                                 OpKind::attention_values_gradient};
constexpr OpKind multiply_gradients[] = {OpKind::multiply_gradient};
constexpr OpKind copy_keys_gradients[] = {OpKind::copy_keys_gradient};
constexpr OpKind repeat_keys_gradients[] = {OpKind::repeat_keys_gradient};
constexpr OpKind widen_gradients[] = {OpKind::widen_gradient};

// Widths ------------------------------------------------------------------------------------------

std::vector<OperandWidth> attention_scores_widths(const OpShape& s) { return {{input, 0, fused_width(s)}}; }
std::vector<OperandWidth> attention_values_widths(const OpShape& s) {
  return {{input, 1, fused_width(s)}, {output, 0, s.heads * s.head_dim}};
}
std::vector<OperandWidth> copy_keys_widths(const OpShape& s) {
  return {{input, 0, fused_width(s)}, {output, 0, fused_width(s)}};
}

std::vector<OperandWidth> repeat_keys_widths(const OpShape& s) {
  return {{input, 0, fused_width(s)}, {output, 0, 3 * s.heads * s.head_dim}};
}

// Products ----------------------------------------------------------------------------------------
// A product of each head and sample is counted as one whose rows are the queries of all.

Product with_keys(const OpShape& s, DataType type) {  // queries times keys, or dy times values
  return {.m = query_rows(s), .n = s.sequence, .k = s.head_dim, .result = Bytes(score_elements(s) * e(type))};
}
Product with_scores(const OpShape& s, DataType type) {  // a row of scores for each query
  return {.m = query_rows(s), .n = s.head_dim, .k = s.sequence, .result = Bytes(head_elements(s) * e(type))};
}
Product twice_with_scores(const OpShape& s, DataType type) {  // gradients of queries and of keys
  return {.m = 2 * query_rows(s), .n = s.head_dim, .k = s.sequence, .result = Bytes(2 * head_elements(s) * e(type))};
}
// Copies and scalings beside them (Megatron-LM and its forks, as PyTorch's autograd runs them;
// kernels of their own): the weighted sum is brought to the order of tokens (permute, contiguous);
// the gradients of queries and of keys, of which the product was taken times a factor (baddbmm's
// alpha), are multiplied by it, and those of queries, keys and values are joined to one tensor (the
// gradient of a split).
Bytes brought_to_tokens(const OpShape& s, DataType type) { return Bytes(2 * head_elements(s) * e(type)); }
Bytes scaled_and_joined(const OpShape& s, DataType type) {
  return Bytes(2 * (head_elements(s) + key_value_elements(s) / 2 + fused_elements(s)) * e(type));
}
int with_one_copy(const OpShape&) { return 1 + 1; }
int scores_gradient_launches(const OpShape&) { return 2 + 2 + 1; }
// Half of attention's: every query with every key.
ModelProducts half_of_attention(const OpShape& s) {
  return {static_cast<double>(s.batch * s.sequence) * static_cast<double>(s.sequence),
          static_cast<double>(s.heads * s.head_dim)};
}

// torch.baddbmm copies ALiBi's biases, a row for all queries of a head, to where it adds the
// product.
std::int64_t biased_scores(const OpShape& s) { return s.alibi != 0.0 ? score_elements(s) : 0; }

// Work --------------------------------------------------------------------------------------------

Flops of_product(const OpShape& s, int products) {
  return Flops(2.0 * products * static_cast<double>(score_elements(s)) * static_cast<double>(s.head_dim));
}
// Keys or values of the key/value heads are read; the heads that share them read them again.
OpWork one_product_work(const OpShape& s, DataType type) {
  return {of_product(s, 1), Bytes((score_elements(s) + 2 * head_elements(s)) * e(type)), true};
}
OpWork attention_scores_gradient_work(const OpShape& s, DataType type) {
  return {of_product(s, 2), Bytes((2 * score_elements(s) + 4 * head_elements(s)) * e(type)), true};
}
// Step by step, the scale, the causal mask and the sum with a mask of padding are kernels in front
// of the softmax, and the gradients of the first two behind its own (a sum passes its gradient on):
// each reads and writes all scores.
std::int64_t masked_passes(const OpShape& s) { return s.stepwise ? 3 * 2 : 0; }
std::int64_t masked_gradient_passes(const OpShape& s) { return s.stepwise ? 2 * 2 : 0; }
// Apart (Megatron-LM's forward_torch_softmax): times a factor, masked in place, softmax, in fp32,
// each of which reads and writes all scores; in half precision, these are widened before, and
// probabilities are narrowed behind. The gradients, from the last: widened; of the softmax, which
// reads probabilities, too; of the mask, a copy that is masked in place; of the factor; narrowed.
constexpr std::int64_t wide = 4;
std::int64_t casting(const OpShape& s) { return s.in_half ? 2 * (2 + wide) : 0; }  // bytes of an element
int casts(const OpShape& s) { return s.in_half ? 2 : 0; }
std::int64_t softmax_bytes(const OpShape& s, DataType type) {
  return s.apart ? casting(s) + 3 * 2 * wide : (2 + masked_passes(s)) * e(type);
}
std::int64_t softmax_gradient_bytes(const OpShape& s, DataType type) {
  return s.apart ? casting(s) + (3 + 3 * 2) * wide : (3 + masked_gradient_passes(s)) * e(type);
}
int softmax_launches(const OpShape& s) { return s.apart ? casts(s) + 3 : s.stepwise ? 1 + 3 : 1; }
int softmax_gradient_launches(const OpShape& s) { return s.apart ? casts(s) + 4 : s.stepwise ? 1 + 2 : 1; }
OpWork attention_softmax_work(const OpShape& s, DataType type) {  // scale, mask, maximum, exp, sum, divide
  return {flops(6 * s.rows * s.columns), Bytes(softmax_bytes(s, type) * s.rows * s.columns)};
}
OpWork attention_softmax_gradient_work(const OpShape& s, DataType type) {
  return {flops(4 * s.rows * s.columns), Bytes(softmax_gradient_bytes(s, type) * s.rows * s.columns)};
}
// What is alive at most, apart: forward, beside scores and probabilities in fp32, what the softmax
// read, and the narrowed probabilities; backward, two tensors in fp32, of which the gradient of
// probabilities is one, and that of scores has a part of the other's place.
Bytes softmax_workspace(const OpShape& s) {
  return Bytes(s.apart ? (s.in_half ? wide + 2 : wide) * s.rows * s.columns : 0);
}
Bytes softmax_gradient_workspace(const OpShape& s) {
  return Bytes(s.apart ? (s.in_half ? wide - 2 : wide) * s.rows * s.columns : 0);
}
// In the kernel of a sum, only the mask is another operand, and nothing is launched.
int dropout_launches(const OpShape& s) { return s.in_sum ? 0 : 1; }
OpWork dropout_work(const OpShape& s, DataType type) {  // a random number, compare, scale
  return {flops(3 * s.rows * s.columns), Bytes(s.rows * s.columns * (s.in_sum ? 1 : 2 * e(type) + 1))};
}
OpWork dropout_gradient_work(const OpShape& s, DataType type) {
  return {flops(2 * s.rows * s.columns), Bytes(s.rows * s.columns * (2 * e(type) + 1))};
}
OpWork multiply_work(const OpShape& s, DataType type) {
  return {flops(s.rows * s.columns), Bytes(3 * s.rows * s.columns * e(type))};
}
int multiply_gradient_launches(const OpShape&) { return 2; }
OpWork multiply_gradient_work(const OpShape& s, DataType type) {  // two products of two tensors
  return {flops(2 * s.rows * s.columns), Bytes(6 * s.rows * s.columns * e(type))};
}
// Each of these copies reads and writes: queries, keys and values one sample after another; keys
// and values into one tensor, and this with the two of a token side by side
// (nanotron@c252843039 models/llama.py:449-474,655-658). Backward, keys and values are joined again
// (torch.split), with the queries, too, and all are brought back to the product's order.
OpWork copy_keys_work(const OpShape& s, DataType type) {
  return {{}, Bytes(2 * (fused_elements(s) + 2 * key_value_elements(s)) * e(type))};
}
OpWork copy_keys_gradient_work(const OpShape& s, DataType type) {
  return {{}, Bytes(2 * (key_value_elements(s) + 2 * fused_elements(s)) * e(type))};
}
// Keys and values are read and written for each query head; the gradients of these are read and
// summed (torch's expand and reshape, torchtitan@9dec370 torchtitan/models/llama/model.py:116-125).
// Queries are a view.
OpWork repeat_keys_work(const OpShape& s, DataType type) {
  return {flops(2 * head_elements(s)), Bytes((key_value_elements(s) + 2 * head_elements(s)) * e(type))};
}
// The merge of torch.distributed.tensor.experimental._attention's _SDPAMerger._merge_one, two
// exponentials and a product for an element of the output, as one kernel (Inductor writes what more
// than four tensors make: realize_reads_threshold).
OpWork merge_attention_work(const OpShape& s, DataType type) {
  const std::int64_t before = s.accumulate ? 4 : e(type), after = s.second ? 4 : e(type);
  return {flops(4 * head_elements(s)), Bytes(head_elements(s) * (before + e(type) + after) + 3 * 4 * query_rows(s))};
}
// Its rows and its columns side by side, for the products forward and backward
// (TransformerEngine@v1.9 common/transpose/cast_transpose.cu).
OpWork quantize_work(const OpShape& s, DataType type) {
  return {flops(2 * s.rows * s.columns), Bytes(s.rows * s.columns * (e(type) + 2))};
}
OpWork join_magnitudes_work(const OpShape& s, DataType type) {
  return {Flops(0), Bytes(2 * s.rows * e(type))};
}
// Histories move by one place; a scale and its inverse follow (TransformerEngine@v1.9
// common/recipe/delayed_scaling.cu, kernel_bulk).
OpWork update_scales_work(const OpShape& s, DataType type) {
  return {flops(s.rows * s.columns), Bytes(s.rows * (2 * s.columns + 3) * e(type))};
}
OpWork widen_work(const OpShape& s, DataType type) {
  return {flops(s.rows * s.columns), Bytes(s.rows * s.columns * (e(type) + 4))};
}

// Rows --------------------------------------------------------------------------------------------

constexpr OpRow rows[] = {
    {.kind = OpKind::attention_scores,
     .name = "attention_scores",
     .sharding = ShardingRule::heads,
     .localize = localize_heads,
     .widths = attention_scores_widths,
     .operands = attention_scores_operands,
     .gradients = attention_scores_gradients,
     .module = OpModule::core_attention,
     .by_head = true,
     .work = one_product_work,
     .cost = CostClass::product,
     .product = with_keys,
     .added_to = biased_scores,
     .model_products = half_of_attention},
    {.kind = OpKind::attention_softmax,
     .name = "attention_softmax",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .operands = attention_softmax_operands,
     .gradients = attention_softmax_gradients,
     .module = OpModule::core_attention,
     .work = attention_softmax_work,
     .launches = softmax_launches,
     .cpu_workspace = softmax_workspace,
     .cuda_workspace = softmax_workspace},
    {.kind = OpKind::attention_dropout,
     .name = "attention_dropout",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .operands = dropout_operands,
     .gradients = dropout_gradients,
     .module = OpModule::core_attention,
     .work = dropout_work},
    {.kind = OpKind::attention_values,
     .name = "attention_values",
     .sharding = ShardingRule::heads,
     .localize = localize_heads,
     .widths = attention_values_widths,
     .operands = attention_values_operands,
     .gradients = attention_values_gradients,
     .by_head = true,
     .work = one_product_work,
     .launches = with_one_copy,
     .cost = CostClass::product,
     .product = with_scores,
     .beside = brought_to_tokens,
     .model_products = half_of_attention},
    {.kind = OpKind::dropout,
     .name = "dropout",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .operands = dropout_operands,
     .gradients = dropout_gradients,
     .work = dropout_work,
     .launches = dropout_launches},
    {.kind = OpKind::multiply,
     .name = "multiply",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .operands = multiply_operands,
     .gradients = multiply_gradients,
     .module = OpModule::activation,
     .work = multiply_work},
    {.kind = OpKind::copy_keys,
     .name = "copy_keys",
     .sharding = ShardingRule::heads,
     .localize = localize_heads,
     .widths = copy_keys_widths,
     .operands = copy_keys_operands,
     .gradients = copy_keys_gradients,
     .work = copy_keys_work},
    {.kind = OpKind::repeat_keys,
     .name = "repeat_keys",
     .sharding = ShardingRule::heads,
     .localize = localize_heads,
     .widths = repeat_keys_widths,
     .operands = repeat_keys_operands,
     .gradients = repeat_keys_gradients,
     .work = repeat_keys_work},
    {.kind = OpKind::quantize,
     .name = "quantize",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .operands = quantize_operands,
     .work = quantize_work},
    {.kind = OpKind::widen,
     .name = "widen",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .operands = widen_operands,
     .gradients = widen_gradients,
     .work = widen_work},
    {.kind = OpKind::attention_probabilities_gradient,
     .name = "attention_probabilities_gradient",
     .operands = attention_probabilities_gradient_operands,
     .by_head = true,
     .work = one_product_work,
     .cost = CostClass::product,
     .product = with_keys},
    {.kind = OpKind::attention_values_gradient,
     .name = "attention_values_gradient",
     .operands = attention_values_gradient_operands,
     .by_head = true,
     .work = one_product_work,
     .cost = CostClass::product,
     .product = with_scores},
    {.kind = OpKind::attention_softmax_gradient,
     .name = "attention_softmax_gradient",
     .operands = attention_softmax_gradient_operands,
     .in_place = InPlace{.read = 0, .write = 2},
     .work = attention_softmax_gradient_work,
     .launches = softmax_gradient_launches,
     .cpu_workspace = softmax_gradient_workspace,
     .cuda_workspace = softmax_gradient_workspace},
    {.kind = OpKind::attention_scores_gradient,
     .name = "attention_scores_gradient",
     .operands = attention_scores_gradient_operands,
     .accumulates = true,
     .by_head = true,
     .work = attention_scores_gradient_work,
     .launches = scores_gradient_launches,
     .cost = CostClass::product,
     .product = twice_with_scores,
     .beside = scaled_and_joined},
    {.kind = OpKind::dropout_gradient,
     .name = "dropout_gradient",
     .operands = dropout_gradient_operands,
     .in_place = InPlace{.read = 0, .write = 2},
     .work = dropout_gradient_work},
    {.kind = OpKind::multiply_gradient,
     .name = "multiply_gradient",
     .operands = multiply_gradient_operands,
     .work = multiply_gradient_work,
     .launches = multiply_gradient_launches},
    {.kind = OpKind::copy_keys_gradient,
     .name = "copy_keys_gradient",
     .operands = copy_keys_gradient_operands,
     .work = copy_keys_gradient_work},
    {.kind = OpKind::repeat_keys_gradient,
     .name = "repeat_keys_gradient",
     .operands = repeat_keys_gradient_operands,
     .work = repeat_keys_work},
    {.kind = OpKind::widen_gradient, .name = "widen_gradient", .operands = widen_gradient_operands, .work = widen_work},
    {.kind = OpKind::merge_attention,
     .name = "merge_attention",
     .operands = merge_attention_operands,
     .work = merge_attention_work},
    {.kind = OpKind::join_magnitudes,
     .name = "join_magnitudes",
     .operands = join_magnitudes_operands,
     .work = join_magnitudes_work},
    {.kind = OpKind::update_scales,
     .name = "update_scales",
     .operands = update_scales_operands,
     .work = update_scales_work},
};

}  // namespace

std::span<const OpRow> foreign_rows() { return rows; }

}  // namespace parplan
