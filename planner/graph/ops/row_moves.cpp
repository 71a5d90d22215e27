#include "planner/graph/ops/op_rows.h"

#include <fmt/format.h>

#include "planner/graph/ops/row_parts.h"

// Activations that hold rows of several sequences, one after the other, as those of an
// encoder-decoder do: what takes rows out, puts them back and appends a table. Positions come first
// in memory, so rows that follow one another are one piece.
namespace parplan {
namespace {

using enum OperandSource;
using enum Access;

// Operands ----------------------------------------------------------------------------------------

std::int64_t moved_elements(const OpShape& s) {
  return s.sequence * s.batch * s.columns;
}
constexpr OperandSize moved{moved_elements};
constexpr OperandSize table{[](const OpShape& s) { return s.inner; }};
constexpr OperandSize with_table{[](const OpShape& s) { return s.rows * s.columns + moved_elements(s); }};

constexpr OperandRow take_rows_operands[] = {{input, 0, read, matrix}, {output, 0, write, moved}};
constexpr OperandRow put_rows_operands[] = {
    {input, 0, read, matrix}, {input, 1, read, moved}, {output, 0, write, matrix}};
constexpr OperandRow append_rows_operands[] = {
    {input, 0, read, matrix}, {parameter, 0, read, table}, {output, 0, write, with_table}};

constexpr OperandRow take_rows_gradient_operands[] = {{output_gradient, 0, read, moved},
                                                      {input_gradient, 0, write, matrix}};
constexpr OperandRow put_rows_gradient_operands[] = {
    {output_gradient, 0, read, matrix}, {input_gradient, 0, write, matrix}, {input_gradient, 1, write, moved}};
constexpr OperandRow append_rows_gradient_operands[] = {
    {output_gradient, 0, read, with_table}, {input_gradient, 0, write, matrix}, of_first(in_fp32(table))};

constexpr OpKind take_rows_gradients[] = {OpKind::take_rows_gradient};
constexpr OpKind put_rows_gradients[] = {OpKind::put_rows_gradient};
constexpr OpKind append_rows_gradients[] = {OpKind::append_rows_gradient};

// Local shapes and faults -------------------------------------------------------------------------

void localize_rows(const LocalOp& local, OpShape& shape) {
  shape.columns = local.output.size;
  shape.batch = local.batch;
}
void localize_append(const LocalOp& local, OpShape& shape) {
  localize_rows(local, shape);
  shape.inner = local.parameters[0].rows.size * local.parameters[0].columns.size;
}

// Work --------------------------------------------------------------------------------------------

OpWork take_rows_work(const OpShape& s, DataType type) {
  return {Flops(0), Bytes(2 * moved_elements(s) * e(type))};
}
// Where rows are added, they alone are touched.
OpWork take_rows_gradient_work(const OpShape& s, DataType type) {
  if (s.accumulate) return {flops(moved_elements(s)), Bytes(3 * moved_elements(s) * e(type))};
  return {Flops(0), Bytes((moved_elements(s) + s.rows * s.columns) * e(type))};
}
OpWork put_rows_work(const OpShape& s, DataType type) {
  return {Flops(0), Bytes(2 * s.rows * s.columns * e(type))};
}
OpWork put_rows_gradient_work(const OpShape& s, DataType type) {
  return {Flops(0), Bytes((2 * s.rows * s.columns + moved_elements(s)) * e(type))};
}
OpWork append_rows_work(const OpShape& s, DataType type) {
  return {Flops(0), Bytes((2 * s.rows * s.columns + moved_elements(s) + s.inner) * e(type))};
}
OpWork append_rows_gradient_work(const OpShape& s, DataType type) {
  return {flops(s.inner * s.batch), Bytes((2 * s.rows * s.columns + s.inner * s.batch) * e(type) + 8 * s.inner)};
}

// Rows --------------------------------------------------------------------------------------------

constexpr OpRow rows[] = {
    {.kind = OpKind::take_rows,
     .name = "take_rows",
     .sharding = ShardingRule::rows,
     .localize = localize_rows,
     .operands = take_rows_operands,
     .gradients = take_rows_gradients,
     .work = take_rows_work,
     .made_of = OpKind::copy},
    {.kind = OpKind::put_rows,
     .name = "put_rows",
     .sharding = ShardingRule::rows,
     .localize = localize_rows,
     .operands = put_rows_operands,
     .gradients = put_rows_gradients,
     .in_place = InPlace{.read = 0, .write = 2},
     .work = put_rows_work,
     .made_of = OpKind::copy},
    {.kind = OpKind::append_rows,
     .name = "append_rows",
     .sharding = ShardingRule::rows,
     .localize = localize_append,
     .operands = append_rows_operands,
     .gradients = append_rows_gradients,
     .work = append_rows_work,
     .made_of = OpKind::copy},
    {.kind = OpKind::take_rows_gradient,
     .name = "take_rows_gradient",
     .operands = take_rows_gradient_operands,
     .accumulates = true,
     .work = take_rows_gradient_work,
     .made_of = OpKind::copy},
    {.kind = OpKind::put_rows_gradient,
     .name = "put_rows_gradient",
     .operands = put_rows_gradient_operands,
     .in_place = InPlace{.read = 0, .write = 1},
     .work = put_rows_gradient_work,
     .made_of = OpKind::copy},
    {.kind = OpKind::append_rows_gradient,
     .name = "append_rows_gradient",
     .operands = append_rows_gradient_operands,
     .work = append_rows_gradient_work,
     .made_of = OpKind::copy},
};

}  // namespace

std::span<const OpRow> row_move_rows() {
  return rows;
}

}  // namespace parplan
