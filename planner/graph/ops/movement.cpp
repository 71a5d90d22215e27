#include "planner/graph/ops/op_rows.h"

#include "planner/graph/ops/row_parts.h"

namespace parplan {
namespace {

using enum OperandSource;
using enum Access;

// Operands ----------------------------------------------------------------------------------------

// Around the step there is no forward op: sources only distinguish the operands.
constexpr OperandRow accumulate_operands[] = {{input, 0, read, flat}, {output, 0, update, flat}};
constexpr OperandRow fill_zero_operands[] = {{output, 0, write, flat}};
constexpr OperandRow copy_operands[] = {{input, 0, read, flat}, {output, 0, write, flat}};
constexpr OperandSize blocks{[](const OpShape& s) { return s.rows * s.inner * s.columns; }};
constexpr OperandRow transpose_blocks_operands[] = {{input, 0, read, blocks}, {output, 0, write, blocks}};
constexpr OperandSize all_columns{[](const OpShape& s) { return s.rows * s.inner; }};
constexpr OperandRow take_columns_operands[] = {{input, 0, read, all_columns}, {output, 0, write, matrix}};
constexpr OperandRow put_columns_operands[] = {{input, 0, read, matrix}, {output, 0, update, all_columns}};
constexpr OperandRow load_operands[] = {{output, 0, write, vocabulary_ids}};

// Work --------------------------------------------------------------------------------------------

OpWork accumulate_work(const OpShape& s, DataType type) {
  return {flops(s.rows), Bytes(s.rows * (2 * e(type) + e(s.in_half ? DataType::bf16 : type)))};
}
OpWork fill_zero_work(const OpShape& s, DataType type) {
  return {Flops(0), Bytes(s.rows * e(type))};
}
OpWork copy_work(const OpShape& s, DataType type) {
  return {Flops(0), Bytes(2 * s.rows * e(type))};
}
OpWork transpose_blocks_work(const OpShape& s, DataType type) {
  return {Flops(0), Bytes(2 * s.rows * s.inner * s.columns * e(type))};
}
OpWork move_columns_work(const OpShape& s, DataType type) {
  return {Flops(0), Bytes(2 * s.rows * s.columns * e(type))};
}
OpWork load_work(const OpShape& s, DataType) {
  return {Flops(0), Bytes(4 * s.rows)};
}

// Rows --------------------------------------------------------------------------------------------

constexpr OpRow rows[] = {
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
    {.kind = OpKind::transpose_blocks,
     .name = "transpose_blocks",
     .operands = transpose_blocks_operands,
     .work = transpose_blocks_work,
     .made_of = OpKind::copy},
    {.kind = OpKind::take_columns,
     .name = "take_columns",
     .operands = take_columns_operands,
     .work = move_columns_work,
     .made_of = OpKind::copy},
    {.kind = OpKind::put_columns,
     .name = "put_columns",
     .operands = put_columns_operands,
     .work = move_columns_work,
     .made_of = OpKind::copy},
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
};

}  // namespace

std::span<const OpRow> movement_rows() {
  return rows;
}

}  // namespace parplan
