#include "planner/graph/op_kind.h"

#include <array>

#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"
#include "planner/graph/ops/op_rows.h"

namespace parplan {
namespace {

constexpr std::span<const OpRow> (*families[])() = {
    embedding_rows,   norm_rows, query_key_norm_rows, product_rows,   attention_rows,
    elementwise_rows, loss_rows, movement_rows,       optimizer_rows, foreign_rows,
    row_move_rows,    packed_attention_rows,
};

// In the order of OpKind, one row for each.
using OpTable = std::array<OpRow, count_of<OpKind>>;

OpTable join_families() {
  OpTable table;
  for (const auto family : families)
    for (const OpRow& row : family()) {
      OpRow& place = table.at(index_of(row.kind));
      PARPLAN_ASSERT(place.name.empty(), fmt::format("op kind {} has two rows", row.name));
      place = row;
    }
  for (std::size_t kind = 0; kind < table.size(); ++kind)
    PARPLAN_ASSERT(!table[kind].name.empty(), fmt::format("op kind {} has no row", kind));
  return table;
}

const OpTable& op_table() {
  static const OpTable table = join_families();
  return table;
}

}  // namespace

DataType type_of(OperandContent content, DataType kernel_type) {
  switch (content) {
    case OperandContent::values: return in_memory(kernel_type);
    case OperandContent::fp32:
    case OperandContent::non_negative:
    case OperandContent::block_scales:
      return DataType::fp32;
    case OperandContent::ids: return DataType::int32;
    case OperandContent::mask:
    case OperandContent::codes:
      return DataType::uint8;
  }
  return kernel_type;
}

bool is_present(const OperandRow& operand, const OpShape& shape, bool workspace) {
  if (operand.source == OperandSource::workspace && !workspace) return false;
  return (operand.optional == nullptr || shape.*operand.optional) &&
         (operand.omitted == nullptr || !(shape.*operand.omitted));
}

int operand_count(const OpRow& row, const OpShape& shape, bool workspace) {
  int count = 0;
  for (const OperandRow& operand : row.operands) count += is_present(operand, shape, workspace) ? 1 : 0;
  return count;
}

int launches(OpKind kind, const OpShape& shape) {
  const OpRow& row = row_of(kind);
  return row.launches ? row.launches(shape) : 1;
}

std::span<const OpRow> op_rows() {
  return op_table();
}

const OpRow& row_of(OpKind kind) {
  PARPLAN_ASSERT(index_of(kind) < count_of<OpKind>, fmt::format("op kind {}", static_cast<int>(kind)));
  return op_table()[index_of(kind)];
}

}  // namespace parplan
