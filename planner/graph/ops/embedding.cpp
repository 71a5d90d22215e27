#include "planner/graph/ops/op_rows.h"

#include <algorithm>

#include "planner/graph/ops/row_parts.h"

namespace parplan {
namespace {

using enum OperandSource;
using enum Access;

// Operands ----------------------------------------------------------------------------------------

// Tables: rows of the vocabulary that are not padding, and positions of the sequence.
constexpr OperandSize vocabulary_table{[](const OpShape& s) { return s.valid * s.columns; }};
constexpr OperandSize position_table{[](const OpShape& s) { return s.sequence * s.columns; }};

constexpr OperandRow embedding_operands[] = {
    {input, 0, read, vocabulary_ids}, {parameter, 0, read, vocabulary_table}, {output, 0, write, matrix}};
constexpr OperandSize colours{matrix.elements, OperandContent::ids};
constexpr OperandRow normalize_pixels_operands[] = {{input, 0, read, colours}, {output, 0, write, matrix}};
constexpr OperandRow add_position_operands[] = {
    {input, 0, read, matrix}, {parameter, 0, read, position_table}, {output, 0, write, matrix}};

constexpr OperandRow embedding_gradient_operands[] = {{output_gradient, 0, read, matrix},
                                                      {input, 0, read, vocabulary_ids},
                                                      {parameter_gradient, 0, update, in_fp32(vocabulary_table)}};
constexpr OperandRow add_position_gradient_operands[] = {{output_gradient, 0, read, matrix},
                                                         {parameter_gradient, 0, update, in_fp32(position_table)}};

constexpr OpKind embedding_gradients[] = {OpKind::embedding_gradient};
constexpr OpKind add_position_gradients[] = {OpKind::add_position_gradient};

// Local shapes ------------------------------------------------------------------------------------

void localize_embedding(const LocalOp& local, OpShape& shape) {
  const LocalParameter& table = local.parameters[0];
  shape.columns = table.columns.size;
  shape.begin = table.rows.begin;
  shape.valid = std::clamp<std::int64_t>(table.rows.whole - table.rows.begin, 0, table.rows.size);
}
void localize_add_position(const LocalOp& local, OpShape& shape) {
  shape.columns = local.output.size;
  shape.sequence = local.sequence.size;
  shape.batch = local.batch;
  shape.chunks = local.chunks;
  shape.begin = local.op.attributes.begin + local.sequence.begin;
}

void with_table_of_gpt2(OpShape& shape, DataType) {
  shape.valid = 50257;
}

// Work --------------------------------------------------------------------------------------------

OpWork embedding_work(const OpShape& s, DataType type) {  // only the rows of the table that are looked up
  return {Flops(0), Bytes(4 * s.rows + 2 * s.rows * s.columns * e(type))};
}
OpWork normalize_pixels_work(const OpShape& s, DataType type) {
  return {flops(2 * s.rows * s.columns), Bytes(s.rows * s.columns * (4 + e(type)))};
}
OpWork add_position_work(const OpShape& s, DataType type) {
  return {flops(s.rows * s.columns), Bytes((2 * s.rows + s.sequence) * s.columns * e(type))};
}
OpWork embedding_gradient_work(const OpShape& s, DataType type) {
  return {flops(s.rows * s.columns), Bytes(4 * s.rows + s.rows * s.columns * (e(type) + 8))};
}
OpWork add_position_gradient_work(const OpShape& s, DataType type) {
  return {flops(s.rows * s.columns), Bytes(s.rows * s.columns * e(type) + 8 * s.sequence * s.columns)};
}

// Rows --------------------------------------------------------------------------------------------

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
    {.kind = OpKind::normalize_pixels,
     .name = "normalize_pixels",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_elementwise,
     .operands = normalize_pixels_operands,
     .work = normalize_pixels_work,
     .made_of = OpKind::copy},
    {.kind = OpKind::add_position,
     .name = "add_position",
     .sharding = ShardingRule::tokenwise,
     .localize = localize_add_position,
     .operands = add_position_operands,
     .gradients = add_position_gradients,
     .passes_gradient = true,
     .in_place = InPlace{.read = 0, .write = 2},
     .work = add_position_work},
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
};

}  // namespace

std::span<const OpRow> embedding_rows() {
  return rows;
}

}  // namespace parplan
