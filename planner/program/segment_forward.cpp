// The forward ops of a block as instructions, in the forward Segment and again under recompute.
#include <algorithm>
#include <map>
#include <utility>

#include "planner/program/segment_lowering.h"

namespace parplan {
namespace {

bool contains(const std::vector<TensorId>& ids, TensorId id) {
  return std::ranges::find(ids, id) != ids.end();
}

// Whether the op's row lets its output take the storage of the input `id`. Rows count all operands,
// including absent ones.
bool writes_over(const SegmentLowering& lowering, const TrainingOp& op, TensorId id) {
  const OpRow& row = row_of(op.kind);
  if (!row.in_place) return false;
  const OperandRow& read = row.operands[row.in_place->read];
  const std::vector<TensorId>& inputs = lowering.op(op).inputs;
  return read.source == OperandSource::input && read.index < static_cast<int>(inputs.size()) &&
         inputs[read.index] == id;
}

// The later op that may write its output over `id`, where nothing else needs `id`.
const TrainingOp* in_place_consumer(const SegmentLowering& lowering, const ForwardRun& run, TensorId id) {
  const Block& block = lowering.of.block;
  if (contains(run.preserved, id) || id == block.output || id == block.input) return nullptr;
  const std::vector<TrainingOp>& forward = lowering.of.training.forward;
  const TrainingOp* consumer = nullptr;
  for (std::size_t i = 0; i < forward.size(); ++i) {
    if (!run.needed[i]) continue;
    for (const TrainingOperand& operand : forward[i].operands) {
      if (operand.source != OperandSource::input || operand.tensor != id) continue;
      if (consumer) return nullptr;
      consumer = &forward[i];
    }
  }
  return consumer && writes_over(lowering, *consumer, id) ? consumer : nullptr;
}

// Whether a master gathers what all replicas have made of the tensor.
bool is_gathered(const SegmentLowering& lowering, TensorId id) {
  return lowering.canonical(id).dp == on_first() && lowering.produced(id).dp != on_first();
}

// Whether the tensor, once it is whole, fills the storage that its op writes (a reduce-scatter
// leaves only a chunk).
bool keeps_its_size(const SegmentLowering& lowering, TensorId id) {
  return !is_gathered(lowering, id) && std::ranges::none_of(all_axes, [&](Axis axis) {
    return is_partial(lowering.produced(id)[axis]) && lowering.canonical(id)[axis].kind == PlacementKind::shard;
  });
}

// Whether a master gathers them only because they are a result of the model.
bool returns_logits(const SegmentLowering& lowering, TensorId id) {
  const BlockContext& context = lowering.of.context;
  return context.layout.dp_method == DataMethod::master && !context.master_computes_loss &&
         logits_of(lowering.of.graph, lowering.of.block) == id;
}

std::int64_t produced_bytes(const SegmentLowering& lowering, TensorId id) {
  return local_bytes(lowering.tensor(id), lowering.produced(id), lowering.of.context);
}

// The place of a tensor that a forward op produces.
Value home(SegmentLowering& lowering, const ForwardRun& run, TensorId id) {
  const std::int64_t bytes = produced_bytes(lowering, id);
  if (lowering.tensor(id).role == TensorRole::loss) return add_value(lowering, binding::loss, 0, bytes);
  if (!keeps_its_size(lowering, id)) return scratch(lowering, bytes);
  if (!run.delivers) return left_value(lowering, id).value_or(scratch(lowering, bytes));
  if (const std::optional<Value> saved = saved_value(lowering, id)) return *saved;
  if (id == lowering.of.block.output && lowering.canonical(id) == lowering.of.residual)
    return add_value(lowering, binding::output, 0, bytes);
  if (const TrainingOp* consumer = in_place_consumer(lowering, run, id)) {
    const TensorId next = lowering.op(*consumer).outputs[0];
    if (keeps_its_size(lowering, next) && produced_bytes(lowering, next) == bytes) return home(lowering, run, next);
  }
  return scratch(lowering, bytes);
}

// The storage of the input that the op's first output takes over, if it may.
std::optional<Value> taken_over(const SegmentLowering& lowering, const ForwardRun& run, const TrainingOp& op,
                                const std::map<TensorId, Value>& inputs) {
  const Op& forward = lowering.op(op);
  std::optional<TensorId> over;
  for (const TensorId input : forward.inputs)
    if (writes_over(lowering, op, input) && in_place_consumer(lowering, run, input) == &op) over = input;
  const TensorId output = forward.outputs[0];
  if (!over || inputs.at(*over).bytes != produced_bytes(lowering, output)) return std::nullopt;
  const Value& candidate = inputs.at(*over);
  const bool settled = run.delivers && (contains(run.preserved, output) || output == lowering.of.block.output);
  if (settled && lowering.storages[candidate.storage].binding == binding::scratch) return std::nullopt;
  return candidate;
}

// Tokens or targets, from the data loader: those that this rank needs.
void load(SegmentLowering& lowering, const ForwardRun& run, const Op& reader, TensorId id) {
  const TensorLayout& layout = lowering.canonical(id);
  if (lowering.forward.contains({id, layout})) return;
  const BlockContext& context = lowering.of.context;
  const std::int64_t bytes = local_bytes(lowering.tensor(id), layout, context);
  const std::optional<Value> kept = run.delivers ? saved_value(lowering, id) : std::nullopt;
  const Value value = kept ? *kept : scratch(lowering, bytes);
  OpShape shape;
  shape.rows = bytes / size_of(DataType::int32);
  const std::int64_t positions = lowering.tensor(id).dims.front().size;
  shape.sequence = local_size({.dim = Dim::sequence, .size = positions}, layout, context);
  shape.chunks = chunks_of(positions, layout, context);
  if (!shape.chunks.any()) shape.begin = shape.sequence * shard_at(Dim::sequence, layout, context);
  shape.batch = context.layout.micro_batch;
  const std::vector<TensorDim>& dims = lowering.tensor(id).dims;
  if (!counts_tokens(dims.back().dim)) shape.columns = dims.back().size;
  const bool tells = row_of(reader.kind).sharding == ShardingRule::vocabulary_sum ||
                     row_of(reader.kind).sharding == ShardingRule::vocabulary_loss;
  const OpKind kind = tells ? OpKind::load_targets : OpKind::load_tokens;
  emit_kernel(lowering, kind, shape, run.label, lowering.tensor(id).name, {{value, Access::write}});
  lowering.forward[{id, layout}] = value;
}

// Moves a saved tensor that a reduce-scatter left in scratch to its place.
void settle(SegmentLowering& lowering, const ForwardRun& run, TensorId id) {
  if (!run.delivers || keeps_its_size(lowering, id) || is_gathered(lowering, id)) return;
  const std::optional<Value> kept = saved_value(lowering, id);
  if (!kept) return;
  Value& value = lowering.forward.at({id, lowering.canonical(id)});
  const Tensor& tensor = lowering.tensor(id);
  emit_copy(lowering, type_of(tensor, lowering.of.context.precision), run.label, tensor.name, value, *kept);
  value = *kept;
}

void run_op(SegmentLowering& lowering, const ForwardRun& run, const TrainingOp& op) {
  const Op& forward = lowering.op(op);
  const std::vector<TensorLayout>& wanted = lowering.wanted(op);
  for (const TensorId id : forward.inputs)
    if (lowering.tensor(id).role == TensorRole::tokens) load(lowering, run, forward, id);
  std::map<TensorId, Value> inputs;
  std::optional<ArrivingRows> arriving;
  for (std::size_t i = 0; i < forward.inputs.size(); ++i) {
    const TensorId id = forward.inputs[i];
    arriving = arriving_rows(lowering, op, lowering.forward, id, wanted[i]);
    inputs[id] = arriving ? arriving->whole : materialise(lowering, lowering.forward, id, wanted[i]);
  }

  std::map<TensorId, Value> outputs;
  for (const TensorId id : forward.outputs) {
    const std::optional<Value> over =
        id == forward.outputs[0] ? taken_over(lowering, run, op, inputs) : std::nullopt;
    outputs[id] = over ? *over : home(lowering, run, id);
  }

  const TensorLayout rows = wanted.empty() ? TensorLayout{} : wanted[0];
  const OpShape shape = local_shape(lowering.of.graph, forward, rows, lowering.of.context);
  const auto value_of = [&](const TrainingOperand& operand) {
    return operand.source == OperandSource::input    ? inputs.at(*operand.tensor)
           : operand.source == OperandSource::output ? outputs.at(*operand.tensor)
                                                     : own_part(lowering, op, *operand.tensor,
                                                                parameter(lowering, *operand.tensor));
  };
  if (shape.gathered)
    attend(lowering, op, shape, inputs.at(forward.inputs[0]), run.label, value_of);
  else if (arriving)
    multiply_arriving(lowering, op, shape, run.label, *arriving, value_of);
  else if (const TensorId output = forward.outputs[0]; sums_around_ring(lowering, op, output))
    outputs[output] = multiply_and_sum(lowering, op, shape, run.label, output, value_of);
  else
    emit_op(lowering, op, shape, run.label, value_of);
  for (const TensorId id : forward.outputs) {
    if (lowering.tensor(id).role == TensorRole::loss) continue;
    const bool is_summed = sums_around_ring(lowering, op, id);
    lowering.forward[{id, is_summed ? lowering.canonical(id) : lowering.produced(id)}] = outputs.at(id);
    if (is_gathered(lowering, id)) {
      const std::int64_t bytes = local_bytes(lowering.tensor(id), lowering.canonical(id), lowering.of.context);
      const std::optional<Value> kept = run.delivers ? saved_value(lowering, id) : std::nullopt;
      lowering.forward[{id, lowering.canonical(id)}] =
          gather_on_first(lowering, id, outputs.at(id), kept ? *kept : scratch(lowering, bytes));
    } else if (returns_logits(lowering, id)) {
      TensorLayout gathered = lowering.canonical(id);
      gathered.dp = on_first();
      gather_on_first(lowering, id, outputs.at(id),
                      scratch(lowering, local_bytes(lowering.tensor(id), gathered, lowering.of.context)));
    }
    // A partial sum is made whole at once: all of its readers want it whole, and saved tensors are
    // kept whole.
    if (is_partial(lowering.produced(id)) && !is_summed)
      materialise(lowering, lowering.forward, id, lowering.canonical(id));
    settle(lowering, run, id);
  }
}

}  // namespace

void run_forward(SegmentLowering& lowering, const ForwardRun& run) {
  const std::vector<TrainingOp>& forward = lowering.of.training.forward;
  for (std::size_t i = 0; i < forward.size(); ++i)
    if (run.needed[i]) run_op(lowering, run, forward[i]);
  const std::optional<TensorId> output = lowering.of.block.output;
  if (run.delivers && output)
    deliver(lowering, lowering.forward, *output, lowering.of.residual, binding::output, run.label);
}

}  // namespace parplan
