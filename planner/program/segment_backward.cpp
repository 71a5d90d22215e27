// The backward ops of a block as instructions.
#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "planner/program/segment_lowering.h"

namespace parplan {
namespace {

// The tensor whose gradient storage that of `id` shares.
TensorId root_of(const TrainingBlock& training, TensorId id) {
  while (training.alias[id] != id) id = training.alias[id];
  return id;
}

// What the backward keeps account of.
struct Backward {
  SegmentLowering& lowering;
  // By tensor: the last op that reads its value, or reads or writes its gradient (by root).
  std::vector<std::optional<int>> last_read;
  std::vector<std::optional<int>> last_gradient_use;
  std::map<std::pair<TensorId, int>, Value> contributions;  // the latest to each tensor's gradient, by part
  // Parts of sums that are not added yet, by root.
  struct WaitingPart {
    Value value;
    TensorLayout layout;
  };
  std::map<TensorId, WaitingPart> waiting;
  std::vector<bool> is_left;  // by LeftForWeights::gradients: it is where the second part looks for it

  Values& gradients() const { return lowering.gradients; }
  TensorId root(TensorId id) const { return root_of(lowering.of.training, id); }
};

bool is_value(OperandSource source) { return source == OperandSource::input || source == OperandSource::output; }
bool is_gradient(OperandSource source) {
  return source == OperandSource::output_gradient || source == OperandSource::input_gradient;
}

void note_last_uses(Backward& backward) {
  const SegmentLowering& lowering = backward.lowering;
  backward.last_read.resize(lowering.of.graph.tensors.size());
  backward.last_gradient_use.resize(lowering.of.graph.tensors.size());
  const std::vector<TrainingOp>& ops = lowering.of.training.backward;
  for (std::size_t i = 0; i < ops.size(); ++i)
    for (const TrainingOperand& operand : ops[i].operands) {
      // What the second part reads is no longer where others may write.
      if (is_value(operand.source) && (lowering.left == nullptr || !is_for_weights(ops[i])))
        backward.last_read[*operand.tensor] = static_cast<int>(i);
      if (is_gradient(operand.source))
        backward.last_gradient_use[backward.root(*operand.tensor)] = static_cast<int>(i);
    }
}

// Which of the op's inputs it is, or is quantized to.
std::size_t input_number(const SegmentLowering& lowering, const Op& op, TensorId id) {
  const auto is_of = [&](TensorId input) {
    return input == id || unquantized(lowering.of.graph, lowering.of.block, input) == id;
  };
  return static_cast<std::size_t>(std::ranges::find_if(op.inputs, is_of) - op.inputs.begin());
}

// Layouts of gradients ----------------------------------------------------------------------------

// The gradient of an output is needed in the layout in which the op itself sees its output; where
// the op makes a partial sum (a weight sharded over its inputs), the gradient of the sum is needed
// whole.
TensorLayout layout_of_output_gradient(const BlockLowering& of, TensorId output) {
  TensorLayout layout = of.placements.canonical[output];
  for (const Axis axis : all_axes)
    if (is_partial(of.placements.produced[output][axis]) || layout[axis] == on_first())
      layout[axis] = of.placements.produced[output][axis] == on_first() ? on_first() : replicate();
  return layout;
}

// The layout in which a kernel leaves the gradient of input `id` of its forward op, or the part of
// it that this use makes.
TensorLayout layout_of_input_gradient(const SegmentLowering& lowering, const TrainingOp& op, TensorId id) {
  const Op& forward = lowering.op(op);
  const TensorLayout& output = lowering.produced(forward.outputs[0]);
  // A weight sharded over its outputs gives each rank a part of the sum over the outputs; heads do
  // the same for an input that is whole on every rank.
  const bool of_linear = row_of(forward.kind).sharding == ShardingRule::contraction;
  const bool of_heads = row_of(forward.kind).sharding == ShardingRule::heads;
  TensorLayout layout = lowering.wanted(op)[input_number(lowering, forward, id)];
  for (const Axis axis : all_axes) {
    const bool sharded_features = output[axis].kind == PlacementKind::shard && !cuts_tokens(output[axis]);
    if (sharded_features && (of_linear || (of_heads && layout[axis] == replicate()))) layout[axis] = partial_sum();
  }
  return layout;
}

// Sums of gradients -------------------------------------------------------------------------------

void forget_other_layouts(Values& values, TensorId id, const TensorLayout& layout) {
  std::erase_if(values, [&](const auto& entry) { return entry.first.first == id && entry.first.second != layout; });
}

// Ranks that each hold a part of a sum cannot add it to a value that all of them hold: their parts
// are summed separately until something reads the gradient, and then reduced at once. An example is
// a tensor that both a sum and a weight sharded over its outputs use, as in OLMo 2.
bool waits(const Backward& backward, TensorId owner, const TensorLayout& layout) {
  if (!is_partial(layout) || backward.gradients().contains({owner, layout})) return false;
  return std::ranges::any_of(backward.gradients(), [&](const auto& entry) { return entry.first.first == owner; });
}

DataType type_of_sum(const SegmentLowering& lowering, TensorId id) {
  return lowering.tensor(id).role == TensorRole::statistic ? DataType::fp32 : lowering.of.context.precision;
}

void add_waiting_part(Backward& backward, TensorId owner) {
  const auto found = backward.waiting.find(owner);
  if (found == backward.waiting.end()) return;
  SegmentLowering& lowering = backward.lowering;
  const TensorLayout canonical = lowering.canonical(owner);
  const auto at =
      std::ranges::find_if(lowering.gradients, [&](const auto& entry) { return entry.first.first == owner; });
  const TensorLayout layout = lowering.gradients.contains({owner, canonical}) ? canonical : at->first.second;
  Values parts{{{owner, found->second.layout}, found->second.value}};
  backward.waiting.erase(found);
  const Value part = materialise(lowering, parts, owner, layout);
  const Value sum = lowering.gradients.at({owner, layout});
  forget_other_layouts(lowering.gradients, owner, layout);
  const Tensor& tensor = lowering.tensor(owner);
  emit_kernel(lowering, OpKind::accumulate,
              {.rows = sum.bytes / size_of(type_of(tensor, lowering.of.context.precision))}, Label::compute,
              tensor.name, {{part, Access::read}, {sum, Access::update}});
  lowering.segment.instructions.back().type = type_of_sum(lowering, owner);
}

// Ops ---------------------------------------------------------------------------------------------

// The values of one op's operands, by source, tensor and part.
using OperandKey = std::tuple<OperandSource, std::optional<TensorId>, int>;
using OperandValues = std::map<OperandKey, Value>;
OperandKey key_of(const TrainingOperand& operand) { return {operand.source, operand.tensor, operand.part}; }

// What the op reads, and where it adds the gradients of parameters and leaves contributions.
// `arriving`: the rows of the gradient that go around a ring beside it.
OperandValues values_before(Backward& backward, const TrainingOp& op, std::optional<ArrivingRows>& arriving) {
  SegmentLowering& lowering = backward.lowering;
  OperandValues values;
  for (const TrainingOperand& operand : op.operands) {
    if (operand.source == OperandSource::workspace || operand.source == OperandSource::loss_scale ||
        operand.source == OperandSource::input_gradient)
      continue;
    const TensorId id = *operand.tensor;
    Value& value = values[key_of(operand)];
    switch (operand.source) {
      case OperandSource::input:
        value = materialise(lowering, lowering.forward, id,
                            lowering.wanted(op)[input_number(lowering, lowering.op(op), id)]);
        break;
      case OperandSource::output: value = materialise(lowering, lowering.forward, id, lowering.canonical(id)); break;
      case OperandSource::output_gradient:
        add_waiting_part(backward, backward.root(id));
        arriving = arriving_rows(lowering, op, lowering.gradients, backward.root(id),
                                 layout_of_output_gradient(lowering.of, id));
        value = arriving ? arriving->whole
                         : materialise(lowering, lowering.gradients, backward.root(id),
                                       layout_of_output_gradient(lowering.of, id));
        break;
      case OperandSource::parameter: value = own_part(lowering, op, id, parameter(lowering, id)); break;
      case OperandSource::parameter_gradient:
        value = own_part(lowering, op, id, parameter_gradient(lowering, id));
        break;
      case OperandSource::contribution:
        if (operand.access == Access::write)
          backward.contributions[{id, operand.part}] = scratch(
              lowering,
              local_bytes(lowering.tensor(id), layout_of_input_gradient(lowering, op, id), lowering.of.context));
        value = backward.contributions.at({id, operand.part});
        break;
      case OperandSource::input_gradient:
      case OperandSource::loss_scale:
      case OperandSource::gathered:
      case OperandSource::gathered_gradient:
      case OperandSource::workspace: break;
    }
  }
  return values;
}

// The operand whose storage the gradient of input `id` may take over: its last reader is this op.
// The gradient of the block's input, in the layout in which the block before wants it, may do so
// where that of its output came from.
std::optional<Value> taken_over(const Backward& backward, const TrainingOp& op, int position, TensorId id,
                                std::int64_t bytes, const TensorLayout& layout, const OperandValues& values) {
  const OpRow& row = row_of(op.kind);
  const SegmentLowering& lowering = backward.lowering;
  const Op& forward = lowering.op(op);
  if (!row.in_place || row.operands[row.in_place->write].index != static_cast<int>(input_number(lowering, forward, id)))
    return std::nullopt;
  const OperandRow& read = row.operands[row.in_place->read];
  const bool of_gradient = read.source == OperandSource::output_gradient;
  std::optional<Value> found;
  for (const TrainingOperand& operand : op.operands) {
    if (operand.source != read.source) continue;
    const TensorId source = of_gradient                            ? *operand.tensor
                            : read.source == OperandSource::output ? forward.outputs[read.index]
                                                                   : forward.inputs[read.index];
    if (operand.tensor != source) continue;
    const Value candidate = values.at({operand.source, source, 0});
    const std::string& where = lowering.storages[candidate.storage].binding;
    const std::optional<int> last =
        of_gradient ? backward.last_gradient_use[backward.root(source)] : backward.last_read[source];
    const bool arrives = id == lowering.of.block.input && layout == lowering.of.entering;
    const bool is_left = where == binding::scratch || where == binding::saved || where == binding::input ||
                         (where == binding::gradient && arrives);
    if (last == position && candidate.bytes == bytes && is_left)
      found = candidate;
  }
  return found;
}

// Whether the gradient of the block's input can be made where the gradient of its output was: it
// needs no redistribution that moves it, and that gradient has been read for the last time before
// op `position`.
bool takes_gradient_binding(const Backward& backward, int position, TensorId id, const TensorLayout& layout) {
  const BlockLowering& of = backward.lowering.of;
  if (id != of.block.input) return false;
  const bool stays = std::ranges::all_of(all_axes, [&](Axis axis) {
    return layout[axis] == of.entering[axis] ||
           (is_partial(layout[axis]) && of.entering[axis].kind != PlacementKind::shard);
  });
  if (!stays) return false;
  return !of.block.output || backward.last_gradient_use[backward.root(*of.block.output)] < position;
}

// Where a gradient may be written at once if it is what the second part of the backward reads.
std::optional<Value> place_left(SegmentLowering& lowering, TensorId owner, const TensorLayout& layout) {
  if (lowering.left == nullptr) return std::nullopt;
  for (const LeftForWeights::Gradient& gradient : lowering.left->gradients)
    if (gradient.is_last && gradient.root == owner && gradient.layout == layout)
      return add_value(lowering, binding::left, gradient.offset, gradient.bytes);
  return std::nullopt;
}

// Where a kernel writes (or adds) the gradient of input `id`.
Value input_gradient(Backward& backward, const TrainingOp& op, int position, TensorId id,
                     const OperandValues& values) {
  SegmentLowering& lowering = backward.lowering;
  const TensorLayout layout = layout_of_input_gradient(lowering, op, id);
  const TensorId owner = backward.root(id);
  const std::int64_t bytes = local_bytes(lowering.tensor(id), layout, lowering.of.context);
  if (waits(backward, owner, layout)) {
    if (!backward.waiting.contains(owner)) backward.waiting[owner] = {scratch(lowering, bytes), layout};
    return backward.waiting.at(owner).value;
  }
  if (op.accumulate) {
    const Value sum = materialise(lowering, lowering.gradients, owner, layout);
    // Copies in other layouts do not contain what is added now.
    forget_other_layouts(lowering.gradients, owner, layout);
    return sum;
  }
  const auto new_place = [&] {
    if (const std::optional<Value> left = place_left(lowering, owner, layout)) return *left;
    if (takes_gradient_binding(backward, position, id, layout))
      return add_value(lowering, binding::gradient, 0, bytes);
    const std::optional<Value> over = taken_over(backward, op, position, id, bytes, layout, values);
    return over ? *over : scratch(lowering, bytes);
  };
  const Value value = new_place();
  lowering.gradients[{owner, layout}] = value;
  return value;
}

// Where gradients wait to be added, the first contribution to the separate sum is written.
TrainingOp with_first_parts_written(const Backward& backward, TrainingOp op) {
  for (TrainingOperand& operand : op.operands) {
    if (operand.source != OperandSource::input_gradient || operand.access != Access::update) continue;
    const TensorId owner = backward.root(*operand.tensor);
    if (backward.waiting.contains(owner) ||
        !waits(backward, owner, layout_of_input_gradient(backward.lowering, op, *operand.tensor)))
      continue;
    op.accumulate = false;
    operand.access = Access::write;
  }
  return op;
}

// Which gradients of parameters the kernel adds to, where its row leaves some out.
void set_trained(const Op& forward, const TrainingOp& op, OpShape& shape) {
  const OpRow& of_forward = row_of(forward.kind);
  if (std::ranges::find(of_forward.gradients, op.kind) == of_forward.gradients.end()) return;
  for (const OperandRow& row : row_of(op.kind).operands) {
    if (row.source != OperandSource::parameter_gradient) continue;
    const bool exists = static_cast<std::size_t>(row.index) < forward.parameters.size();
    if (!exists && row.omitted == nullptr) continue;
    const bool trained = exists && std::ranges::any_of(op.operands, [&](const TrainingOperand& operand) {
      return operand.source == OperandSource::parameter_gradient && operand.tensor == forward.parameters[row.index];
    });
    if (row.optional != nullptr) shape.*row.optional = trained;
    if (row.omitted != nullptr) shape.*row.omitted = !trained;
  }
}

// Before the product that makes an input's gradient: gathers the rows that the gradient of its
// weight reads next, so that they arrive beside it (Korthikanti et al. 2022, section 4.2.2).
void gather_for_weights(Backward& backward, const TrainingOp& op, const TrainingOp& next) {
  SegmentLowering& lowering = backward.lowering;
  if (row_of(op.kind).cost != CostClass::product || !is_for_weights(next) || op.forward_op != next.forward_op) return;
  for (const TrainingOperand& operand : next.operands)
    if (operand.source == OperandSource::input)
      materialise(lowering, lowering.forward, *operand.tensor,
                  lowering.wanted(next)[input_number(lowering, lowering.op(next), *operand.tensor)]);
}

void run_op(Backward& backward, const TrainingOp& derived, int position) {
  SegmentLowering& lowering = backward.lowering;
  const BlockContext& context = lowering.of.context;
  const TrainingOp op = with_first_parts_written(backward, derived);
  const std::vector<TensorLayout>& wanted = lowering.wanted(op);
  const TensorLayout rows = wanted.empty() ? TensorLayout{} : wanted[0];
  OpShape shape = local_shape(lowering.of.graph, lowering.op(op), rows, context);
  set_trained(lowering.op(op), op, shape);
  const bool adds_or_copies = op.kind == OpKind::accumulate || op.kind == OpKind::copy;
  shape.accumulate = op.accumulate && !adds_or_copies;
  const bool takes_loss_scale =
      std::ranges::find(op.operands, OperandSource::loss_scale, &TrainingOperand::source) != op.operands.end();
  shape.scaled = takes_loss_scale && context.precision == DataType::fp16;
  if (row_of(op.kind).of_weights) {
    shape.in_half = context.leaves_half || context.sums_half;
    shape.accumulate = !context.leaves_half && context.sums_half;
  }

  std::optional<ArrivingRows> arriving;
  OperandValues values = values_before(backward, op, arriving);
  for (const TrainingOperand& operand : op.operands) {
    if (operand.source != OperandSource::input_gradient) continue;
    const Value value = input_gradient(backward, op, position, *operand.tensor, values);
    values[key_of(operand)] = value;
    if (adds_or_copies)
      shape = {.rows = value.bytes / size_of(type_of(lowering.tensor(*operand.tensor), context.precision))};
  }
  const auto value_of = [&](const TrainingOperand& operand) { return values.at(key_of(operand)); };
  const bool returns_keys = std::ranges::find(row_of(op.kind).operands, OperandSource::gathered_gradient,
                                              &OperandRow::source) != row_of(op.kind).operands.end();
  if (shape.gathered && returns_keys) {
    const TensorId qkv = lowering.op(op).inputs[0];
    attend_back(lowering, op, shape, values.at({OperandSource::input, qkv, 0}),
                values.at({OperandSource::input_gradient, qkv, 0}), value_of);
  } else if (arriving) {
    multiply_arriving(lowering, op, shape, Label::compute, *arriving, value_of);
  } else {
    emit_op(lowering, op, shape, Label::compute, value_of);
  }
  if (adds_or_copies && shape.rows > 0)
    lowering.segment.instructions.back().type = type_of_sum(lowering, *op.operands.back().tensor);
}

// In place of an op of the second part: leaves the gradient that it reads, as it is now.
void leave_gradient(Backward& backward, const TrainingOp& op, int position) {
  SegmentLowering& lowering = backward.lowering;
  const std::size_t number = lowering.left->gradient_of.at(position);
  if (backward.is_left[number]) return;
  backward.is_left[number] = true;
  const LeftForWeights::Gradient& gradient = lowering.left->gradients[number];
  add_waiting_part(backward, gradient.root);
  const Value value = materialise(lowering, lowering.gradients, gradient.root, gradient.layout);
  const Storage& storage = lowering.storages[value.storage];
  if (storage.binding == binding::left && storage.offset + value.offset == gradient.offset) return;
  emit_copy(lowering, lowering.of.context.precision, Label::compute, lowering.op(op).name, value,
            add_value(lowering, binding::left, gradient.offset, gradient.bytes));
}

// Leaves the forward tensors that are not where the second part of the backward looks for them.
void leave_values(SegmentLowering& lowering) {
  for (const SavedTensor& left : lowering.left->values) {
    Value& value = lowering.forward.at({left.tensor, lowering.canonical(left.tensor)});
    if (lowering.storages[value.storage].binding == binding::left) continue;
    const Value copy = *left_value(lowering, left.tensor);
    emit_copy(lowering, lowering.of.context.precision, Label::compute, lowering.tensor(left.tensor).name, value, copy);
    if (lowering.storages[value.storage].binding == binding::scratch) value = copy;
  }
}

}  // namespace

bool is_for_weights(const TrainingOp& op) {
  return row_of(op.kind).cost == CostClass::product &&
         std::ranges::any_of(op.operands, [](const TrainingOperand& operand) {
           return operand.source == OperandSource::parameter_gradient;
         });
}

LeftForWeights left_for_weights(const BlockLowering& lowering) {
  constexpr std::int64_t alignment = 64;  // bytes
  LeftForWeights left;
  const auto place = [&](std::int64_t bytes) {
    const std::int64_t offset = left.bytes;
    left.bytes = align_up(Bytes(offset + bytes), alignment).count;
    return offset;
  };
  const std::vector<TrainingOp>& ops = lowering.training.backward;
  std::map<TensorId, int> changes, all_changes;  // of gradients, by root
  const auto count = [&](const TrainingOp& op, std::map<TensorId, int>& of) {
    for (const TrainingOperand& operand : op.operands)
      if (operand.source == OperandSource::input_gradient) ++of[root_of(lowering.training, *operand.tensor)];
  };
  for (const TrainingOp& op : ops) count(op, all_changes);
  for (std::size_t i = 0; i < ops.size(); ++i) {
    count(ops[i], changes);
    if (!is_for_weights(ops[i])) continue;
    for (const TrainingOperand& operand : ops[i].operands) {
      const auto is_known = [&](const std::vector<SavedTensor>& tensors) {
        return std::ranges::any_of(tensors, [&](const SavedTensor& one) {
          return one.tensor == *operand.tensor && (one.for_weights || &tensors == &left.values);
        });
      };
      if (operand.source == OperandSource::input && !is_known(lowering.saved) && !is_known(left.values)) {
        const std::int64_t bytes = local_bytes(lowering.graph.tensors[*operand.tensor],
                                               lowering.placements.canonical[*operand.tensor], lowering.context);
        left.values.push_back({*operand.tensor, place(bytes), bytes});
      }
      if (operand.source != OperandSource::output_gradient) continue;
      const TensorId root = root_of(lowering.training, *operand.tensor);
      LeftForWeights::Gradient gradient{.root = root,
                                        .layout = layout_of_output_gradient(lowering, *operand.tensor),
                                        .changes = changes[root],
                                        .is_last = changes[root] == all_changes[root]};
      const auto known = std::ranges::find_if(left.gradients, [&](const LeftForWeights::Gradient& one) {
        return one.root == root && one.layout == gradient.layout && one.changes == gradient.changes;
      });
      left.gradient_of[static_cast<int>(i)] = static_cast<std::size_t>(known - left.gradients.begin());
      if (known != left.gradients.end()) continue;
      gradient.bytes = local_bytes(lowering.graph.tensors[*operand.tensor], gradient.layout, lowering.context);
      gradient.offset = place(gradient.bytes);
      left.gradients.push_back(gradient);
    }
  }
  return left;
}

void run_backward(SegmentLowering& lowering, BackwardPart part) {
  Backward backward{.lowering = lowering,
                    .last_read = {},
                    .last_gradient_use = {},
                    .contributions = {},
                    .waiting = {},
                    .is_left = std::vector<bool>(lowering.left == nullptr ? 0 : lowering.left->gradients.size())};
  note_last_uses(backward);
  const BlockLowering& of = lowering.of;
  const std::vector<TrainingOp>& ops = of.training.backward;
  if (part == BackwardPart::weights) {
    for (const auto& [position, number] : lowering.left->gradient_of) {
      const LeftForWeights::Gradient& gradient = lowering.left->gradients[number];
      lowering.gradients = {
          {{gradient.root, gradient.layout}, add_value(lowering, binding::left, gradient.offset, gradient.bytes)}};
      run_op(backward, ops[position], position);
    }
    return;
  }
  if (of.block.output && !ops.empty()) {
    const std::int64_t bytes = local_bytes(lowering.tensor(*of.block.output), of.residual, of.context);
    lowering.gradients[{backward.root(*of.block.output), of.residual}] =
        add_value(lowering, binding::gradient, 0, bytes);
  }
  if (part == BackwardPart::inputs) leave_values(lowering);
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const int position = static_cast<int>(i);
    if (part == BackwardPart::whole && i + 1 < ops.size()) gather_for_weights(backward, ops[i], ops[i + 1]);
    if (part == BackwardPart::inputs && is_for_weights(ops[i]))
      leave_gradient(backward, ops[i], position);
    else
      run_op(backward, ops[i], position);
  }
  if (!of.training.passes_gradient_on) return;
  const TensorId root = backward.root(*of.block.input);
  add_waiting_part(backward, root);
  deliver(lowering, lowering.gradients, root, of.entering, binding::gradient, Label::compute);
}

}  // namespace parplan
