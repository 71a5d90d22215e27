// The values of a Segment under construction: where they lie, how one layout becomes another, and
// the instructions that do it.
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"
#include "planner/program/segment_lowering.h"
#include "planner/program/workspace.h"

namespace parplan {
namespace {

int place_of(SegmentLowering& lowering, const Value& value) {
  const Storage& storage = lowering.storages[value.storage];
  const bool temporary = storage.binding == binding::scratch;
  const auto [found, inserted] =
      lowering.place_of.try_emplace({storage.binding, temporary ? std::optional(value.storage) : std::nullopt},
                                    static_cast<int>(lowering.places.size()));
  if (!inserted) return found->second;
  lowering.places.push_back({storage.binding, 0, temporary ? storage.bytes : 0});
  lowering.temporary.push_back(temporary);
  return found->second;
}

void emit(SegmentLowering& lowering, Instruction instruction, const std::vector<Use>& uses) {
  for (const Use& use : uses) {
    const Storage& storage = lowering.storages[use.value.storage];
    const std::int64_t offset = use.value.offset + (storage.binding == binding::scratch ? 0 : storage.offset);
    instruction.operands.push_back({place_of(lowering, use.value), offset, use.value.bytes, use.access});
  }
  lowering.segment.instructions.push_back(std::move(instruction));
}

bool works_in_place(Redistribution step) {
  return step == Redistribution::all_reduce_sum || step == Redistribution::all_reduce_max ||
         step == Redistribution::reduce_scatter;
}

// A tensor as rows of the dims before one dim, and columns of this and the dims after it.
struct Matrix {
  std::int64_t rows = 1;
  std::int64_t columns = 1;
};
Matrix matrix_of(const Tensor& tensor, const TensorLayout& layout, Dim dim, const BlockContext& context) {
  Matrix matrix;
  bool in_columns = false;
  for (const TensorDim& d : tensor.dims) {
    in_columns = in_columns || d.dim == dim;
    (in_columns ? matrix.columns : matrix.rows) *= local_size(d, layout, context);
  }
  PARPLAN_ASSERT(in_columns, fmt::format("{} has no {}", tensor.name, name(dim)));
  return matrix;
}

// One step of a redistribution of one tensor.
struct Move {
  DataType type{};
  std::string what;
  Axis axis{};
  int ranks = 1;
  int at = 0;  // this rank's place along the axis
};

Value chunk_of(const Move& move, const Value& value) {
  const std::int64_t element = size_of(move.type), elements = value.bytes / element;
  const std::int64_t begin = chunk_begin(elements, move.ranks, move.at);
  const std::int64_t end = chunk_begin(elements, move.ranks, move.at + 1);
  return {value.storage, value.offset + begin * element, (end - begin) * element};
}

Value with_blocks_transposed(SegmentLowering& lowering, const Move& move, const Value& value, const OpShape& shape) {
  const Value result = scratch(lowering, value.bytes);
  emit_kernel(lowering, OpKind::transpose_blocks, shape, Label::compute, move.what,
              {{value, Access::read}, {result, Access::write}});
  lowering.segment.instructions.back().type = move.type;
  return result;
}

// Collectives move contiguous chunks. Chunks along an inner dim are packed before, [rows, ranks,
// columns] -> [ranks, rows, columns], and unpacked after: the other way round.
Value packed(SegmentLowering& lowering, const Move& move, const Value& value, const Matrix& matrix) {
  if (matrix.rows == 1) return value;
  PARPLAN_ASSERT(matrix.columns % move.ranks == 0, fmt::format("{}: {} columns", move.what, matrix.columns));
  return with_blocks_transposed(
      lowering, move, value, {.rows = matrix.rows, .columns = matrix.columns / move.ranks, .inner = move.ranks});
}
Value unpacked(SegmentLowering& lowering, const Move& move, const Value& value, const Matrix& matrix) {
  if (matrix.rows == 1) return value;
  PARPLAN_ASSERT(matrix.columns % move.ranks == 0, fmt::format("{}: {} columns", move.what, matrix.columns));
  return with_blocks_transposed(
      lowering, move, value, {.rows = move.ranks, .columns = matrix.columns / move.ranks, .inner = matrix.rows});
}

// The rows that an engine copies before it scatters them, or behind their gather, though they lie
// as a collective moves them here.
Value copied_rows(SegmentLowering& lowering, const Move& move, const Value& value, Dim dim) {
  if (!lowering.of.context.copies_rows || move.axis != Axis::tp || dim != Dim::sequence) return value;
  const Value copied = scratch(lowering, value.bytes);
  emit_copy(lowering, move.type, Label::compute, move.what, value, copied);
  return copied;
}

// A dim is cut into the chunks of an axis, or put together from them, only while no axis cuts
// inside these chunks.
void check_cut(const Move& move, const TensorLayout& layout, Dim dim) {
  const std::span<const Axis> order = cutting_order(dim);
  for (auto other = std::ranges::find(order, move.axis) + 1; other != order.end(); ++other)
    PARPLAN_ASSERT(layout[*other] != shard(dim),
                   fmt::format("{} over {}: {} cuts {} inside", move.what, name(move.axis), name(*other), name(dim)));
}

// Ranks that hold copies of a granule's end do not hold chunks of the dim.
void check_chunks(const Move& move, const Tensor& tensor, const TensorLayout& layout, Dim dim,
                  const BlockContext& context) {
  for (const TensorDim& d : tensor.dims)
    PARPLAN_ASSERT(d.dim != dim || d.shared == 0 || shards_of_granule(d, shards_of(dim, layout, context)) == 1,
                   fmt::format("{} over {}: ranks hold copies", move.what, name(move.axis)));
}

// The value `value` of tensor `id`, laid out as `from`, after one step, which leaves it laid out as
// `to`.
Value redistributed(SegmentLowering& lowering, const Value& value, TensorId id, const RedistributionStep& step,
                    const TensorLayout& from, const TensorLayout& to) {
  const Tensor& tensor = lowering.tensor(id);
  const BlockContext& context = lowering.of.context;
  const Move move{.type = type_of(tensor, context.precision),
                  .what = fmt::format("{}.{}", tensor.name, name(step.redistribution)),
                  .axis = step.axis,
                  .ranks = context.layout.degree[step.axis],
                  .at = context.at[step.axis]};
  const auto in_place = [&](InstructionKind kind, const Value& whole) {
    emit_collective(lowering, kind, step.axis, move.type, move.what, {{whole, Access::update}});
    return whole;
  };
  const auto moved = [&](InstructionKind kind, const Value& read, std::int64_t bytes) {
    const Value result = scratch(lowering, bytes);
    emit_collective(lowering, kind, step.axis, move.type, move.what,
                    {{read, Access::read}, {result, Access::write}});
    return result;
  };
  // The tensor before the step, by the dim that the step cuts, and after it, by the dim that the
  // step puts together.
  const auto to_cut = [&] {
    check_cut(move, from, to[step.axis].dim);
    check_chunks(move, tensor, to, to[step.axis].dim, context);
    return matrix_of(tensor, from, to[step.axis].dim, context);
  };
  const auto put_together = [&] {
    check_cut(move, to, from[step.axis].dim);
    check_chunks(move, tensor, from, from[step.axis].dim, context);
    return matrix_of(tensor, to, from[step.axis].dim, context);
  };
  switch (step.redistribution) {
    case Redistribution::all_reduce_sum: return in_place(InstructionKind::all_reduce_sum, value);
    case Redistribution::all_reduce_max: return in_place(InstructionKind::all_reduce_max, value);
    case Redistribution::reduce_scatter:
      return chunk_of(move, in_place(InstructionKind::reduce_scatter,
                                     copied_rows(lowering, move, packed(lowering, move, value, to_cut()),
                                                 to[step.axis].dim)));
    case Redistribution::all_gather:
      return copied_rows(lowering, move,
                         unpacked(lowering, move,
                                  moved(InstructionKind::all_gather, value, local_bytes(tensor, to, context)),
                                  put_together()),
                         from[step.axis].dim);
    case Redistribution::slice: {
      const Value whole = packed(lowering, move, value, to_cut());
      const Value part = chunk_of(move, whole);
      if (whole.storage != value.storage) return part;
      const Value result = scratch(lowering, part.bytes);
      emit_copy(lowering, move.type, Label::compute, move.what, part, result);
      return result;
    }
    case Redistribution::all_to_all: {
      PARPLAN_ASSERT(local_bytes(tensor, from, context) == local_bytes(tensor, to, context), move.what);
      const Value chunks = packed(lowering, move, value, to_cut());
      return unpacked(lowering, move, moved(InstructionKind::all_to_all, chunks, chunks.bytes), put_together());
    }
    case Redistribution::gather:
      return gather_on_first(lowering, id, value, scratch(lowering, local_bytes(tensor, to, context)));
    case Redistribution::scatter: {
      const Value own = scratch(lowering, local_bytes(tensor, to, context));
      std::vector<Use> uses{{own, Access::write}};
      if (move.at == 0) uses.push_back({value, Access::read});
      emit_collective(lowering, InstructionKind::scatter, step.axis, move.type, move.what, uses);
      return own;
    }
    case Redistribution::none: return value;
  }
  assertion_failed("a redistribution has an instruction", __FILE__, __LINE__, move.what);
}

// A parameter's part of the flat bucket `to`.
Value flat(SegmentLowering& lowering, const ParameterPart& part, const char* to, std::int64_t element) {
  return add_value(lowering, to, part.bucket_offset * element, part.rows * part.columns * element);
}

}  // namespace

namespace {

void emit_communication(SegmentLowering& lowering, InstructionKind kind, GroupKey group, DataType type,
                        std::string name, const std::vector<Use>& uses) {
  Instruction instruction;
  instruction.kind = kind;
  instruction.type = type;
  instruction.group = group;
  instruction.stream = stream_of(kind, group);
  instruction.label = label_of(group.axis);
  instruction.name = std::move(name);
  emit(lowering, std::move(instruction), uses);
}

}  // namespace

void emit_transfer(SegmentLowering& lowering, InstructionKind kind, GroupKey neighbour, DataType type,
                   std::string name, const Use& use) {
  emit_communication(lowering, kind, neighbour, type, std::move(name), {use});
}

void emit_collective(SegmentLowering& lowering, InstructionKind kind, GroupKey group, DataType type, std::string name,
                     const std::vector<Use>& uses) {
  emit_communication(lowering, kind, group, type, std::move(name), uses);
}

void emit_collective(SegmentLowering& lowering, InstructionKind kind, Axis axis, DataType type, std::string name,
                     const std::vector<Use>& uses) {
  emit_collective(lowering, kind, all_along(axis), type, std::move(name), uses);
}

Value gather_on_first(SegmentLowering& lowering, TensorId id, const Value& own, const Value& whole) {
  const Tensor& tensor = lowering.tensor(id);
  std::vector<Use> uses{{own, Access::read}};
  if (lowering.of.context.at.dp == 0) uses.push_back({whole, Access::write});
  emit_collective(lowering, InstructionKind::gather, Axis::dp, type_of(tensor, lowering.of.context.precision),
                  tensor.name + ".gather", uses);
  return whole;
}

Value add_value(SegmentLowering& lowering, const char* to, std::int64_t offset, std::int64_t bytes) {
  lowering.storages.push_back({to, offset, bytes});
  return {static_cast<int>(lowering.storages.size()) - 1, 0, bytes};
}

Value scratch(SegmentLowering& lowering, std::int64_t bytes) { return add_value(lowering, binding::scratch, 0, bytes); }

std::optional<Value> saved_value(SegmentLowering& lowering, TensorId id) {
  const auto saved = std::ranges::find(lowering.of.saved, id, &SavedTensor::tensor);
  if (saved == lowering.of.saved.end()) return std::nullopt;
  const char* const where = is_apart(lowering.of, id) ? binding::input
                            : saved->for_weights      ? binding::for_weights
                                                      : binding::saved;
  return add_value(lowering, where, saved->offset, saved->bytes);
}

std::optional<Value> left_value(SegmentLowering& lowering, TensorId id) {
  if (lowering.left == nullptr) return std::nullopt;
  const auto left = std::ranges::find(lowering.left->values, id, &SavedTensor::tensor);
  if (left == lowering.left->values.end()) return std::nullopt;
  return add_value(lowering, binding::left, left->offset, left->bytes);
}

Value parameter(SegmentLowering& lowering, TensorId id) {
  const BlockLowering::Parameter& parameter = lowering.of.parameters.at(id);
  return flat(lowering, parameter.part, parameter.values, size_of(lowering.of.context.precision));
}
Value parameter_gradient(SegmentLowering& lowering, TensorId id) {
  const BlockLowering::Parameter& parameter = lowering.of.parameters.at(id);
  PARPLAN_ASSERT(parameter.gradients != nullptr, fmt::format("{} is frozen", lowering.tensor(id).name));
  return flat(lowering, parameter.part, parameter.gradients, size_of(DataType::fp32));
}

Value own_part(const SegmentLowering& lowering, const TrainingOp& op, TensorId id, const Value& whole) {
  if (row_of(lowering.op(op).kind).sharding != ShardingRule::heads) return whole;
  const BlockContext& context = lowering.of.context;
  const TensorDim& dim = lowering.tensor(id).dims[0];
  const TensorLayout held = layout_of_parameter(lowering.of.graph, id, context.layout.placements);
  Value part = whole;
  for (const Axis axis : all_axes) {
    if (lowering.wanted(op)[0][axis] != shard(dim.dim) || held[axis] == shard(dim.dim)) continue;
    part.bytes /= context.layout.degree[axis];
    part.offset += part.bytes * context.at[axis];
  }
  return part;
}

Value materialise(SegmentLowering& lowering, Values& values, TensorId id, const TensorLayout& wanted) {
  const auto found = values.find({id, wanted});
  if (found != values.end()) {
    complete(lowering, id, found->second);
    return found->second;
  }
  const auto source = std::ranges::find_if(values, [&](const auto& entry) { return entry.first.first == id; });
  PARPLAN_ASSERT(source != values.end(),
                 fmt::format("{} is not defined in block {}", lowering.tensor(id).name, lowering.of.block.name));
  TensorLayout layout = source->first.second;
  Value value = source->second;
  complete(lowering, id, value);
  const int storage = value.storage;
  bool keeps_source = true;
  for (const RedistributionStep& step : redistribute(layout, wanted)) {
    TensorLayout next = layout;
    next[step.axis] = wanted[step.axis];
    keeps_source = keeps_source && (value.storage != storage || !works_in_place(step.redistribution));
    value = redistributed(lowering, value, id, step, layout, next);
    layout = next;
  }
  if (!keeps_source) values.erase(source);
  values[{id, wanted}] = value;
  return value;
}

void deliver(SegmentLowering& lowering, Values& values, TensorId id, const TensorLayout& wanted, const char* to,
             Label label) {
  const Value value = materialise(lowering, values, id, wanted);
  if (lowering.storages[value.storage].binding == to) return;
  emit_copy(lowering, lowering.of.context.precision, label, lowering.tensor(id).name, value,
            add_value(lowering, to, 0, value.bytes));
}

void emit_kernel(SegmentLowering& lowering, OpKind op, const OpShape& shape, Label label, std::string name,
                 const std::vector<Use>& uses) {
  if (shape.rows == 0) return;  // on a replica, whose master has the tokens
  Instruction instruction;
  instruction.kind = InstructionKind::kernel;
  instruction.op = op;
  instruction.shape = shape;
  instruction.type = lowering.of.context.precision;
  instruction.stream = Stream::compute;
  instruction.label = label;
  instruction.name = std::move(name);
  emit(lowering, std::move(instruction), uses);
}

void emit_copy(SegmentLowering& lowering, DataType type, Label label, std::string name, const Value& from,
               const Value& to) {
  emit_kernel(lowering, OpKind::copy, {.rows = from.bytes / size_of(type)}, label, std::move(name),
              {{from, Access::read}, {to, Access::write}});
}

void emit_op(SegmentLowering& lowering, const TrainingOp& op, const OpShape& shape, Label label,
             const std::function<Value(const TrainingOperand&)>& value_of, const std::vector<Use>& gathered) {
  std::vector<Use> uses;
  for (const TrainingOperand& operand : op.operands) {
    if (operand.source == OperandSource::workspace) {
      const std::int64_t bytes = workspace_bytes(op.kind, shape, lowering.of.context.backend).count;
      if (bytes > 0) uses.push_back({scratch(lowering, bytes), Access::update});
    } else if (operand.source == OperandSource::loss_scale) {
      if (shape.scaled)
        uses.push_back({add_value(lowering, binding::loss_scale, 0, sizeof(LossScale)), operand.access});
    } else {
      uses.push_back({value_of(operand), operand.access});
    }
  }
  // Their places in the row: no other operand before them is optional.
  std::size_t next = 0;
  const std::span<const OperandRow> operands = row_of(op.kind).operands;
  for (std::size_t i = 0; i < operands.size() && next < gathered.size(); ++i)
    if (operands[i].source == OperandSource::gathered || operands[i].source == OperandSource::gathered_gradient)
      uses.insert(uses.begin() + static_cast<std::ptrdiff_t>(i), gathered[next++]);
  if (shape.rows == 0) return;
  emit_kernel(lowering, op.kind, shape, label, lowering.op(op).name, uses);
  // Logits that were widened: what is made of them is computed in their type.
  const ShardingRule rule = row_of(lowering.op(op).kind).sharding;
  const bool of_logits = rule == ShardingRule::vocabulary_max || rule == ShardingRule::vocabulary_sum ||
                         rule == ShardingRule::vocabulary_loss;
  if (shape.stepwise && of_logits) lowering.segment.instructions.back().type = DataType::fp32;
}

}  // namespace parplan
