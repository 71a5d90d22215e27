// The values of a Segment under construction: where they lie, how one layout becomes another, and
// the instructions that do it.
#include <algorithm>
#include <utility>

#include <fmt/format.h>

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

void emit_collective(SegmentLowering& lowering, InstructionKind kind, Axis axis, DataType type, std::string name,
                     const std::vector<Use>& uses) {
  Instruction instruction;
  instruction.kind = kind;
  instruction.type = type;
  instruction.group = all_along(axis);
  instruction.stream = stream_of(axis);
  instruction.label = label_of(axis);
  instruction.name = std::move(name);
  emit(lowering, std::move(instruction), uses);
}

bool works_in_place(Redistribution step) {
  return step == Redistribution::all_reduce_sum || step == Redistribution::all_reduce_max ||
         step == Redistribution::reduce_scatter;
}

// The value `value` of tensor `id` after one step; `layout` is its layout then.
Value redistributed(SegmentLowering& lowering, const Value& value, TensorId id, const RedistributionStep& step,
                    const TensorLayout& layout) {
  const Tensor& tensor = lowering.tensor(id);
  const BlockChoice& choice = lowering.of.choice;
  const DataType type = type_of(tensor, choice.precision);
  const std::string what = fmt::format("{}.{}", tensor.name, name(step.redistribution));
  // This rank's chunk of a value that is cut along its outermost dim.
  const auto chunk = [&] {
    const std::int64_t elements = value.bytes / size_of(type);
    const int ranks = choice.layout.degree[step.axis];
    const std::int64_t begin = chunk_begin(elements, ranks, choice.at[step.axis]);
    const std::int64_t end = chunk_begin(elements, ranks, choice.at[step.axis] + 1);
    return Value{value.storage, value.offset + begin * size_of(type), (end - begin) * size_of(type)};
  };
  const auto in_place = [&](InstructionKind kind) {
    emit_collective(lowering, kind, step.axis, type, what, {{value, Access::update}});
  };
  switch (step.redistribution) {
    case Redistribution::all_reduce_sum: in_place(InstructionKind::all_reduce_sum); return value;
    case Redistribution::all_reduce_max: in_place(InstructionKind::all_reduce_max); return value;
    case Redistribution::reduce_scatter: in_place(InstructionKind::reduce_scatter); return chunk();
    case Redistribution::all_gather: {
      const Value result = scratch(lowering, local_bytes(tensor, layout, choice));
      emit_collective(lowering, InstructionKind::all_gather, step.axis, type, what,
                      {{value, Access::read}, {result, Access::write}});
      return result;
    }
    case Redistribution::slice: {
      PARPLAN_ASSERT(layout[step.axis] == shard(tensor.dims[0].dim),
                     fmt::format("{}: a slice along an inner dim", tensor.name));
      const Value part = chunk();
      const Value result = scratch(lowering, part.bytes);
      emit_copy(lowering, type, Label::compute, what, part, result);
      return result;
    }
    case Redistribution::none: return value;
    case Redistribution::all_to_all: break;
  }
  assertion_failed("a redistribution has an instruction", __FILE__, __LINE__,
                   fmt::format("{} over {}", what, name(step.axis)));
}

// A parameter's part of the flat bucket `to`.
Value flat(SegmentLowering& lowering, const ParameterPart& part, const char* to, std::int64_t element) {
  return add_value(lowering, to, part.bucket_offset * element, part.rows * part.columns * element);
}

}  // namespace

Value add_value(SegmentLowering& lowering, const char* to, std::int64_t offset, std::int64_t bytes) {
  lowering.storages.push_back({to, offset, bytes});
  return {static_cast<int>(lowering.storages.size()) - 1, 0, bytes};
}

Value scratch(SegmentLowering& lowering, std::int64_t bytes) { return add_value(lowering, binding::scratch, 0, bytes); }

std::optional<Value> saved_value(SegmentLowering& lowering, TensorId id) {
  const auto saved = std::ranges::find(lowering.of.saved, id, &SavedTensor::tensor);
  if (saved == lowering.of.saved.end()) return std::nullopt;
  return add_value(lowering, binding::saved, saved->offset, saved->bytes);
}

Value parameter(SegmentLowering& lowering, TensorId id) {
  const auto& [part, tied] = lowering.of.parameters.at(id);
  return flat(lowering, part, tied ? binding::tied_parameters : binding::parameters,
              size_of(lowering.of.choice.precision));
}
Value parameter_gradient(SegmentLowering& lowering, TensorId id) {
  const auto& [part, tied] = lowering.of.parameters.at(id);
  return flat(lowering, part, tied ? binding::tied_gradients : binding::gradients, size_of(DataType::fp32));
}

Value materialise(SegmentLowering& lowering, Values& values, TensorId id, const TensorLayout& wanted) {
  const auto found = values.find({id, wanted});
  if (found != values.end()) return found->second;
  const auto source = std::ranges::find_if(values, [&](const auto& entry) { return entry.first.first == id; });
  PARPLAN_ASSERT(source != values.end(),
                 fmt::format("{} is not defined in block {}", lowering.tensor(id).name, lowering.of.block.name));
  TensorLayout layout = source->first.second;
  Value value = source->second;
  const int storage = value.storage;
  bool keeps_source = true;
  for (const RedistributionStep& step : redistribute(layout, wanted)) {
    layout[step.axis] = wanted[step.axis];
    keeps_source = keeps_source && (value.storage != storage || !works_in_place(step.redistribution));
    value = redistributed(lowering, value, id, step, layout);
  }
  if (!keeps_source) values.erase(source);
  values[{id, wanted}] = value;
  return value;
}

void deliver(SegmentLowering& lowering, Values& values, TensorId id, const TensorLayout& wanted, const char* to,
             Label label) {
  const Value value = materialise(lowering, values, id, wanted);
  if (lowering.storages[value.storage].binding == to) return;
  emit_copy(lowering, lowering.of.choice.precision, label, lowering.tensor(id).name, value,
            add_value(lowering, to, 0, value.bytes));
}

void emit_kernel(SegmentLowering& lowering, OpKind op, const OpShape& shape, Label label, std::string name,
                 const std::vector<Use>& uses) {
  Instruction instruction;
  instruction.kind = InstructionKind::kernel;
  instruction.op = op;
  instruction.shape = shape;
  instruction.type = lowering.of.choice.precision;
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
             const std::function<Value(const TrainingOperand&)>& value_of) {
  std::vector<Use> uses;
  for (const TrainingOperand& operand : op.operands) {
    if (operand.source == OperandSource::workspace) {
      const std::int64_t bytes = workspace_bytes(op.kind, shape, lowering.of.choice.backend).count;
      if (bytes > 0) uses.push_back({scratch(lowering, bytes), Access::update});
    } else if (operand.source == OperandSource::loss_scale) {
      if (shape.scaled)
        uses.push_back({add_value(lowering, binding::loss_scale, 0, sizeof(LossScale)), operand.access});
    } else {
      uses.push_back({value_of(operand), operand.access});
    }
  }
  emit_kernel(lowering, op.kind, shape, label, lowering.op(op).name, uses);
}

}  // namespace parplan
