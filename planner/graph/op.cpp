#include "planner/graph/op.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include <fmt/format.h>

#include "planner/base/enum.h"
#include "planner/base/error.h"
#include "planner/graph/cuda_workspace.h"
#include "planner/graph/gemm_blocking.h"
#include "planner/graph/local_op.h"

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

// Sizes of operands -------------------------------------------------------------------------------

std::int64_t fused_elements(const OpShape& s) {
  return s.sequence * s.batch * (s.heads + 2 * s.kv_heads) * s.head_dim;
}
std::int64_t head_elements(const OpShape& s) {
  return s.sequence * s.batch * s.heads * s.head_dim;
}
std::int64_t query_key_elements(const OpShape& s) {
  return s.sequence * s.batch * (s.heads + s.kv_heads) * s.head_dim;
}

using enum OperandContent;

// The same number of elements in fp32: gradients of parameters, optimizer state.
constexpr OperandSize in_fp32(const OperandSize& size) {
  return {size.elements, fp32};
}

constexpr OperandSize one{[](const OpShape&) { return std::int64_t{1}; }, fp32};
constexpr OperandSize scale_state{[](const OpShape&) { return std::int64_t{sizeof(LossScale) / sizeof(float)}; }, fp32};
// One per row (token), two per row, one per column; flat ops have only rows.
constexpr OperandSize flat{[](const OpShape& s) { return s.rows; }};
constexpr OperandSize per_row = in_fp32(flat);
constexpr OperandSize two_per_row{[](const OpShape& s) { return 2 * s.rows; }, fp32};
constexpr OperandSize vocabulary_ids{[](const OpShape& s) { return s.rows; }, ids};
constexpr OperandSize second_moment{[](const OpShape& s) { return s.rows; }, non_negative};
constexpr OperandSize per_column{[](const OpShape& s) { return s.columns; }};
constexpr OperandSize matrix{[](const OpShape& s) { return s.rows * s.columns; }};
// Linear: its input, and its weight.
constexpr OperandSize inner_matrix{[](const OpShape& s) { return s.rows * s.inner; }};
constexpr OperandSize weights{[](const OpShape& s) { return s.columns * s.inner; }};
// Tables: rows of the vocabulary that are not padding, and positions of the sequence.
constexpr OperandSize vocabulary_table{[](const OpShape& s) { return s.valid * s.columns; }};
constexpr OperandSize position_table{[](const OpShape& s) { return s.sequence * s.columns; }};
// Attention and the norms of queries and keys: fused queries, keys and values, queries alone, and
// statistics of a head or of all of a row's heads.
constexpr OperandSize fused{fused_elements};
constexpr OperandSize queries{head_elements};
constexpr OperandSize per_query_head{[](const OpShape& s) { return s.sequence * s.batch * s.heads; }, fp32};
constexpr OperandSize per_head{[](const OpShape& s) { return s.sequence * s.batch * (s.heads + s.kv_heads); }, fp32};
constexpr OperandSize two_sums{[](const OpShape& s) { return 2 * s.sequence * s.batch; }, fp32};
constexpr OperandSize one_head{[](const OpShape& s) { return s.head_dim; }};
constexpr OperandSize query_row{[](const OpShape& s) { return s.heads * s.head_dim; }};
constexpr OperandSize key_row{[](const OpShape& s) { return s.kv_heads * s.head_dim; }};

// Operands, in the order in which kernels receive them --------------------------------------------

constexpr OperandRow embedding_operands[] = {
    {input, 0, read, vocabulary_ids}, {parameter, 0, read, vocabulary_table}, {output, 0, write, matrix}};
constexpr OperandRow add_position_operands[] = {
    {input, 0, read, matrix}, {parameter, 0, read, position_table}, {output, 0, write, matrix}};
constexpr OperandRow layer_norm_operands[] = {{input, 0, read, matrix},         {parameter, 0, read, per_column},
                                              {parameter, 1, read, per_column}, {output, 0, write, matrix},
                                              {output, 1, write, per_row},      {output, 2, write, per_row}};
constexpr OperandRow rms_norm_operands[] = {{input, 0, read, matrix},
                                            {parameter, 0, read, per_column},
                                            {output, 0, write, matrix},
                                            {output, 1, write, per_row}};
constexpr OperandRow head_norm_operands[] = {{input, 0, read, fused},
                                             {parameter, 0, read, one_head},
                                             {parameter, 1, read, one_head},
                                             {output, 0, write, fused},
                                             {output, 1, write, per_head}};
constexpr OperandRow query_key_squares_operands[] = {{input, 0, read, fused}, {output, 0, write, two_sums}};
constexpr OperandRow query_key_norm_operands[] = {{input, 0, read, fused},
                                                  {input, 1, read, two_sums},
                                                  {parameter, 0, read, query_row},
                                                  {parameter, 1, read, key_row},
                                                  {output, 0, write, fused}};
constexpr OperandRow linear_operands[] = {{input, 0, read, inner_matrix},
                                          {parameter, 0, read, weights},
                                          {parameter, 1, read, per_column, if_bias},
                                          {output, 0, write, matrix},
                                          {workspace, 0, update}};
constexpr OperandRow rotary_operands[] = {{input, 0, read, fused}, {output, 0, write, fused}};
constexpr OperandRow attention_operands[] = {{input, 0, read, fused},
                                             {output, 0, write, queries},
                                             {output, 1, write, per_query_head},
                                             {workspace, 0, update}};
constexpr OperandRow activation_operands[] = {{input, 0, read, matrix}, {output, 0, write, matrix}};
constexpr OperandRow gate_operands[] = {
    {input, 0, read, matrix}, {input, 1, read, matrix}, {output, 0, write, matrix}};
constexpr OperandRow scale_operands[] = {{input, 0, read, matrix}, {output, 0, write, matrix}};
constexpr OperandRow softcap_operands[] = {{input, 0, read, matrix}, {output, 0, write, matrix}};
constexpr OperandRow add_operands[] = {{input, 0, read, matrix},
                                       {input, 1, read, matrix, if_second},
                                       {parameter, 0, read, per_column, if_bias},
                                       {output, 0, write, matrix}};
constexpr OperandRow cross_entropy_max_operands[] = {{input, 0, read, matrix}, {output, 0, write, per_row}};
constexpr OperandRow cross_entropy_sums_operands[] = {{input, 0, read, matrix},
                                                      {input, 1, read, vocabulary_ids},
                                                      {input, 2, read, per_row},
                                                      {output, 0, write, two_per_row}};
constexpr OperandRow cross_entropy_loss_operands[] = {{input, 0, read, matrix},
                                                      {input, 1, read, vocabulary_ids},
                                                      {input, 2, read, per_row},
                                                      {input, 3, read, two_per_row},
                                                      {output, 0, update, one}};

constexpr OperandRow add_layer_norm_operands[] = {
    {input, 0, read, matrix},         {input, 1, read, matrix, if_second}, {parameter, 0, read, per_column, if_bias},
    {parameter, 1, read, per_column}, {parameter, 2, read, per_column},    {output, 0, write, matrix},
    {output, 1, write, matrix},       {output, 2, write, per_row},         {output, 3, write, per_row}};
constexpr OperandRow add_rms_norm_operands[] = {
    {input, 0, read, matrix},         {input, 1, read, matrix, if_second}, {parameter, 0, read, per_column, if_bias},
    {parameter, 1, read, per_column}, {output, 0, write, matrix},          {output, 1, write, matrix},
    {output, 2, write, per_row}};
// The two outputs may share storage: then nobody needs `before`, and y alone is written.
constexpr OperandRow linear_gelu_operands[] = {{input, 0, read, inner_matrix},
                                               {parameter, 0, read, weights},
                                               {parameter, 1, read, per_column, if_bias},
                                               {output, 0, write, matrix},
                                               {output, 1, write, matrix},
                                               {workspace, 0, update}};

constexpr OperandRow embedding_gradient_operands[] = {{output_gradient, 0, read, matrix},
                                                      {input, 0, read, vocabulary_ids},
                                                      {parameter_gradient, 0, update, in_fp32(vocabulary_table)}};
constexpr OperandRow add_position_gradient_operands[] = {{output_gradient, 0, read, matrix},
                                                         {parameter_gradient, 0, update, in_fp32(position_table)}};
constexpr OperandRow layer_norm_gradient_operands[] = {{output_gradient, 0, read, matrix},
                                                       {input, 0, read, matrix},
                                                       {parameter, 0, read, per_column},
                                                       {output, 1, read, per_row},
                                                       {output, 2, read, per_row},
                                                       {input_gradient, 0, write, matrix},
                                                       {parameter_gradient, 0, update, in_fp32(per_column)},
                                                       {parameter_gradient, 1, update, in_fp32(per_column)},
                                                       {workspace, 0, update}};
constexpr OperandRow rms_norm_gradient_operands[] = {{output_gradient, 0, read, matrix},
                                                     {input, 0, read, matrix},
                                                     {parameter, 0, read, per_column},
                                                     {output, 1, read, per_row},
                                                     {input_gradient, 0, write, matrix},
                                                     {parameter_gradient, 0, update, in_fp32(per_column)},
                                                     {workspace, 0, update}};
constexpr OperandRow head_norm_gradient_operands[] = {{output_gradient, 0, read, fused},
                                                      {input, 0, read, fused},
                                                      {parameter, 0, read, one_head},
                                                      {parameter, 1, read, one_head},
                                                      {output, 1, read, per_head},
                                                      {input_gradient, 0, write, fused},
                                                      {parameter_gradient, 0, update, in_fp32(one_head)},
                                                      {parameter_gradient, 1, update, in_fp32(one_head)},
                                                      {workspace, 0, update}};
constexpr OperandRow query_key_squares_gradient_operands[] = {
    {output_gradient, 0, read, two_sums}, {input, 0, read, fused}, {input_gradient, 0, write, fused}};
constexpr OperandRow query_key_norm_gradient_operands[] = {{output_gradient, 0, read, fused},
                                                           {input, 0, read, fused},
                                                           {input, 1, read, two_sums},
                                                           {parameter, 0, read, query_row},
                                                           {parameter, 1, read, key_row},
                                                           {input_gradient, 0, write, fused},
                                                           {input_gradient, 1, write, two_sums},
                                                           {parameter_gradient, 0, update, in_fp32(query_row)},
                                                           {parameter_gradient, 1, update, in_fp32(key_row)},
                                                           {workspace, 0, update}};
constexpr OperandRow linear_input_gradient_operands[] = {{output_gradient, 0, read, matrix},
                                                         {parameter, 0, read, weights},
                                                         {input_gradient, 0, write, inner_matrix},
                                                         {workspace, 0, update}};
constexpr OperandRow linear_weight_gradient_operands[] = {{output_gradient, 0, read, matrix},
                                                          {input, 0, read, inner_matrix},
                                                          {parameter_gradient, 0, update, in_fp32(weights)},
                                                          {parameter_gradient, 1, update, in_fp32(per_column), if_bias},
                                                          {workspace, 0, update}};
constexpr OperandRow rotary_gradient_operands[] = {{output_gradient, 0, read, fused},
                                                   {input_gradient, 0, write, fused}};
constexpr OperandRow attention_gradient_operands[] = {{output_gradient, 0, read, queries},
                                                      {input, 0, read, fused},
                                                      {output, 0, read, queries},
                                                      {output, 1, read, per_query_head},
                                                      {input_gradient, 0, write, fused},
                                                      {workspace, 0, update}};
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
constexpr OperandRow cross_entropy_gradient_operands[] = {{input, 0, read, matrix},
                                                          {input, 1, read, vocabulary_ids},
                                                          {input, 2, read, per_row},
                                                          {input, 3, read, two_per_row},
                                                          {input_gradient, 0, write, matrix},
                                                          {loss_scale, 0, read, scale_state, if_scaled}};
constexpr OperandRow linear_input_gradient_gelu_operands[] = {{output_gradient, 0, read, matrix},
                                                              {parameter, 0, read, weights},
                                                              {input, 0, read, inner_matrix},
                                                              {input_gradient, 0, write, inner_matrix},
                                                              {workspace, 0, update}};

// Around the step there is no forward op: sources only distinguish the operands.
constexpr OperandRow accumulate_operands[] = {{input, 0, read, flat}, {output, 0, update, flat}};
constexpr OperandRow fill_zero_operands[] = {{output, 0, write, flat}};
constexpr OperandRow copy_operands[] = {{input, 0, read, flat}, {output, 0, write, flat}};
constexpr OperandRow load_operands[] = {{output, 0, write, vocabulary_ids}};
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
// gradient, parameter, (momentum), (norm), (master), (loss scale)
constexpr OperandRow sgd_operands[] = {{input, 0, read, in_fp32(flat)},
                                       {parameter, 0, update, flat},
                                       {output, 0, update, in_fp32(flat), if_second},
                                       {input, 1, read, one, if_norm},
                                       {output, 1, update, in_fp32(flat), if_master},
                                       {loss_scale, 0, read, scale_state, if_scaled}};

// The local shape of forward ops (local_op.h) -----------------------------------------------------

void localize_embedding(const LocalOp& local, OpShape& shape) {
  const LocalParameter& table = local.parameters[0];
  shape.columns = table.columns.size;
  shape.begin = table.rows.begin;
  shape.valid = std::clamp<std::int64_t>(table.rows.whole - table.rows.begin, 0, table.rows.size);
}
void localize_linear(const LocalOp& local, OpShape& shape) {
  const LocalParameter& weight = local.parameters[0];
  shape.columns = weight.rows.size;
  shape.inner = weight.columns.size;
  shape.bias = local.op.parameters.size() > 1;
}
void localize_elementwise(const LocalOp& local, OpShape& shape) {
  shape.columns = local.output.size;
}
void localize_add(const LocalOp& local, OpShape& shape) {
  shape.columns = local.output.size;
  shape.second = local.op.inputs.size() > 1;
  shape.bias = !local.op.parameters.empty();
}
void localize_add_position(const LocalOp& local, OpShape& shape) {
  shape.columns = local.output.size;
  shape.sequence = local.sequence.size;
  shape.batch = local.batch;
  shape.begin = local.op.attributes.begin + local.sequence.begin;
}
// Ops on fused queries, keys and values: the input's granules are groups of one key/value head.
void localize_heads(const LocalOp& local, OpShape& shape) {
  const OpShape& of = local.op.attributes;
  const std::int64_t groups = local.input.whole / local.input.granule;
  const std::int64_t local_groups = local.input.size / local.input.granule;
  shape.columns = local.output.size;
  shape.sequence = local.sequence.size;
  shape.batch = local.batch;
  shape.heads = of.heads / groups * local_groups;
  shape.kv_heads = of.kv_heads / groups * local_groups;
  if (of.alibi != 0.0) {
    shape.all_heads = of.heads;
    shape.first_head = of.heads / groups * (local.input.begin / local.input.granule);
  }
  if (shape.window >= shape.sequence) shape.window = 0;  // the same work as without
}
void localize_query_key_norm(const LocalOp& local, OpShape& shape) {
  localize_heads(local, shape);
  shape.all_heads = local.op.attributes.heads;
}
void localize_cross_entropy(const LocalOp& local, OpShape& shape) {
  shape.columns = local.input.size;
  shape.begin = local.input.begin;
  shape.valid = std::clamp<std::int64_t>(local.input.whole - local.input.begin, 0, local.input.size);
  shape.scale = local.loss_weight;
}

// What the attributes of forward ops fix about widths, and their faults
// ----------------------------

std::int64_t fused_width(const OpShape& s) {
  return (s.heads + 2 * s.kv_heads) * s.head_dim;
}
std::vector<OperandWidth> attention_widths(const OpShape& s) {
  return {{input, 0, fused_width(s)}, {output, 0, s.heads * s.head_dim}};
}
std::vector<OperandWidth> rotary_widths(const OpShape& s) {
  return {{input, 0, fused_width(s)}, {output, 0, fused_width(s)}};
}
std::vector<OperandWidth> head_norm_widths(const OpShape& s) {
  return {{input, 0, fused_width(s)},
          {output, 0, fused_width(s)},
          {output, 1, s.heads + s.kv_heads},
          {parameter, 0, s.head_dim},
          {parameter, 1, s.head_dim}};
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

std::string rotary_fault(const OpShape& s) {
  if (s.rotary_dim % 2 == 0 && s.rotary_dim >= 0 && s.rotary_dim <= s.head_dim) return {};
  return fmt::format("turns {} features of heads of {}; expected an even number up to that", s.rotary_dim, s.head_dim);
}
std::string softcap_fault(const OpShape& s) {
  if (s.softcap > 0.0) return {};
  return fmt::format("its cap is {}; expected more than 0", s.softcap);
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
Product linear_weight_gradient_product(const OpShape& s, DataType) {
  const auto [r, c, k] = product_sizes_of(s);
  return {.m = c, .n = k, .k = r, .result = Bytes(8 * c * k)};
}

ModelProducts linear_model_products(const OpShape& s) {
  return {static_cast<double>(s.rows), static_cast<double>(s.columns) * static_cast<double>(s.inner)};
}
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

// The other parts of a measured kernel's shape ----------------------------------------------------

void with_second(OpShape& shape, DataType) {
  shape.second = true;
}
void with_bias(OpShape& shape, DataType) {
  shape.bias = true;
}
void with_table_of_gpt2(OpShape& shape, DataType) {
  shape.valid = 50257;
}
void with_silu(OpShape& shape, DataType) {
  shape.activation = ActivationKind::silu;
}
void with_decay_and_master(OpShape& shape, DataType type) {
  shape.weight_decay = true;
  shape.master = is_half(type);
}

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
     .localize = localize_embedding,
     .operands = embedding_operands,
     .gradients = embedding_gradients,
     .work = embedding_work,
     .measured_over = MeasuredOver::elementwise,
     .measured_with = with_table_of_gpt2},
    {.kind = OpKind::add_position,
     .name = "add_position",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_add_position,
     .operands = add_position_operands,
     .gradients = add_position_gradients,
     .passes_gradient = true,
     .in_place_read = 0,
     .in_place_write = 2,
     .work = add_position_work},
    {.kind = OpKind::layer_norm,
     .name = "layer_norm",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .operands = layer_norm_operands,
     .gradients = layer_norm_gradients,
     .work = layer_norm_work,
     .measured_over = MeasuredOver::elementwise},
    {.kind = OpKind::rms_norm,
     .name = "rms_norm",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .operands = rms_norm_operands,
     .gradients = rms_norm_gradients,
     .work = rms_norm_work,
     .measured_over = MeasuredOver::elementwise},
    {.kind = OpKind::head_norm,
     .name = "head_norm",
     .sharding = ShardingRule::heads,
     .localize = localize_heads,
     .widths = head_norm_widths,
     .operands = head_norm_operands,
     .gradients = head_norm_gradients,
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
     .work = query_key_norm_work,
     .made_of = OpKind::rms_norm,
     .measured_sizes = head_sizes},
    {.kind = OpKind::linear,
     .name = "linear",
     .sharding = ShardingRule::contraction,
     .localize = localize_linear,
     .operands = linear_operands,
     .gradients = linear_gradients,
     .work = linear_work,
     .cost = CostClass::product,
     .product = linear_product,
     .model_products = linear_model_products,
     .measured_over = MeasuredOver::products,
     .measured_sizes = product_sizes,
     .cpu_workspace = linear_cpu_workspace,
     .cuda_workspace = matrix_cuda_workspace},
    {.kind = OpKind::rotary,
     .name = "rotary",
     .sharding = ShardingRule::heads,
     .localize = localize_heads,
     .widths = rotary_widths,
     .fault = rotary_fault,
     .operands = rotary_operands,
     .gradients = rotary_gradients,
     .in_place_read = 0,
     .in_place_write = 1,
     .work = rotary_work,
     .measured_over = MeasuredOver::heads,
     .measured_sizes = head_sizes},
    {.kind = OpKind::attention,
     .name = "attention",
     .sharding = ShardingRule::heads,
     .localize = localize_heads,
     .widths = attention_widths,
     .operands = attention_operands,
     .gradients = attention_gradients,
     .work = attention_work,
     .cost = CostClass::attention,
     .model_products = attention_model_products,
     .unmeasured_share = attention_share,
     .measured_over = MeasuredOver::attention,
     .measured_sizes = head_sizes,
     .cpu_workspace = attention_cpu_workspace},
    {.kind = OpKind::activation,
     .name = "activation",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .operands = activation_operands,
     .gradients = activation_gradients,
     .in_place_read = 0,
     .in_place_write = 1,
     .work = activation_work,
     .measured_over = MeasuredOver::elementwise},
    {.kind = OpKind::gate,
     .name = "gate",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .operands = gate_operands,
     .gradients = gate_gradients,
     .in_place_read = 0,
     .in_place_write = 2,
     .work = gate_work,
     .measured_over = MeasuredOver::elementwise,
     .measured_with = with_silu},
    {.kind = OpKind::scale,
     .name = "scale",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .operands = scale_operands,
     .gradients = scale_gradients,
     .in_place_read = 0,
     .in_place_write = 1,
     .work = scale_work,
     .made_of = OpKind::copy},
    {.kind = OpKind::softcap,
     .name = "softcap",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .fault = softcap_fault,
     .operands = softcap_operands,
     .gradients = softcap_gradients,
     .in_place_read = 0,
     .in_place_write = 1,
     .work = softcap_work,
     .made_of = OpKind::activation},
    {.kind = OpKind::add,
     .name = "add",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_add,
     .operands = add_operands,
     .gradients = add_gradients,
     .passes_gradient = true,
     .in_place_read = 1,
     .in_place_write = 3,
     .work = add_work,
     .cost = CostClass::streaming,
     .measured_over = MeasuredOver::elementwise,
     .measured_with = with_second},
    {.kind = OpKind::cross_entropy_max,
     .name = "cross_entropy_max",
     .sharding = ShardingRule::vocabulary_max,
     .localize = localize_cross_entropy,
     .operands = cross_entropy_max_operands,
     .work = cross_entropy_max_work,
     .measured_over = MeasuredOver::vocabulary},
    {.kind = OpKind::cross_entropy_sums,
     .name = "cross_entropy_sums",
     .sharding = ShardingRule::vocabulary_sum,
     .localize = localize_cross_entropy,
     .operands = cross_entropy_sums_operands,
     .work = cross_entropy_sums_work,
     .measured_over = MeasuredOver::vocabulary},
    {.kind = OpKind::cross_entropy_loss,
     .name = "cross_entropy_loss",
     .sharding = ShardingRule::vocabulary_loss,
     .localize = localize_cross_entropy,
     .operands = cross_entropy_loss_operands,
     .gradients = cross_entropy_loss_gradients,
     .work = cross_entropy_loss_work},

    {.kind = OpKind::add_layer_norm,
     .name = "add_layer_norm",
     .operands = add_layer_norm_operands,
     .in_place_read = 1,
     .in_place_write = 5,
     .work = add_layer_norm_work,
     .made_of = OpKind::layer_norm,
     .measured_over = MeasuredOver::elementwise,
     .measured_with = with_second},
    {.kind = OpKind::add_rms_norm,
     .name = "add_rms_norm",
     .operands = add_rms_norm_operands,
     .in_place_read = 1,
     .in_place_write = 4,
     .work = add_rms_norm_work,
     .made_of = OpKind::rms_norm,
     .measured_over = MeasuredOver::elementwise,
     .measured_with = with_second},
    {.kind = OpKind::linear_gelu,
     .name = "linear_gelu",
     .operands = linear_gelu_operands,
     .work = linear_gelu_work,
     .cost = CostClass::product,
     .product = linear_gelu_product,
     .made_of = OpKind::linear,
     .measured_over = MeasuredOver::products,
     .measured_sizes = product_sizes,
     .cpu_workspace = linear_cpu_workspace,
     .cuda_workspace = matrix_cuda_workspace},

    {.kind = OpKind::embedding_gradient,
     .name = "embedding_gradient",
     .operands = embedding_gradient_operands,
     .work = embedding_gradient_work,
     .measured_over = MeasuredOver::elementwise,
     .measured_with = with_table_of_gpt2},
    {.kind = OpKind::add_position_gradient,
     .name = "add_position_gradient",
     .operands = add_position_gradient_operands,
     .work = add_position_gradient_work},
    {.kind = OpKind::layer_norm_gradient,
     .name = "layer_norm_gradient",
     .operands = layer_norm_gradient_operands,
     .accumulates = true,
     .work = layer_norm_gradient_work,
     .measured_over = MeasuredOver::elementwise,
     .cuda_workspace = layer_norm_gradient_cuda_workspace},
    {.kind = OpKind::rms_norm_gradient,
     .name = "rms_norm_gradient",
     .operands = rms_norm_gradient_operands,
     .accumulates = true,
     .work = rms_norm_gradient_work,
     .measured_over = MeasuredOver::elementwise,
     .cuda_workspace = rms_norm_gradient_cuda_workspace},
    {.kind = OpKind::head_norm_gradient,
     .name = "head_norm_gradient",
     .operands = head_norm_gradient_operands,
     .in_place_read = 0,
     .in_place_write = 5,
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
     .in_place_read = 0,
     .in_place_write = 5,
     .work = query_key_norm_gradient_work,
     .made_of = OpKind::rms_norm_gradient,
     .measured_sizes = head_sizes,
     .cuda_workspace = query_key_norm_gradient_cuda_workspace},
    {.kind = OpKind::linear_input_gradient,
     .name = "linear_input_gradient",
     .operands = linear_input_gradient_operands,
     .accumulates = true,
     .work = linear_input_gradient_work,
     .cost = CostClass::product,
     .product = linear_input_gradient_product,
     .measured_over = MeasuredOver::products,
     .measured_sizes = product_sizes,
     .cpu_workspace = linear_input_gradient_cpu_workspace,
     .cuda_workspace = matrix_cuda_workspace},
    {.kind = OpKind::linear_weight_gradient,
     .name = "linear_weight_gradient",
     .operands = linear_weight_gradient_operands,
     .work = linear_weight_gradient_work,
     .cost = CostClass::product,
     .product = linear_weight_gradient_product,
     .measured_over = MeasuredOver::products,
     .measured_sizes = product_sizes,
     .cpu_workspace = linear_weight_gradient_cpu_workspace,
     .cuda_workspace = linear_weight_gradient_cuda_workspace},
    {.kind = OpKind::rotary_gradient,
     .name = "rotary_gradient",
     .operands = rotary_gradient_operands,
     .in_place_read = 0,
     .in_place_write = 1,
     .work = rotary_work,
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
    {.kind = OpKind::activation_gradient,
     .name = "activation_gradient",
     .operands = activation_gradient_operands,
     .in_place_read = 0,
     .in_place_write = 2,
     .work = activation_gradient_work,
     .measured_over = MeasuredOver::elementwise},
    {.kind = OpKind::gate_gradient,
     .name = "gate_gradient",
     .operands = gate_gradient_operands,
     .in_place_read = 0,
     .in_place_write = 3,
     .work = gate_gradient_work,
     .measured_over = MeasuredOver::elementwise,
     .measured_with = with_silu},
    {.kind = OpKind::scale_gradient,
     .name = "scale_gradient",
     .operands = scale_gradient_operands,
     .in_place_read = 0,
     .in_place_write = 1,
     .work = scale_work,
     .made_of = OpKind::copy},
    {.kind = OpKind::softcap_gradient,
     .name = "softcap_gradient",
     .operands = softcap_gradient_operands,
     .in_place_read = 0,
     .in_place_write = 2,
     .work = softcap_gradient_work,
     .made_of = OpKind::activation_gradient},
    {.kind = OpKind::bias_gradient,
     .name = "bias_gradient",
     .operands = bias_gradient_operands,
     .work = bias_gradient_work,
     .measured_over = MeasuredOver::elementwise,
     .measured_with = with_bias,
     .cuda_workspace = bias_gradient_cuda_workspace},
    {.kind = OpKind::cross_entropy_gradient,
     .name = "cross_entropy_gradient",
     .operands = cross_entropy_gradient_operands,
     .in_place_read = 0,
     .in_place_write = 4,
     .work = cross_entropy_gradient_work,
     .measured_over = MeasuredOver::vocabulary},
    {.kind = OpKind::linear_input_gradient_gelu,
     .name = "linear_input_gradient_gelu",
     .operands = linear_input_gradient_gelu_operands,
     .work = linear_input_gradient_gelu_work,
     .cost = CostClass::product,
     .product = linear_input_gradient_gelu_product,
     .made_of = OpKind::linear_input_gradient,
     .measured_over = MeasuredOver::products,
     .measured_sizes = product_sizes,
     .cpu_workspace = linear_input_gradient_cpu_workspace,
     .cuda_workspace = matrix_cuda_workspace},

    {.kind = OpKind::accumulate,
     .name = "accumulate",
     .operands = accumulate_operands,
     .work = accumulate_work,
     .cost = CostClass::streaming,
     .measured_over = MeasuredOver::flat,
     .measured_sizes = flat_sizes},
    {.kind = OpKind::fill_zero,
     .name = "fill_zero",
     .operands = fill_zero_operands,
     .work = fill_zero_work,
     .measured_over = MeasuredOver::flat,
     .measured_sizes = flat_sizes},
    {.kind = OpKind::copy,
     .name = "copy",
     .operands = copy_operands,
     .work = copy_work,
     .cost = CostClass::streaming,
     .measured_over = MeasuredOver::flat,
     .measured_sizes = flat_sizes},
    {.kind = OpKind::load_tokens,
     .name = "load_tokens",
     .operands = load_operands,
     .work = load_work,
     .cost = CostClass::loading},
    {.kind = OpKind::load_targets,
     .name = "load_targets",
     .operands = load_operands,
     .work = load_work,
     .cost = CostClass::loading},
    {.kind = OpKind::sum_squares,
     .name = "sum_squares",
     .operands = sum_squares_operands,
     .work = sum_squares_work,
     .measured_over = MeasuredOver::flat_fp32,
     .measured_sizes = flat_sizes,
     .cuda_workspace = sum_squares_cuda_workspace},
    {.kind = OpKind::adamw,
     .name = "adamw",
     .operands = adamw_operands,
     .work = adamw_work,
     .measured_over = MeasuredOver::flat,
     .measured_sizes = flat_sizes,
     .measured_with = with_decay_and_master},
    {.kind = OpKind::sgd,
     .name = "sgd",
     .operands = sgd_operands,
     .work = sgd_work,
     .measured_sizes = flat_sizes},
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

DataType type_of(OperandContent content, DataType kernel_type) {
  switch (content) {
    case OperandContent::values: return in_memory(kernel_type);
    case OperandContent::fp32:
    case OperandContent::non_negative: return DataType::fp32;
    case OperandContent::ids: return DataType::int32;
  }
  return kernel_type;
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
