// Attention where the ranks of the context axis hold chunks of the sequence: each gathers the keys
// and values of all, and the gradients that it has of them go back.
#include <fmt/format.h>

#include "planner/program/segment_lowering.h"

namespace parplan {
namespace {

// The keys and values among the columns of a fused row, which holds for each key/value head its
// queries, the key and the value.
OpShape key_value_columns(const OpShape& attention) {
  const std::int64_t queries = attention.heads / attention.kv_heads * attention.head_dim;
  return {.rows = attention.sequence * attention.batch * attention.kv_heads,
          .columns = 2 * attention.head_dim,
          .inner = queries + 2 * attention.head_dim,
          .begin = queries};
}

std::string name_of_keys(const SegmentLowering& lowering, const TrainingOp& op, const char* what) {
  return fmt::format("{}.{}", lowering.op(op).name, what);
}

}  // namespace

Value gather_keys(SegmentLowering& lowering, const TrainingOp& op, const OpShape& shape, const Value& qkv,
                  Label label) {
  const OpShape columns = key_value_columns(shape);
  const DataType type = in_memory(lowering.of.context.precision);
  const Value own = scratch(lowering, columns.rows * columns.columns * size_of(type));
  emit_kernel(lowering, OpKind::take_columns, columns, label, name_of_keys(lowering, op, "keys"),
              {{qkv, Access::read}, {own, Access::write}});
  const Value all = scratch(lowering, own.bytes * shape.chunks.ranks);
  emit_collective(lowering, InstructionKind::all_gather, Axis::cp, type, name_of_keys(lowering, op, "keys.all-gather"),
                  {{own, Access::read}, {all, Access::write}});
  return all;
}

void return_key_gradients(SegmentLowering& lowering, const TrainingOp& op, const OpShape& shape,
                          const Value& gradients, const Value& qkv_gradient) {
  emit_collective(lowering, InstructionKind::reduce_scatter, Axis::cp, in_memory(lowering.of.context.precision),
                  name_of_keys(lowering, op, "keys.reduce-scatter"), {{gradients, Access::update}});
  Value own = gradients;
  own.bytes /= shape.chunks.ranks;
  own.offset += own.bytes * shape.chunks.rank;
  emit_kernel(lowering, OpKind::put_columns, key_value_columns(shape), Label::compute,
              name_of_keys(lowering, op, "keys"), {{own, Access::read}, {qkv_gradient, Access::update}});
}

}  // namespace parplan
