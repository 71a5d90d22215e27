#include "planner/graph/op.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include <fmt/format.h>

#include "planner/base/enum.h"
#include "planner/base/error.h"
#include "planner/graph/cuda_workspace.h"
#include "planner/graph/gemm_blocking.h"

namespace parplan {
namespace {

using enum OperandSource;
using enum Access;

// Optional operands: the flag of the shape that says whether they are there.
constexpr bool OpShape::*if_bias = &OpShape::bias;
constexpr bool OpShape::*if_second = &OpShape::second;
constexpr bool OpShape::*if_norm = &OpShape::norm;
constexpr bool OpShape::*if_master = &OpShape::master;
constexpr bool OpShape::*if_scaled = &OpShape::scaled;

// Operands, in the order in which kernels receive them --------------------------------------------

constexpr OperandRow embedding_operands[] = {{input, 0, read}, {parameter, 0, read}, {output, 0, write}};
constexpr OperandRow add_position_operands[] = {{input, 0, read}, {parameter, 0, read}, {output, 0, write}};
constexpr OperandRow layer_norm_operands[] = {{input, 0, read},   {parameter, 0, read}, {parameter, 1, read},
                                              {output, 0, write}, {output, 1, write},   {output, 2, write}};
constexpr OperandRow rms_norm_operands[] = {
    {input, 0, read}, {parameter, 0, read}, {output, 0, write}, {output, 1, write}};
constexpr OperandRow head_norm_operands[] = {
    {input, 0, read}, {parameter, 0, read}, {parameter, 1, read}, {output, 0, write}, {output, 1, write}};
constexpr OperandRow query_key_squares_operands[] = {{input, 0, read}, {output, 0, write}};
constexpr OperandRow query_key_norm_operands[] = {
    {input, 0, read}, {input, 1, read}, {parameter, 0, read}, {parameter, 1, read}, {output, 0, write}};
constexpr OperandRow linear_operands[] = {
    {input, 0, read}, {parameter, 0, read}, {parameter, 1, read, if_bias}, {output, 0, write}, {workspace, 0, update}};
constexpr OperandRow rotary_operands[] = {{input, 0, read}, {output, 0, write}};
constexpr OperandRow attention_operands[] = {
    {input, 0, read}, {output, 0, write}, {output, 1, write}, {workspace, 0, update}};
constexpr OperandRow activation_operands[] = {{input, 0, read}, {output, 0, write}};
constexpr OperandRow gate_operands[] = {{input, 0, read}, {input, 1, read}, {output, 0, write}};
constexpr OperandRow scale_operands[] = {{input, 0, read}, {output, 0, write}};
constexpr OperandRow softcap_operands[] = {{input, 0, read}, {output, 0, write}};
constexpr OperandRow add_operands[] = {
    {input, 0, read}, {input, 1, read, if_second}, {parameter, 0, read, if_bias}, {output, 0, write}};
constexpr OperandRow cross_entropy_max_operands[] = {{input, 0, read}, {output, 0, write}};
constexpr OperandRow cross_entropy_sums_operands[] = {
    {input, 0, read}, {input, 1, read}, {input, 2, read}, {output, 0, write}};
constexpr OperandRow cross_entropy_loss_operands[] = {
    {input, 0, read}, {input, 1, read}, {input, 2, read}, {input, 3, read}, {output, 0, update}};

constexpr OperandRow add_layer_norm_operands[] = {
    {input, 0, read},     {input, 1, read, if_second}, {parameter, 0, read, if_bias},
    {parameter, 1, read}, {parameter, 2, read},        {output, 0, write},
    {output, 1, write},   {output, 2, write},          {output, 3, write}};
constexpr OperandRow add_rms_norm_operands[] = {
    {input, 0, read},     {input, 1, read, if_second}, {parameter, 0, read, if_bias},
    {parameter, 1, read}, {output, 0, write},          {output, 1, write},
    {output, 2, write}};
// The two outputs may share storage: then nobody needs `before`, and y alone is written.
constexpr OperandRow linear_gelu_operands[] = {{input, 0, read},   {parameter, 0, read}, {parameter, 1, read, if_bias},
                                               {output, 0, write}, {output, 1, write},   {workspace, 0, update}};

constexpr OperandRow embedding_gradient_operands[] = {
    {output_gradient, 0, read}, {input, 0, read}, {parameter_gradient, 0, update}};
constexpr OperandRow add_position_gradient_operands[] = {{output_gradient, 0, read}, {parameter_gradient, 0, update}};
constexpr OperandRow layer_norm_gradient_operands[] = {{output_gradient, 0, read},
                                                       {input, 0, read},
                                                       {parameter, 0, read},
                                                       {output, 1, read},
                                                       {output, 2, read},
                                                       {input_gradient, 0, write},
                                                       {parameter_gradient, 0, update},
                                                       {parameter_gradient, 1, update},
                                                       {workspace, 0, update}};
constexpr OperandRow rms_norm_gradient_operands[] = {{output_gradient, 0, read}, {input, 0, read},
                                                     {parameter, 0, read},       {output, 1, read},
                                                     {input_gradient, 0, write}, {parameter_gradient, 0, update},
                                                     {workspace, 0, update}};
constexpr OperandRow head_norm_gradient_operands[] = {{output_gradient, 0, read},      {input, 0, read},
                                                      {parameter, 0, read},            {parameter, 1, read},
                                                      {output, 1, read},               {input_gradient, 0, write},
                                                      {parameter_gradient, 0, update}, {parameter_gradient, 1, update},
                                                      {workspace, 0, update}};
constexpr OperandRow query_key_squares_gradient_operands[] = {
    {output_gradient, 0, read}, {input, 0, read}, {input_gradient, 0, write}};
constexpr OperandRow query_key_norm_gradient_operands[] = {
    {output_gradient, 0, read}, {input, 0, read},           {input, 1, read},           {parameter, 0, read},
    {parameter, 1, read},       {input_gradient, 0, write}, {input_gradient, 1, write}, {parameter_gradient, 0, update},
    {parameter_gradient, 1, update}, {workspace, 0, update}};
constexpr OperandRow linear_input_gradient_operands[] = {
    {output_gradient, 0, read}, {parameter, 0, read}, {input_gradient, 0, write}, {workspace, 0, update}};
constexpr OperandRow linear_weight_gradient_operands[] = {{output_gradient, 0, read},
                                                          {input, 0, read},
                                                          {parameter_gradient, 0, update},
                                                          {parameter_gradient, 1, update, if_bias},
                                                          {workspace, 0, update}};
constexpr OperandRow rotary_gradient_operands[] = {{output_gradient, 0, read}, {input_gradient, 0, write}};
constexpr OperandRow attention_gradient_operands[] = {{output_gradient, 0, read}, {input, 0, read},
                                                      {output, 0, read},          {output, 1, read},
                                                      {input_gradient, 0, write}, {workspace, 0, update}};
constexpr OperandRow activation_gradient_operands[] = {
    {output_gradient, 0, read}, {input, 0, read}, {input_gradient, 0, write}};
constexpr OperandRow gate_gradient_operands[] = {{output_gradient, 0, read},
                                                 {input, 0, read},
                                                 {input, 1, read},
                                                 {input_gradient, 0, write},
                                                 {input_gradient, 1, write}};
constexpr OperandRow scale_gradient_operands[] = {{output_gradient, 0, read}, {input_gradient, 0, write}};
constexpr OperandRow softcap_gradient_operands[] = {
    {output_gradient, 0, read}, {output, 0, read}, {input_gradient, 0, write}};
constexpr OperandRow bias_gradient_operands[] = {
    {output_gradient, 0, read}, {parameter_gradient, 0, update, if_bias}, {workspace, 0, update}};
constexpr OperandRow cross_entropy_gradient_operands[] = {
    {input, 0, read}, {input, 1, read},           {input, 2, read},
    {input, 3, read}, {input_gradient, 0, write}, {loss_scale, 0, read, if_scaled}};
constexpr OperandRow linear_input_gradient_gelu_operands[] = {{output_gradient, 0, read},
                                                              {parameter, 0, read},
                                                              {input, 0, read},
                                                              {input_gradient, 0, write},
                                                              {workspace, 0, update}};

// Around the step there is no forward op: sources only distinguish the operands.
constexpr OperandRow accumulate_operands[] = {{input, 0, read}, {output, 0, update}};
constexpr OperandRow fill_zero_operands[] = {{output, 0, write}};
constexpr OperandRow copy_operands[] = {{input, 0, read}, {output, 0, write}};
constexpr OperandRow load_operands[] = {{output, 0, write}};
constexpr OperandRow sum_squares_operands[] = {{input, 0, read}, {output, 0, update}, {workspace, 0, update}};
constexpr OperandRow update_loss_scale_operands[] = {{input, 0, read}, {loss_scale, 0, update}};
// gradient, parameter, m, v, (norm), (master), (loss scale)
constexpr OperandRow adamw_operands[] = {{input, 0, read},          {parameter, 0, update},
                                         {output, 0, update},       {output, 1, update},
                                         {input, 1, read, if_norm}, {output, 2, update, if_master},
                                         {loss_scale, 0, read, if_scaled}};
// gradient, parameter, (momentum), (norm), (master), (loss scale)
constexpr OperandRow sgd_operands[] = {{input, 0, read},
                                       {parameter, 0, update},
                                       {output, 0, update, if_second},
                                       {input, 1, read, if_norm},
                                       {output, 1, update, if_master},
                                       {loss_scale, 0, read, if_scaled}};

// Backward ops, in running order. The input gradient of `linear` comes first: its all-reduce over
// the tensor axis and the blocks before wait for it, while nothing waits for the weight's.
constexpr OpKind embedding_gradients[] = {OpKind::embedding_gradient};
constexpr OpKind add_position_gradients[] = {OpKind::add_position_gradient};
constexpr OpKind layer_norm_gradients[] = {OpKind::layer_norm_gradient};
constexpr OpKind rms_norm_gradients[] = {OpKind::rms_norm_gradient};
constexpr OpKind head_norm_gradients[] = {OpKind::head_norm_gradient};
constexpr OpKind query_key_squares_gradients[] = {OpKind::query_key_squares_gradient};
constexpr OpKind query_key_norm_gradients[] = {OpKind::query_key_norm_gradient};
constexpr OpKind linear_gradients[] = {OpKind::linear_input_gradient, OpKind::linear_weight_gradient};
constexpr OpKind rotary_gradients[] = {OpKind::rotary_gradient};
constexpr OpKind attention_gradients[] = {OpKind::attention_gradient};
constexpr OpKind activation_gradients[] = {OpKind::activation_gradient};
constexpr OpKind gate_gradients[] = {OpKind::gate_gradient};
constexpr OpKind scale_gradients[] = {OpKind::scale_gradient};
constexpr OpKind softcap_gradients[] = {OpKind::softcap_gradient};
constexpr OpKind add_gradients[] = {OpKind::bias_gradient};
constexpr OpKind cross_entropy_loss_gradients[] = {OpKind::cross_entropy_gradient};

// Work --------------------------------------------------------------------------------------------
// Letters: r rows, c columns, k inner, e bytes of an element of `type`. Statistics, tokens, the
// loss, gradients of parameters and optimizer state have 4 bytes. An updated operand is read and
// written. Outside matrix products, operations per element are counted from the formula, with exp,
// tanh, erf and sqrt as one each: these kernels are memory-bound, so only the order of magnitude
// matters.

constexpr std::int64_t e(DataType type) {
  return size_of(type);
}
Flops flops(std::int64_t count) {
  return Flops(static_cast<double>(count));
}
// Products of sizes are computed in floating point: those of a whole model exceed 63 bits sooner
// than expected.
Flops product(double factor, std::int64_t a, std::int64_t b, std::int64_t c) {
  return Flops(factor * static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c));
}

OpWork embedding_work(const OpShape& s, DataType type) {  // only the rows of the table that are looked up
  return {Flops(0), Bytes(4 * s.rows + 2 * s.rows * s.columns * e(type))};
}
OpWork add_position_work(const OpShape& s, DataType type) {
  return {flops(s.rows * s.columns), Bytes((2 * s.rows + s.sequence) * s.columns * e(type))};
}
// Mean 1, variance 3, normalise 2, scale and shift 2.
OpWork layer_norm_work(const OpShape& s, DataType type) {
  return {flops(8 * s.rows * s.columns), Bytes(2 * (s.rows + 1) * s.columns * e(type) + 8 * s.rows)};
}
OpWork rms_norm_work(const OpShape& s, DataType type) {  // mean square 2, normalise 1, scale 1
  return {flops(4 * s.rows * s.columns), Bytes((2 * s.rows + 1) * s.columns * e(type) + 4 * s.rows)};
}
OpWork linear_work(const OpShape& s, DataType type) {
  return {product(2, s.rows, s.columns, s.inner) + flops(s.bias ? s.rows * s.columns : 0),
          Bytes((s.rows * s.inner + s.columns * s.inner + s.rows * s.columns + (s.bias ? s.columns : 0)) * e(type)),
          true};
}
std::int64_t fused_elements(const OpShape& s) {
  return s.sequence * s.batch * (s.heads + 2 * s.kv_heads) * s.head_dim;
}
std::int64_t head_elements(const OpShape& s) {
  return s.sequence * s.batch * s.heads * s.head_dim;
}
std::int64_t query_key_elements(const OpShape& s) {
  return s.sequence * s.batch * (s.heads + s.kv_heads) * s.head_dim;
}
// Three operations per rotated element. The rest of a head and the values are unchanged, but belong
// to the operand.
OpWork rotary_work(const OpShape& s, DataType type) {
  const std::int64_t turning = s.rotary_dim > 0 ? s.rotary_dim : s.head_dim;
  return {flops(3 * s.sequence * s.batch * (s.heads + s.kv_heads) * turning), Bytes(2 * fused_elements(s) * e(type))};
}
// As rms_norm, for queries and keys. Values are copied; there is one statistic per head, or two
// sums per row.
OpWork head_norm_work(const OpShape& s, DataType type) {
  return {flops(4 * query_key_elements(s)), Bytes((2 * fused_elements(s) + 2 * s.head_dim) * e(type) +
                                                  4 * s.sequence * s.batch * (s.heads + s.kv_heads))};
}
OpWork head_norm_gradient_work(const OpShape& s, DataType type) {
  return {flops(9 * query_key_elements(s)), Bytes((3 * fused_elements(s) + 2 * s.head_dim) * e(type) +
                                                  4 * s.sequence * s.batch * (s.heads + s.kv_heads) + 16 * s.head_dim)};
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
std::int64_t query_key_width(const OpShape& s) {
  return (s.heads + s.kv_heads) * s.head_dim;
}
OpWork query_key_norm_work(const OpShape& s, DataType type) {
  return {flops(2 * query_key_elements(s)),
          Bytes((2 * fused_elements(s) + query_key_width(s)) * e(type) + 8 * s.sequence * s.batch)};
}
OpWork query_key_norm_gradient_work(const OpShape& s, DataType type) {  // dy gamma rstd 2, dgamma 2, the sum's 2
  return {flops(6 * query_key_elements(s)), Bytes((3 * fused_elements(s) + query_key_width(s)) * e(type) +
                                                  16 * s.sequence * s.batch + 8 * query_key_width(s))};
}
// Causal: query i meets i + 1 keys, which makes sequence (sequence + 1) / 2 pairs per head; a
// window leaves out earlier keys. Scores and the weighted sum take 2 head_dim each per pair.
// FlashAttention (Dao 2023, section 4.1) counts the same products, causal as one half. Operations
// on a score (scale, softcap, ALiBi, exp) are not counted, as there.
double attention_pairs(const OpShape& s) {
  const auto triangle = [](std::int64_t n) { return static_cast<double>(n) * static_cast<double>(n + 1) / 2; };
  const double beyond = s.window > 0 && s.window < s.sequence ? triangle(s.sequence - s.window) : 0.0;
  return (triangle(s.sequence) - beyond) * static_cast<double>(s.batch * s.heads);
}
OpWork attention_work(const OpShape& s, DataType type) {
  return {Flops(4 * static_cast<double>(s.head_dim) * attention_pairs(s)),
          Bytes((fused_elements(s) + head_elements(s)) * e(type) + 4 * s.sequence * s.batch * s.heads), true};
}
// Five products instead of two: scores again, dP, dV, dQ, dK.
OpWork attention_gradient_work(const OpShape& s, DataType type) {
  return {Flops(10 * static_cast<double>(s.head_dim) * attention_pairs(s)),
          Bytes(2 * (fused_elements(s) + head_elements(s)) * e(type) + 4 * s.sequence * s.batch * s.heads), true};
}
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
OpWork activation_work(const OpShape& s, DataType type) {
  return {flops(value_operations(s.activation) * s.rows * s.columns), Bytes(2 * s.rows * s.columns * e(type))};
}
OpWork activation_gradient_work(const OpShape& s, DataType type) {
  return {flops(slope_operations(s.activation) * s.rows * s.columns), Bytes(3 * s.rows * s.columns * e(type))};
}
// The activation times the other operand.
OpWork gate_work(const OpShape& s, DataType type) {
  return {flops((value_operations(s.activation) + 1) * s.rows * s.columns), Bytes(3 * s.rows * s.columns * e(type))};
}
// dy up slope; dy activation, whose parts are already computed: a product of two and one more.
OpWork gate_gradient_work(const OpShape& s, DataType type) {
  return {flops((slope_operations(s.activation) + 3) * s.rows * s.columns), Bytes(5 * s.rows * s.columns * e(type))};
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
OpWork cross_entropy_max_work(const OpShape& s, DataType type) {
  return {flops(s.rows * s.columns), Bytes(s.rows * s.columns * e(type) + 4 * s.rows)};
}
OpWork cross_entropy_sums_work(const OpShape& s, DataType type) {  // subtract, exp, add; target, maximum, two sums
  return {flops(3 * s.rows * s.columns), Bytes(s.rows * s.columns * e(type) + 16 * s.rows)};
}
// The two sums of a token hold all that its loss needs; the other operands are for the gradient.
OpWork cross_entropy_loss_work(const OpShape& s, DataType) {
  return {flops(3 * s.rows), Bytes(8 * s.rows + 8)};
}
OpWork cross_entropy_gradient_work(const OpShape& s, DataType type) {  // subtract, exp, divide, scale
  return {flops(4 * s.rows * s.columns), Bytes(2 * s.rows * s.columns * e(type) + 16 * s.rows)};
}

OpWork embedding_gradient_work(const OpShape& s, DataType type) {
  return {flops(s.rows * s.columns), Bytes(4 * s.rows + s.rows * s.columns * (e(type) + 8))};
}
OpWork add_position_gradient_work(const OpShape& s, DataType type) {
  return {flops(s.rows * s.columns), Bytes(s.rows * s.columns * e(type) + 8 * s.sequence * s.columns)};
}
OpWork bias_gradient_work(const OpShape& s, DataType type) {
  return {flops(s.rows * s.columns), Bytes(s.rows * s.columns * e(type) + 8 * s.columns)};
}
// The memory passes of dx: written, or read as well.
std::int64_t input_gradient_passes(const OpShape& s) {
  return s.accumulate ? 2 : 1;
}
// Normalise again 2, dgamma 2, dbeta 1, dy gamma 1, its two sums 3, dx 4, and 1 to add to the
// present value.
OpWork layer_norm_gradient_work(const OpShape& s, DataType type) {
  return {flops((s.accumulate ? 14 : 13) * s.rows * s.columns),
          Bytes(((2 + input_gradient_passes(s)) * s.rows + 1) * s.columns * e(type) + 8 * s.rows + 16 * s.columns)};
}
OpWork rms_norm_gradient_work(const OpShape& s, DataType type) {
  return {flops((s.accumulate ? 10 : 9) * s.rows * s.columns),
          Bytes(((2 + input_gradient_passes(s)) * s.rows + 1) * s.columns * e(type) + 4 * s.rows + 8 * s.columns)};
}
OpWork linear_input_gradient_work(const OpShape& s, DataType type) {
  return {product(2, s.rows, s.columns, s.inner),
          Bytes((s.rows * s.columns + s.columns * s.inner + input_gradient_passes(s) * s.rows * s.inner) * e(type)),
          true};
}
OpWork linear_weight_gradient_work(const OpShape& s, DataType type) {
  return {
      product(2, s.rows, s.columns, s.inner) + flops(s.bias ? s.rows * s.columns : 0),
      Bytes((s.rows * s.columns + s.rows * s.inner) * e(type) + 8 * (s.columns * s.inner + (s.bias ? s.columns : 0))),
      true};
}

OpWork accumulate_work(const OpShape& s, DataType type) {
  return {flops(s.rows), Bytes(3 * s.rows * e(type))};
}
OpWork fill_zero_work(const OpShape& s, DataType type) {
  return {Flops(0), Bytes(s.rows * e(type))};
}
OpWork copy_work(const OpShape& s, DataType type) {
  return {Flops(0), Bytes(2 * s.rows * e(type))};
}
OpWork load_work(const OpShape& s, DataType) {
  return {Flops(0), Bytes(4 * s.rows)};
}
OpWork sum_squares_work(const OpShape& s, DataType) {
  return {flops(2 * s.rows), Bytes(4 * s.rows + 8)};
}
// A parameter is updated directly, or rewritten from the fp32 master copy, which is updated.
std::int64_t parameter_bytes(const OpShape& s, DataType type) {
  return s.master ? 8 + e(type) : 2 * e(type);
}
// m 3, v 4, two corrections, sqrt, epsilon, divide, step 2; decay 2.
OpWork adamw_work(const OpShape& s, DataType type) {
  return {flops((s.weight_decay ? 16 : 14) * s.rows), Bytes((4 + 16 + parameter_bytes(s, type)) * s.rows)};
}
OpWork sgd_work(const OpShape& s, DataType type) {  // `second`: with momentum
  return {flops((2 + (s.weight_decay ? 2 : 0) + (s.second ? 2 : 0)) * s.rows),
          Bytes((4 + (s.second ? 8 : 0) + parameter_bytes(s, type)) * s.rows)};
}

OpWork update_loss_scale_work(const OpShape&, DataType) {
  return {flops(4), Bytes(4 + 2 * static_cast<std::int64_t>(sizeof(LossScale)))};
}

// Two kernels in one: what the first writes is not read again.
OpWork add_layer_norm_work(const OpShape& s, DataType type) {
  const OpWork add = add_work(s, type);
  const OpWork norm = layer_norm_work(s, type);
  return {add.flops + norm.flops, add.bytes + norm.bytes - Bytes(s.rows * s.columns * e(type))};
}
OpWork add_rms_norm_work(const OpShape& s, DataType type) {
  const OpWork add = add_work(s, type);
  const OpWork norm = rms_norm_work(s, type);
  return {add.flops + norm.flops, add.bytes + norm.bytes - Bytes(s.rows * s.columns * e(type))};
}
OpWork linear_gelu_work(const OpShape& s, DataType type) {
  const OpWork linear = linear_work(s, type);
  return {linear.flops + flops(9 * s.rows * s.columns), linear.bytes + Bytes(s.rows * s.columns * e(type)), true};
}
// `columns` and `inner` are linear's: dbefore has `inner` columns.
OpWork linear_input_gradient_gelu_work(const OpShape& s, DataType type) {
  const OpWork linear = linear_input_gradient_work(s, type);
  return {linear.flops + flops(17 * s.rows * s.inner), linear.bytes + Bytes(s.rows * s.inner * e(type)), true};
}

// Workspaces on CPU (gemm_blocking.h) -------------------------------------------------------------

Bytes linear_cpu_workspace(const OpShape& s) {
  return linear_workspace(s.rows, s.columns, s.inner);
}
Bytes linear_input_gradient_cpu_workspace(const OpShape& s) {
  return linear_input_gradient_workspace(s.rows, s.columns, s.inner);
}
Bytes linear_weight_gradient_cpu_workspace(const OpShape& s) {
  return linear_weight_gradient_workspace(s.rows, s.columns, s.inner);
}
Bytes attention_cpu_workspace(const OpShape& s) {
  return attention_workspace(s.sequence, s.head_dim);
}
Bytes attention_gradient_cpu_workspace(const OpShape& s) {
  return attention_gradient_workspace(s.sequence, s.head_dim);
}

// Workspaces on CUDA (cuda_workspace.h) -----------------------------------------------------------

Bytes matrix_cuda_workspace(const OpShape&) {
  return Bytes(matrix_workspace_bytes);
}
// The sums of the bias come first and are finished before the product; with many columns they need
// more than the product does.
Bytes linear_weight_gradient_cuda_workspace(const OpShape& s) {
  return std::max(Bytes(matrix_workspace_bytes), s.bias ? column_sums_workspace(s.rows, s.columns, 1) : Bytes(0));
}
Bytes layer_norm_gradient_cuda_workspace(const OpShape& s) {
  return column_sums_workspace(s.rows, s.columns, 2);
}
Bytes rms_norm_gradient_cuda_workspace(const OpShape& s) {
  return column_sums_workspace(s.rows, s.columns, 1);
}
Bytes head_norm_gradient_cuda_workspace(const OpShape& s) {
  return column_sums_workspace(s.sequence * s.batch, s.head_dim, 2);
}
Bytes query_key_norm_gradient_cuda_workspace(const OpShape& s) {
  return column_sums_workspace(s.sequence * s.batch, query_key_width(s), 1);
}
Bytes bias_gradient_cuda_workspace(const OpShape& s) {
  return column_sums_workspace(s.rows, s.columns, 1);
}
Bytes attention_gradient_cuda_workspace(const OpShape& s) {
  return cuda_attention_gradient_workspace(s.sequence, s.batch, s.heads);
}
Bytes sum_squares_cuda_workspace(const OpShape&) {
  return Bytes(sum_squares_workspace_bytes);
}

// The table, in the order of OpKind ---------------------------------------------------------------
// In place: elementwise kernels read an element before they write it, and each element of the read
// operand is needed for the same element of the written one only.

constexpr OpRow rows[] = {
    {.kind = OpKind::embedding,
     .name = "embedding",
     .sharding = ShardingRule::lookup,
     .operands = embedding_operands,
     .gradients = embedding_gradients,
     .work = embedding_work},
    {.kind = OpKind::add_position,
     .name = "add_position",
     .sharding = ShardingRule::tokenwise,
     .operands = add_position_operands,
     .gradients = add_position_gradients,
     .passes_gradient = true,
     .in_place_read = 0,
     .in_place_write = 2,
     .work = add_position_work},
    {.kind = OpKind::layer_norm,
     .name = "layer_norm",
     .sharding = ShardingRule::tokenwise,
     .operands = layer_norm_operands,
     .gradients = layer_norm_gradients,
     .work = layer_norm_work},
    {.kind = OpKind::rms_norm,
     .name = "rms_norm",
     .sharding = ShardingRule::tokenwise,
     .operands = rms_norm_operands,
     .gradients = rms_norm_gradients,
     .work = rms_norm_work},
    {.kind = OpKind::head_norm,
     .name = "head_norm",
     .sharding = ShardingRule::heads,
     .operands = head_norm_operands,
     .gradients = head_norm_gradients,
     .work = head_norm_work},
    {.kind = OpKind::query_key_squares,
     .name = "query_key_squares",
     .sharding = ShardingRule::head_sums,
     .operands = query_key_squares_operands,
     .gradients = query_key_squares_gradients,
     .work = query_key_squares_work},
    {.kind = OpKind::query_key_norm,
     .name = "query_key_norm",
     .sharding = ShardingRule::heads,
     .operands = query_key_norm_operands,
     .gradients = query_key_norm_gradients,
     .work = query_key_norm_work},
    {.kind = OpKind::linear,
     .name = "linear",
     .sharding = ShardingRule::contraction,
     .operands = linear_operands,
     .gradients = linear_gradients,
     .work = linear_work,
     .cpu_workspace = linear_cpu_workspace,
     .cuda_workspace = matrix_cuda_workspace},
    {.kind = OpKind::rotary,
     .name = "rotary",
     .sharding = ShardingRule::heads,
     .operands = rotary_operands,
     .gradients = rotary_gradients,
     .in_place_read = 0,
     .in_place_write = 1,
     .work = rotary_work},
    {.kind = OpKind::attention,
     .name = "attention",
     .sharding = ShardingRule::heads,
     .operands = attention_operands,
     .gradients = attention_gradients,
     .work = attention_work,
     .cpu_workspace = attention_cpu_workspace},
    {.kind = OpKind::activation,
     .name = "activation",
     .sharding = ShardingRule::tokenwise,
     .operands = activation_operands,
     .gradients = activation_gradients,
     .in_place_read = 0,
     .in_place_write = 1,
     .work = activation_work},
    {.kind = OpKind::gate,
     .name = "gate",
     .sharding = ShardingRule::tokenwise,
     .operands = gate_operands,
     .gradients = gate_gradients,
     .in_place_read = 0,
     .in_place_write = 2,
     .work = gate_work},
    {.kind = OpKind::scale,
     .name = "scale",
     .sharding = ShardingRule::tokenwise,
     .operands = scale_operands,
     .gradients = scale_gradients,
     .in_place_read = 0,
     .in_place_write = 1,
     .work = scale_work},
    {.kind = OpKind::softcap,
     .name = "softcap",
     .sharding = ShardingRule::tokenwise,
     .operands = softcap_operands,
     .gradients = softcap_gradients,
     .in_place_read = 0,
     .in_place_write = 1,
     .work = softcap_work},
    {.kind = OpKind::add,
     .name = "add",
     .sharding = ShardingRule::tokenwise,
     .operands = add_operands,
     .gradients = add_gradients,
     .passes_gradient = true,
     .in_place_read = 1,
     .in_place_write = 3,
     .work = add_work},
    {.kind = OpKind::cross_entropy_max,
     .name = "cross_entropy_max",
     .sharding = ShardingRule::vocabulary_max,
     .operands = cross_entropy_max_operands,
     .work = cross_entropy_max_work},
    {.kind = OpKind::cross_entropy_sums,
     .name = "cross_entropy_sums",
     .sharding = ShardingRule::vocabulary_sum,
     .operands = cross_entropy_sums_operands,
     .work = cross_entropy_sums_work},
    {.kind = OpKind::cross_entropy_loss,
     .name = "cross_entropy_loss",
     .sharding = ShardingRule::vocabulary_loss,
     .operands = cross_entropy_loss_operands,
     .gradients = cross_entropy_loss_gradients,
     .work = cross_entropy_loss_work},

    {.kind = OpKind::add_layer_norm,
     .name = "add_layer_norm",
     .operands = add_layer_norm_operands,
     .in_place_read = 1,
     .in_place_write = 5,
     .work = add_layer_norm_work},
    {.kind = OpKind::add_rms_norm,
     .name = "add_rms_norm",
     .operands = add_rms_norm_operands,
     .in_place_read = 1,
     .in_place_write = 4,
     .work = add_rms_norm_work},
    {.kind = OpKind::linear_gelu,
     .name = "linear_gelu",
     .operands = linear_gelu_operands,
     .work = linear_gelu_work,
     .cpu_workspace = linear_cpu_workspace,
     .cuda_workspace = matrix_cuda_workspace},

    {.kind = OpKind::embedding_gradient,
     .name = "embedding_gradient",
     .operands = embedding_gradient_operands,
     .work = embedding_gradient_work},
    {.kind = OpKind::add_position_gradient,
     .name = "add_position_gradient",
     .operands = add_position_gradient_operands,
     .work = add_position_gradient_work},
    {.kind = OpKind::layer_norm_gradient,
     .name = "layer_norm_gradient",
     .operands = layer_norm_gradient_operands,
     .accumulates = true,
     .work = layer_norm_gradient_work,
     .cuda_workspace = layer_norm_gradient_cuda_workspace},
    {.kind = OpKind::rms_norm_gradient,
     .name = "rms_norm_gradient",
     .operands = rms_norm_gradient_operands,
     .accumulates = true,
     .work = rms_norm_gradient_work,
     .cuda_workspace = rms_norm_gradient_cuda_workspace},
    {.kind = OpKind::head_norm_gradient,
     .name = "head_norm_gradient",
     .operands = head_norm_gradient_operands,
     .in_place_read = 0,
     .in_place_write = 5,
     .work = head_norm_gradient_work,
     .cuda_workspace = head_norm_gradient_cuda_workspace},
    {.kind = OpKind::query_key_squares_gradient,
     .name = "query_key_squares_gradient",
     .operands = query_key_squares_gradient_operands,
     .accumulates = true,
     .work = query_key_squares_gradient_work},
    {.kind = OpKind::query_key_norm_gradient,
     .name = "query_key_norm_gradient",
     .operands = query_key_norm_gradient_operands,
     .in_place_read = 0,
     .in_place_write = 5,
     .work = query_key_norm_gradient_work,
     .cuda_workspace = query_key_norm_gradient_cuda_workspace},
    {.kind = OpKind::linear_input_gradient,
     .name = "linear_input_gradient",
     .operands = linear_input_gradient_operands,
     .accumulates = true,
     .work = linear_input_gradient_work,
     .cpu_workspace = linear_input_gradient_cpu_workspace,
     .cuda_workspace = matrix_cuda_workspace},
    {.kind = OpKind::linear_weight_gradient,
     .name = "linear_weight_gradient",
     .operands = linear_weight_gradient_operands,
     .work = linear_weight_gradient_work,
     .cpu_workspace = linear_weight_gradient_cpu_workspace,
     .cuda_workspace = linear_weight_gradient_cuda_workspace},
    {.kind = OpKind::rotary_gradient,
     .name = "rotary_gradient",
     .operands = rotary_gradient_operands,
     .in_place_read = 0,
     .in_place_write = 1,
     .work = rotary_work},
    {.kind = OpKind::attention_gradient,
     .name = "attention_gradient",
     .operands = attention_gradient_operands,
     .work = attention_gradient_work,
     .cpu_workspace = attention_gradient_cpu_workspace,
     .cuda_workspace = attention_gradient_cuda_workspace},
    {.kind = OpKind::activation_gradient,
     .name = "activation_gradient",
     .operands = activation_gradient_operands,
     .in_place_read = 0,
     .in_place_write = 2,
     .work = activation_gradient_work},
    {.kind = OpKind::gate_gradient,
     .name = "gate_gradient",
     .operands = gate_gradient_operands,
     .in_place_read = 0,
     .in_place_write = 3,
     .work = gate_gradient_work},
    {.kind = OpKind::scale_gradient,
     .name = "scale_gradient",
     .operands = scale_gradient_operands,
     .in_place_read = 0,
     .in_place_write = 1,
     .work = scale_work},
    {.kind = OpKind::softcap_gradient,
     .name = "softcap_gradient",
     .operands = softcap_gradient_operands,
     .in_place_read = 0,
     .in_place_write = 2,
     .work = softcap_gradient_work},
    {.kind = OpKind::bias_gradient,
     .name = "bias_gradient",
     .operands = bias_gradient_operands,
     .work = bias_gradient_work,
     .cuda_workspace = bias_gradient_cuda_workspace},
    {.kind = OpKind::cross_entropy_gradient,
     .name = "cross_entropy_gradient",
     .operands = cross_entropy_gradient_operands,
     .in_place_read = 0,
     .in_place_write = 4,
     .work = cross_entropy_gradient_work},
    {.kind = OpKind::linear_input_gradient_gelu,
     .name = "linear_input_gradient_gelu",
     .operands = linear_input_gradient_gelu_operands,
     .work = linear_input_gradient_gelu_work,
     .cpu_workspace = linear_input_gradient_cpu_workspace,
     .cuda_workspace = matrix_cuda_workspace},

    {.kind = OpKind::accumulate, .name = "accumulate", .operands = accumulate_operands, .work = accumulate_work},
    {.kind = OpKind::fill_zero, .name = "fill_zero", .operands = fill_zero_operands, .work = fill_zero_work},
    {.kind = OpKind::copy, .name = "copy", .operands = copy_operands, .work = copy_work},
    {.kind = OpKind::load_tokens, .name = "load_tokens", .operands = load_operands, .work = load_work},
    {.kind = OpKind::load_targets, .name = "load_targets", .operands = load_operands, .work = load_work},
    {.kind = OpKind::sum_squares,
     .name = "sum_squares",
     .operands = sum_squares_operands,
     .work = sum_squares_work,
     .cuda_workspace = sum_squares_cuda_workspace},
    {.kind = OpKind::adamw, .name = "adamw", .operands = adamw_operands, .work = adamw_work},
    {.kind = OpKind::sgd, .name = "sgd", .operands = sgd_operands, .work = sgd_work},
    {.kind = OpKind::update_loss_scale,
     .name = "update_loss_scale",
     .operands = update_loss_scale_operands,
     .work = update_loss_scale_work},
};

constexpr bool in_order() {
  for (std::size_t i = 0; i < std::size(rows); ++i)
    if (static_cast<std::size_t>(rows[i].kind) != i) return false;
  return std::size(rows) == static_cast<std::size_t>(OpKind::count_);
}
static_assert(in_order(), "rows stand in the order of OpKind, one for each");

}  // namespace

double alibi_slope(std::int64_t head, std::int64_t all_heads) {
  const auto floor_of = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(all_heads)));
  const bool beyond = head >= floor_of;  // every other slope of twice as many heads
  const std::int64_t power = beyond ? 2 * (head - floor_of) + 1 : head + 1;
  return std::exp2(-8.0 * static_cast<double>(power) / static_cast<double>(beyond ? 2 * floor_of : floor_of));
}

bool is_present(const OperandRow& operand, const OpShape& shape, bool workspace) {
  if (operand.source == OperandSource::workspace) return workspace;
  return operand.optional == nullptr || shape.*operand.optional;
}

int operand_count(const OpRow& row, const OpShape& shape, bool workspace) {
  int count = 0;
  for (const OperandRow& operand : row.operands) count += is_present(operand, shape, workspace) ? 1 : 0;
  return count;
}

std::span<const OpRow> op_rows() {
  return rows;
}

const OpRow& row_of(OpKind kind) {
  PARPLAN_ASSERT(kind >= OpKind{} && kind < OpKind::count_, fmt::format("op kind {}", static_cast<int>(kind)));
  return rows[index_of(kind)];
}

}  // namespace parplan
