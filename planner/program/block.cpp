#include "planner/program/block.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/graph/backward.h"
#include "planner/program/events.h"
#include "planner/program/fusion.h"
#include "planner/program/scratch.h"
#include "planner/program/workspace.h"

namespace parplan {
namespace {

constexpr std::int64_t bucket_alignment = 16;  // elements: 64 bytes in fp32
constexpr std::int64_t byte_alignment = 64;

void extend(std::vector<BucketLayout::Range>& ranges, std::int64_t begin, std::int64_t end) {
  if (!ranges.empty() && ranges.back().end == begin) {
    ranges.back().end = end;
  } else {
    ranges.push_back({begin, end});
  }
}

// A run of bytes that instructions of the segment under construction read and write.
struct Storage {
  std::string binding;   // one of `binding::`
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

// A value: a storage, or the chunk of it that a reduce-scatter left on this rank.
struct Value {
  int storage = -1;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

using Key = std::pair<TensorId, TensorLayout>;

// Builds one segment of a block: places values, inserts redistributions, packs scratch and orders
// streams.
class SegmentBuilder {
 public:
  SegmentBuilder(const OpGraph& graph, const Block& block, const BlockChoice& choice, const BlockPlacements& placements,
                 const TrainingBlock& training, const BucketLayout& own, const BucketLayout& tied,
                 const std::vector<SavedTensor>& saved)
      : graph_(graph), block_(block), choice_(choice), placements_(placements), training_(training), saved_(saved) {
    for (const ParameterPart& part : own.parts) parts_[part.tensor] = {part, false};
    for (const ParameterPart& part : tied.parts) parts_[part.tensor] = {part, true};
    for (const Axis axis : all_axes)
      if (choice.layout.degree[axis] > 1) {
        entering_[axis] = choice.entering[axis];
        residual_[axis] = choice.layout.placements.residual[axis];
      }
  }

  // Emits the forward ops that `needed` marks. With `keeps`, saved tensors and the block's output
  // go to their bindings; otherwise everything but the block's input is scratch.
  void forward(const std::vector<bool>& needed, bool keeps, Label label) {
    keeps_ = keeps;
    declare_inputs();
    for (std::size_t i = 0; i < training_.forward.size(); ++i)
      if (needed[i]) forward_op(training_.forward[i], needed, label);
    if (keeps && block_.output) deliver(Key{*block_.output, residual_}, forward_values_, binding::output, label);
  }

  // Emits the whole backward. Saved tensors are where the forward put them.
  void backward(bool recomputed) {
    if (!recomputed) declare_saved();
    last_read_.assign(graph_.tensors.size(), -1);
    last_gradient_use_.assign(graph_.tensors.size(), -1);
    for (std::size_t i = 0; i < training_.backward.size(); ++i)
      for (const TrainingOperand& operand : training_.backward[i].operands) {
        if (operand.source == OperandSource::input || operand.source == OperandSource::output)
          last_read_[index(*operand.tensor)] = static_cast<int>(i);
        if (operand.source == OperandSource::output_gradient || operand.source == OperandSource::input_gradient)
          last_gradient_use_[index(root(*operand.tensor))] = static_cast<int>(i);
      }
    if (block_.output) {
      const std::int64_t bytes = local_bytes(tensor(*block_.output), residual_, choice_);
      gradient_values_[{root(*block_.output), residual_}] = whole(add_storage({binding::gradient, 0, bytes}), bytes);
    }
    for (std::size_t i = 0; i < training_.backward.size(); ++i) backward_op(training_.backward[i], static_cast<int>(i));
    if (!block_.input) return;
    add_waiting_part(root(*block_.input));
    deliver(Key{root(*block_.input), entering_}, gradient_values_, binding::gradient, Label::compute);
  }

  Segment finish(std::string name) {
    if (choice_.fuse) fuse(segment_.instructions, temporary_);
    pack_scratch();
    bind();
    segment_.name = std::move(name);
    segment_.stream = Stream::compute;
    order_instructions(segment_);
    return std::move(segment_);
  }

 private:
  // Until `bind`, operands name places: each binding but scratch is one place, and so is each
  // storage in scratch.
  int place_of(const Value& value) {
    const Storage& storage = storages_[value.storage];
    const bool temporary = storage.binding == binding::scratch;
    const auto [found, inserted] =
        place_of_.try_emplace({storage.binding, temporary ? value.storage : -1}, static_cast<int>(places_.size()));
    if (!inserted) return found->second;
    places_.push_back({storage.binding, 0, temporary ? storage.bytes : 0});
    temporary_.push_back(temporary);
    return found->second;
  }

  // Gives the places in scratch their offsets, by the instructions that use each first and last.
  void pack_scratch() {
    std::vector<Temporary> temporaries(places_.size(), {.bytes = 0, .first = -1, .last = -1, .offset = 0});
    for (std::size_t i = 0; i < segment_.instructions.size(); ++i)
      for (const Operand& operand : segment_.instructions[i].operands) {
        Temporary& temporary = temporaries[operand.binding];
        if (temporary.first < 0) temporary.first = static_cast<int>(i);
        temporary.last = static_cast<int>(i);
      }
    std::vector<Temporary> used;
    std::vector<std::size_t> owners;
    for (std::size_t p = 0; p < places_.size(); ++p) {
      if (!temporary_[p] || temporaries[p].first < 0) continue;
      temporaries[p].bytes = places_[p].bytes;
      used.push_back(temporaries[p]);
      owners.push_back(p);
    }
    segment_.scratch_bytes = pack(used, byte_alignment);
    for (std::size_t t = 0; t < owners.size(); ++t) places_[owners[t]].offset = used[t].offset;
  }

  // Gives operands the numbers of bindings, in the order of their first use.
  void bind() {
    std::map<std::string, int> number;
    for (Instruction& instruction : segment_.instructions)
      for (Operand& operand : instruction.operands) {
        const Storage& place = places_[operand.binding];
        const auto [found, inserted] = number.try_emplace(place.binding, static_cast<int>(segment_.bindings.size()));
        if (inserted) segment_.bindings.push_back(place.binding);
        operand.binding = found->second;
        operand.offset += place.offset;
      }
  }

  struct Use {
    Value value;
    Access access{};
  };
  struct PlacedParameter {
    ParameterPart part;
    bool tied = false;
  };

  static std::size_t index(TensorId tensor) { return static_cast<std::size_t>(tensor); }
  const Tensor& tensor(TensorId id) const { return graph_.tensors[index(id)]; }

  TensorId root(TensorId id) const {
    while (training_.alias[index(id)] != id) id = training_.alias[index(id)];
    return id;
  }

  int add_storage(Storage storage) {
    storages_.push_back(std::move(storage));
    return static_cast<int>(storages_.size()) - 1;
  }
  Value whole(int storage, std::int64_t bytes) const { return {storage, 0, bytes}; }
  Value scratch(std::int64_t bytes) { return whole(add_storage({binding::scratch, 0, bytes}), bytes); }

  void emit(Instruction instruction, const std::vector<Use>& uses) {
    for (const Use& use : uses) {
      const Storage& storage = storages_[use.value.storage];
      const std::int64_t offset = use.value.offset + (storage.binding == binding::scratch ? 0 : storage.offset);
      instruction.operands.push_back({place_of(use.value), offset, use.value.bytes, use.access});
    }
    segment_.instructions.push_back(std::move(instruction));
  }

  void emit_kernel(OpKind op, OpShape shape, Label label, std::string name, std::vector<Use> uses) {
    Instruction instruction;
    instruction.kind = InstructionKind::kernel;
    instruction.op = op;
    instruction.shape = shape;
    instruction.type = choice_.precision;
    instruction.stream = Stream::compute;
    instruction.label = label;
    instruction.name = std::move(name);
    emit(std::move(instruction), std::move(uses));
  }

  void emit_collective(InstructionKind kind, Axis axis, DataType type, std::string name, std::vector<Use> uses) {
    Instruction instruction;
    instruction.kind = kind;
    instruction.type = type;
    instruction.group = all_along(axis);
    instruction.stream = stream_of(axis);
    instruction.label = label_of(axis);
    instruction.name = std::move(name);
    emit(std::move(instruction), std::move(uses));
  }

  std::optional<Value> saved_value(TensorId id) {
    for (const SavedTensor& saved : saved_)
      if (saved.tensor == id) return whole(add_storage({binding::saved, saved.offset, saved.bytes}), saved.bytes);
    return std::nullopt;
  }

  void declare_inputs() {
    if (block_.input) forward_values_[{*block_.input, entering_}] = *saved_value(*block_.input);
  }
  void declare_saved() {
    for (const SavedTensor& saved : saved_)
      forward_values_[{saved.tensor, placements_.canonical[index(saved.tensor)]}] =
          whole(add_storage({binding::saved, saved.offset, saved.bytes}), saved.bytes);
  }

  // The value of `tensor` in `wanted`, redistributed axis by axis if it exists only in another
  // layout.
  Value materialise(std::map<Key, Value>& values, TensorId id, const TensorLayout& wanted) {
    const auto found = values.find({id, wanted});
    if (found != values.end()) return found->second;
    auto source =
        std::find_if(values.begin(), values.end(), [&](const auto& entry) { return entry.first.first == id; });
    PARPLAN_ASSERT(source != values.end(), fmt::format("{} is not defined in block {}", tensor(id).name, block_.name));
    TensorLayout layout = source->first.second;
    Value value = source->second;
    const int storage = value.storage;
    bool keeps_source = true;
    for (const RedistributionStep& step : redistribute(layout, wanted)) {
      layout[step.axis] = wanted[step.axis];
      keeps_source = keeps_source && (value.storage != storage || !works_in_place(step.redistribution));
      value = redistributed(value, id, step, layout);
    }
    if (!keeps_source) values.erase(source);
    values[{id, wanted}] = value;
    return value;
  }

  static bool works_in_place(Redistribution step) {
    return step == Redistribution::all_reduce_sum || step == Redistribution::all_reduce_max ||
           step == Redistribution::reduce_scatter;
  }

  // The value `value` of tensor `id` after one step; `layout` is its layout then.
  Value redistributed(Value value, TensorId id, const RedistributionStep& step, const TensorLayout& layout) {
    const DataType type = type_of(tensor(id), choice_.precision);
    const std::string what = fmt::format("{}.{}", tensor(id).name, parplan::name(step.redistribution));
    // This rank's chunk of a value that is cut along its outermost dim.
    const auto chunk = [&] {
      const std::int64_t elements = value.bytes / size_of(type);
      const int ranks = choice_.layout.degree[step.axis];
      const std::int64_t begin = chunk_begin(elements, ranks, choice_.at[step.axis]);
      const std::int64_t end = chunk_begin(elements, ranks, choice_.at[step.axis] + 1);
      return Value{value.storage, value.offset + begin * size_of(type), (end - begin) * size_of(type)};
    };
    switch (step.redistribution) {
      case Redistribution::all_reduce_sum:
        emit_collective(InstructionKind::all_reduce_sum, step.axis, type, what, {{value, Access::update}});
        return value;
      case Redistribution::all_reduce_max:
        emit_collective(InstructionKind::all_reduce_max, step.axis, type, what, {{value, Access::update}});
        return value;
      case Redistribution::reduce_scatter:
        emit_collective(InstructionKind::reduce_scatter, step.axis, type, what, {{value, Access::update}});
        return chunk();
      case Redistribution::all_gather: {
        const Value result = scratch(local_bytes(tensor(id), layout, choice_));
        emit_collective(InstructionKind::all_gather, step.axis, type, what,
                        {{value, Access::read}, {result, Access::write}});
        return result;
      }
      case Redistribution::slice: {
        PARPLAN_ASSERT(layout[step.axis] == shard(tensor(id).dims[0].dim),
                       fmt::format("{}: a slice along an inner dim", tensor(id).name));
        const Value part = chunk();
        const Value result = scratch(part.bytes);
        OpShape shape;
        shape.rows = part.bytes / size_of(type);
        emit_kernel(OpKind::copy, shape, Label::compute, what, {{part, Access::read}, {result, Access::write}});
        return result;
      }
      case Redistribution::none: return value;
      case Redistribution::all_to_all: break;
    }
    assertion_failed("a redistribution has an instruction", __FILE__, __LINE__,
                     fmt::format("{} over {}", what, parplan::name(step.axis)));
  }

  // Brings a value to offset 0 of a binding; copies it where it is somewhere else.
  void deliver(Key key, std::map<Key, Value>& values, const char* to, Label label) {
    const Value value = materialise(values, key.first, key.second);
    if (storages_[value.storage].binding == to) return;
    const Value home = whole(add_storage({to, 0, value.bytes}), value.bytes);
    OpShape shape;
    shape.rows = value.bytes / size_of(choice_.precision);
    emit_kernel(OpKind::copy, shape, label, tensor(key.first).name, {{value, Access::read}, {home, Access::write}});
  }

  // Parameters ------------------------------------------------------------------------------------

  Value parameter(TensorId id) {
    const PlacedParameter& placed = parts_.at(id);
    return flat(placed, placed.tied ? binding::tied_parameters : binding::parameters, size_of(choice_.precision));
  }
  Value parameter_gradient(TensorId id) {
    const PlacedParameter& placed = parts_.at(id);
    return flat(placed, placed.tied ? binding::tied_gradients : binding::gradients, size_of(DataType::fp32));
  }
  Value flat(const PlacedParameter& placed, const char* to, std::int64_t element) {
    const std::int64_t bytes = placed.part.rows * placed.part.columns * element;
    return whole(add_storage({to, placed.part.bucket_offset * element, bytes}), bytes);
  }

  // Forward ---------------------------------------------------------------------------------------

  // The later op that may write its output over `id`, where nothing else needs `id`.
  const TrainingOp* in_place_consumer(TensorId id, const std::vector<bool>& needed) const {
    if (is_saved(id) || id == block_.output || id == block_.input) return nullptr;
    const TrainingOp* consumer = nullptr;
    for (std::size_t i = 0; i < training_.forward.size(); ++i) {
      if (!needed[i]) continue;
      for (const TrainingOperand& operand : training_.forward[i].operands) {
        if (operand.source != OperandSource::input || operand.tensor != id) continue;
        if (consumer) return nullptr;
        consumer = &training_.forward[i];
      }
    }
    if (!consumer || !writes_over(*consumer, id)) return nullptr;
    return consumer;
  }
  // Whether the op's row lets its output take the storage of the input `id`. Rows count all
  // operands, including absent ones.
  bool writes_over(const TrainingOp& op, TensorId id) const {
    const OpRow& row = row_of(op.kind);
    if (!row.in_place) return false;
    const OperandRow& read = row.operands[row.in_place->read];
    const Op& forward = graph_.ops[op.forward_op];
    return read.source == OperandSource::input && read.index < static_cast<int>(forward.inputs.size()) &&
           forward.inputs[read.index] == id;
  }
  bool is_saved(TensorId id) const {
    return std::find(training_.saved.begin(), training_.saved.end(), id) != training_.saved.end();
  }

  // Whether the tensor, once it is whole, fills the storage that its op writes (a reduce-scatter
  // leaves only a chunk).
  bool keeps_its_size(TensorId id) const {
    const TensorLayout& produced = placements_.produced[index(id)];
    const TensorLayout& canonical = placements_.canonical[index(id)];
    return std::ranges::none_of(all_axes, [&](Axis axis) {
      return is_partial(produced[axis]) && canonical[axis].kind == PlacementKind::shard;
    });
  }

  // The place of a tensor that a forward op produces.
  Value home(TensorId id, const std::vector<bool>& needed) {
    const std::int64_t bytes = local_bytes(tensor(id), placements_.produced[index(id)], choice_);
    if (tensor(id).role == TensorRole::loss) return whole(add_storage({binding::loss, 0, bytes}), bytes);
    if (!keeps_its_size(id)) return scratch(bytes);
    if (keeps_) {
      if (const std::optional<Value> saved = saved_value(id)) return *saved;
      if (id == block_.output && placements_.canonical[index(id)] == residual_)
        return whole(add_storage({binding::output, 0, bytes}), bytes);
      if (const TrainingOp* consumer = in_place_consumer(id, needed)) {
        const TensorId next = graph_.ops[consumer->forward_op].outputs[0];
        if (keeps_its_size(next) && local_bytes(tensor(next), placements_.produced[index(next)], choice_) == bytes)
          return home(next, needed);
      }
    }
    return scratch(bytes);
  }

  void forward_op(const TrainingOp& op, const std::vector<bool>& needed, Label label) {
    const Op& forward = graph_.ops[op.forward_op];
    const std::vector<TensorLayout>& wanted = placements_.inputs[op.forward_op - block_.first_op];
    for (std::size_t i = 0; i < forward.inputs.size(); ++i) {
      if (tensor(forward.inputs[i]).role == TensorRole::tokens) load(forward, forward.inputs[i], label);
    }
    std::map<TensorId, Value> inputs;
    for (std::size_t i = 0; i < forward.inputs.size(); ++i)
      inputs[forward.inputs[i]] = materialise(forward_values_, forward.inputs[i], wanted[i]);

    std::map<TensorId, Value> outputs;
    for (TensorId id : forward.outputs) {
      const TrainingOp* self = nullptr;
      TensorId over = -1;
      for (TensorId input : forward.inputs)
        if (writes_over(op, input) && in_place_consumer(input, needed) == &op) self = &op, over = input;
      if (self && id == forward.outputs[0] &&
          inputs[over].bytes == local_bytes(tensor(id), placements_.produced[index(id)], choice_)) {
        const Value candidate = inputs[over];
        const Storage& storage = storages_[candidate.storage];
        const bool settled = keeps_ && (is_saved(id) || id == block_.output);
        if (!settled || storage.binding != binding::scratch) {
          outputs[id] = candidate;
          continue;
        }
      }
      outputs[id] = home(id, needed);
    }

    const TensorLayout rows = wanted.empty() ? TensorLayout{} : wanted[0];
    OpShape shape = local_shape(graph_, forward, rows, choice_);
    emit_op(op, shape, label, forward.name, [&](const TrainingOperand& operand) {
      return operand.source == OperandSource::input ? inputs.at(*operand.tensor)
             : operand.source == OperandSource::output ? outputs.at(*operand.tensor)
                                                       : parameter(*operand.tensor);
    });
    for (TensorId id : forward.outputs) {
      if (tensor(id).role == TensorRole::loss) continue;
      forward_values_[{id, placements_.produced[index(id)]}] = outputs.at(id);
      // A partial sum is made whole at once: all of its readers want it whole, and saved tensors
      // are kept whole.
      if (is_partial(placements_.produced[index(id)]))
        materialise(forward_values_, id, placements_.canonical[index(id)]);
      settle(id, label);
    }
  }

  // Moves a saved tensor that a reduce-scatter left in scratch to its place.
  void settle(TensorId id, Label label) {
    if (!keeps_ || keeps_its_size(id) || !is_saved(id)) return;
    const Value value = forward_values_.at({id, placements_.canonical[index(id)]});
    const Value kept = *saved_value(id);
    OpShape shape;
    shape.rows = value.bytes / size_of(type_of(tensor(id), choice_.precision));
    emit_kernel(OpKind::copy, shape, label, tensor(id).name, {{value, Access::read}, {kept, Access::write}});
    forward_values_[{id, placements_.canonical[index(id)]}] = kept;
  }

  void load(const Op& reader, TensorId id, Label label) {
    const TensorLayout whole_tokens;
    if (forward_values_.contains({id, whole_tokens})) return;
    const std::int64_t bytes = local_bytes(tensor(id), whole_tokens, choice_);
    std::optional<Value> kept = keeps_ ? saved_value(id) : std::nullopt;
    const Value value = kept ? *kept : scratch(bytes);
    OpShape shape;
    shape.rows = bytes / size_of(DataType::int32);
    shape.sequence = graph_.sequence;
    shape.batch = choice_.layout.micro_batch;
    const bool looks_up = row_of(reader.kind).sharding == ShardingRule::lookup;
    const OpKind kind = looks_up ? OpKind::load_tokens : OpKind::load_targets;
    emit_kernel(kind, shape, label, tensor(id).name, {{value, Access::write}});
    forward_values_[{id, whole_tokens}] = value;
  }

  template <class Resolve>
  void emit_op(const TrainingOp& op, const OpShape& shape, Label label, const std::string& name, Resolve resolve) {
    std::vector<Use> uses;
    for (const TrainingOperand& operand : op.operands) {
      if (operand.source == OperandSource::workspace) {
        const std::int64_t bytes = workspace_bytes(op.kind, shape, choice_.backend).count;
        if (bytes > 0) uses.push_back({scratch(bytes), Access::update});
      } else if (operand.source == OperandSource::loss_scale) {
        constexpr std::int64_t bytes = sizeof(LossScale);
        if (shape.scaled) uses.push_back({whole(add_storage({binding::loss_scale, 0, bytes}), bytes), operand.access});
      } else {
        uses.push_back({resolve(operand), operand.access});
      }
    }
    emit_kernel(op.kind, shape, label, name, std::move(uses));
  }

  // Backward --------------------------------------------------------------------------------------

  void backward_op(TrainingOp op, int position) {
    const Op& forward = graph_.ops[op.forward_op];
    const std::vector<TensorLayout>& wanted = placements_.inputs[op.forward_op - block_.first_op];
    for (TrainingOperand& operand : op.operands)
      if (operand.source == OperandSource::input_gradient && operand.access == Access::update &&
          waits(root(*operand.tensor), layout_of_gradient(*operand.tensor, forward, wanted)) &&
          !waiting_parts_.contains(root(*operand.tensor))) {
        op.accumulate = false;  // the first contribution to a separate sum
        operand.access = Access::write;
      }
    const TensorLayout rows = wanted.empty() ? TensorLayout{} : wanted[0];
    // The gradient of an output is needed in the layout in which the op itself sees its output;
    // where the op makes a partial sum (a weight sharded over its inputs), the gradient of the sum
    // is needed whole.
    const auto gradient_layout = [&](TensorId output) {
      TensorLayout layout = placements_.canonical[index(output)];
      for (const Axis axis : all_axes)
        if (is_partial(placements_.produced[index(output)][axis])) layout[axis] = replicate();
      return layout;
    };
    OpShape shape = local_shape(graph_, forward, rows, choice_);
    const bool adds_or_copies = op.kind == OpKind::accumulate || op.kind == OpKind::copy;
    shape.accumulate = op.accumulate && !adds_or_copies;
    const bool takes_loss_scale = std::ranges::any_of(
        op.operands, [](const TrainingOperand& operand) { return operand.source == OperandSource::loss_scale; });
    shape.scaled = takes_loss_scale && choice_.precision == DataType::fp16;

    using OperandKey = std::tuple<OperandSource, std::optional<TensorId>, int>;
    const auto key_of = [](const TrainingOperand& operand) {
      return OperandKey{operand.source, operand.tensor, operand.part};
    };
    std::map<OperandKey, Value> values;
    for (const TrainingOperand& operand : op.operands) {
      const OperandKey key = key_of(operand);
      switch (operand.source) {
        case OperandSource::input: {
          const auto at =
              std::find(forward.inputs.begin(), forward.inputs.end(), operand.tensor) - forward.inputs.begin();
          values[key] = materialise(forward_values_, *operand.tensor, wanted[at]);
          break;
        }
        case OperandSource::output:
          values[key] = materialise(forward_values_, *operand.tensor, placements_.canonical[index(*operand.tensor)]);
          break;
        case OperandSource::output_gradient:
          add_waiting_part(root(*operand.tensor));
          values[key] = materialise(gradient_values_, root(*operand.tensor), gradient_layout(*operand.tensor));
          break;
        case OperandSource::parameter: values[key] = parameter(*operand.tensor); break;
        case OperandSource::parameter_gradient: values[key] = parameter_gradient(*operand.tensor); break;
        case OperandSource::contribution:
          if (operand.access == Access::write)
            contributions_[{*operand.tensor, operand.part}] = scratch(local_bytes(
                tensor(*operand.tensor), layout_of_gradient(*operand.tensor, forward, wanted), choice_));
          values[key] = contributions_.at({*operand.tensor, operand.part});
          break;
        case OperandSource::input_gradient:
        case OperandSource::loss_scale:
        case OperandSource::workspace: break;
      }
    }
    for (const TrainingOperand& operand : op.operands) {
      if (operand.source != OperandSource::input_gradient) continue;
      const Value value = input_gradient(op, position, *operand.tensor, forward, wanted, values);
      values[key_of(operand)] = value;
      if (adds_or_copies) shape = {.rows = value.bytes / size_of(type_of(tensor(*operand.tensor), choice_.precision))};
    }
    emit_op(op, shape, Label::compute, forward.name, [&](const TrainingOperand& operand) {
      return values.at(key_of(operand));
    });
    if (adds_or_copies) segment_.instructions.back().type = kernel_type(tensor(*op.operands.back().tensor));
  }

  DataType kernel_type(const Tensor& tensor) const {
    return tensor.role == TensorRole::statistic ? DataType::fp32 : choice_.precision;
  }

  // Ranks that each hold a part of a sum cannot add it to a value that all of them hold: their
  // parts are summed separately until something reads the gradient, and then reduced at once. An
  // example is a tensor that both a sum and a weight sharded over its outputs use, as in OLMo 2.
  bool waits(TensorId owner, const TensorLayout& layout) const {
    if (!is_partial(layout) || gradient_values_.contains({owner, layout})) return false;
    return std::ranges::any_of(gradient_values_, [&](const auto& entry) { return entry.first.first == owner; });
  }

  void add_waiting_part(TensorId owner) {
    const auto found = waiting_parts_.find(owner);
    if (found == waiting_parts_.end()) return;
    const TensorLayout canonical = placements_.canonical[index(owner)];
    const auto at =
        std::ranges::find_if(gradient_values_, [&](const auto& entry) { return entry.first.first == owner; });
    const TensorLayout layout = gradient_values_.contains({owner, canonical}) ? canonical : at->first.second;
    std::map<Key, Value> parts{{{owner, found->second.layout}, found->second.value}};
    waiting_parts_.erase(found);
    const Value part = materialise(parts, owner, layout);
    const Value sum = gradient_values_.at({owner, layout});
    std::erase_if(gradient_values_,
                  [&](const auto& entry) { return entry.first.first == owner && entry.first.second != layout; });
    OpShape shape;
    shape.rows = sum.bytes / size_of(type_of(tensor(owner), choice_.precision));
    emit_kernel(OpKind::accumulate, shape, Label::compute, tensor(owner).name,
                {{part, Access::read}, {sum, Access::update}});
    segment_.instructions.back().type = kernel_type(tensor(owner));
  }

  // Where a kernel writes (or adds) the gradient of input `id`, and the gradient's placement then.
  template <class Values>
  Value input_gradient(const TrainingOp& op, int position, TensorId id, const Op& forward,
                       const std::vector<TensorLayout>& wanted, const Values& values) {
    const auto at = std::find(forward.inputs.begin(), forward.inputs.end(), id) - forward.inputs.begin();
    const TensorLayout layout = layout_of_gradient(id, forward, wanted);
    const TensorId owner = root(id);
    if (waits(owner, layout)) {
      if (!waiting_parts_.contains(owner))
        waiting_parts_[owner] = {scratch(local_bytes(tensor(id), layout, choice_)), layout};
      return waiting_parts_.at(owner).value;
    }
    if (op.accumulate) {
      const Value sum = materialise(gradient_values_, owner, layout);
      // Copies in other layouts do not contain what is added now.
      std::erase_if(gradient_values_,
                    [&](const auto& entry) { return entry.first.first == owner && entry.first.second != layout; });
      return sum;
    }

    const std::int64_t bytes = local_bytes(tensor(id), layout, choice_);
    Value value = scratch(bytes);
    const OpRow& row = row_of(op.kind);
    if (row.in_place && row.operands[row.in_place->write].index == at) {
      const OperandRow& read = row.operands[row.in_place->read];
      for (const TrainingOperand& operand : op.operands) {
        if (operand.source != read.source) continue;
        const bool is_gradient = read.source == OperandSource::output_gradient;
        const TensorId source = is_gradient                              ? *operand.tensor
                                : read.source == OperandSource::output ? forward.outputs[read.index]
                                                                        : forward.inputs[read.index];
        if (operand.tensor != source) continue;
        const Value candidate = values.at({operand.source, operand.tensor, 0});
        const std::string& where = storages_[candidate.storage].binding;
        const bool last =
            is_gradient ? last_gradient_use_[index(root(source))] == position : last_read_[index(source)] == position;
        if (last && candidate.bytes == bytes && (where == binding::scratch || where == binding::saved))
          value = candidate;
      }
    }
    const bool stays = std::ranges::all_of(all_axes, [&](Axis axis) {
      return layout[axis] == entering_[axis] ||
             (is_partial(layout[axis]) && entering_[axis].kind != PlacementKind::shard);
    });
    if (id == block_.input && stays && gradient_binding_is_free(position))
      value = whole(add_storage({binding::gradient, 0, bytes}), bytes);
    gradient_values_[{owner, layout}] = value;
    return value;
  }

  // The layout in which a kernel leaves the gradient of input `id` of `forward`, or the part of it
  // that this use makes.
  TensorLayout layout_of_gradient(TensorId id, const Op& forward,
                                  const std::vector<TensorLayout>& wanted) const {
    const auto at = std::find(forward.inputs.begin(), forward.inputs.end(), id) - forward.inputs.begin();
    const TensorLayout& output = placements_.produced[index(forward.outputs[0])];
    // A weight sharded over its outputs gives each rank a part of the sum over the outputs; heads
    // do the same for an input that is whole on every rank.
    const bool of_linear = row_of(forward.kind).sharding == ShardingRule::contraction;
    const bool of_heads = row_of(forward.kind).sharding == ShardingRule::heads;
    TensorLayout layout = wanted[at];
    for (const Axis axis : all_axes) {
      const bool sharded_features = output[axis].kind == PlacementKind::shard && output[axis].dim != Dim::sequence;
      if (sharded_features && (of_linear || (of_heads && layout[axis] == replicate()))) layout[axis] = partial_sum();
    }
    return layout;
  }

  // Whether the gradient of the block's output has been read for the last time before instruction
  // `position`.
  bool gradient_binding_is_free(int position) const {
    return !block_.output || last_gradient_use_[index(root(*block_.output))] < position;
  }

  const OpGraph& graph_;
  const Block& block_;
  const BlockChoice& choice_;
  const BlockPlacements& placements_;
  const TrainingBlock& training_;
  const std::vector<SavedTensor>& saved_;
  TensorLayout entering_, residual_;  // of the block's input and output; axes of one rank are Replicate
  bool keeps_ = true;
  std::map<TensorId, PlacedParameter> parts_;
  std::map<Key, Value> forward_values_;
  std::map<Key, Value> gradient_values_;  // by the root of the alias chain
  std::map<std::pair<TensorId, int>, Value> contributions_;  // the latest to each tensor's gradient, by part
  struct WaitingPart {
    Value value;
    TensorLayout layout;
  };
  std::map<TensorId, WaitingPart> waiting_parts_;  // by the root of the alias chain
  std::vector<int> last_read_;
  std::vector<int> last_gradient_use_;
  std::vector<Storage> storages_;
  std::map<std::pair<std::string, int>, int> place_of_;  // by binding, and by storage for scratch
  std::vector<Storage> places_;
  std::vector<bool> temporary_;  // per place: whether it is scratch
  Segment segment_;
};

// Marks the forward ops whose outputs the backward reads, and the ops that these need.
std::vector<bool> needed_for_backward(const OpGraph& graph, const TrainingBlock& training) {
  std::vector<bool> wanted(graph.tensors.size(), false);
  for (TensorId id : training.saved) wanted[id] = true;
  std::vector<bool> needed(training.forward.size(), false);
  for (std::size_t i = training.forward.size(); i-- > 0;) {
    const Op& op = graph.ops[training.forward[i].forward_op];
    for (TensorId output : op.outputs) needed[i] = needed[i] || wanted[output];
    if (needed[i])
      for (TensorId input : op.inputs) wanted[input] = true;
  }
  return needed;
}

}  // namespace

BlockParameters block_parameters(const OpGraph& graph, const Block& block) {
  const std::vector<TensorId>& tied = graph.tied;
  BlockParameters result;
  for (int i = block.first_op; i < block.last_op; ++i)
    for (TensorId id : graph.ops[i].parameters) {
      if (std::find(tied.begin(), tied.end(), id) != tied.end()) {
        PARPLAN_ASSERT(!result.tied || result.tied == id, block.name);
        result.tied = id;
      } else if (std::find(result.own.begin(), result.own.end(), id) == result.own.end()) {
        result.own.push_back(id);
      }
    }
  return result;
}

namespace {

// Whether each rank knows only the gradient of its own heads' share.
bool read_by_heads(const OpGraph& graph, TensorId parameter) {
  return std::ranges::any_of(graph.ops, [&](const Op& op) {
    return row_of(op.kind).sharding == ShardingRule::heads &&
           std::ranges::find(op.parameters, parameter) != op.parameters.end();
  });
}

// Whether each rank of the tensor axis knows only the gradient of its own tokens.
bool read_sharded_by_sequence(const OpGraph& graph, TensorId parameter, const BlockChoice& choice) {
  const Placement sharded = shard(Dim::sequence);
  const bool leaves = choice.layout.placements.residual.tp == sharded;
  if ((choice.entering.tp == sharded) == leaves) return leaves;
  // The placement changes within the block: the op that reads the parameter decides.
  for (const Block& block : graph.blocks)
    for (int i = block.first_op; i < block.last_op; ++i) {
      const Op& op = graph.ops[i];
      if (std::ranges::find(op.parameters, parameter) == op.parameters.end()) continue;
      const BlockPlacements placed = propagate(graph, block, choice);
      return std::ranges::any_of(placed.inputs[i - block.first_op],
                                 [&](const TensorLayout& input) { return input.tp == sharded; }) ||
             std::ranges::any_of(op.outputs, [&](TensorId id) { return placed.canonical[id].tp == sharded; });
    }
  return false;
}

}  // namespace

BucketLayout bucket_layout(const OpGraph& graph, const std::vector<TensorId>& parameters, const BlockChoice& choice) {
  BucketLayout layout;
  for (TensorId id : parameters) layout.parts.push_back(local_part(graph, id, choice));
  const auto decays = [&](const ParameterPart& part) { return graph.tensors[part.tensor].decays; };
  std::stable_sort(layout.parts.begin(), layout.parts.end(), [&](const ParameterPart& a, const ParameterPart& b) {
    return std::pair(a.tensor_replicated, !decays(a)) < std::pair(b.tensor_replicated, !decays(b));
  });
  for (ParameterPart& part : layout.parts) {
    part.bucket_offset = layout.elements;
    layout.elements += align_up(Bytes(part.rows * part.columns), bucket_alignment).count;
    if (decays(part)) extend(layout.decaying, part.bucket_offset, layout.elements);
    if (part.tensor_replicated) extend(layout.replicated, part.bucket_offset, layout.elements);
    if (part.tensor_replicated &&
        (read_sharded_by_sequence(graph, part.tensor, choice) || read_by_heads(graph, part.tensor)))
      extend(layout.tensor_partial, part.bucket_offset, layout.elements);
  }
  return layout;
}

LoweredBlock lower_block(const OpGraph& graph, int block_index, const BlockChoice& choice) {
  const Block& block = graph.blocks[block_index];
  const TrainingBlock training = training_block(graph, block_index);
  const BlockPlacements placements = propagate(graph, block, choice);
  const BlockParameters parameters = block_parameters(graph, block);
  const BucketLayout own = bucket_layout(graph, parameters.own, choice);
  const BucketLayout tied = parameters.tied ? bucket_layout(graph, {*parameters.tied}, choice) : BucketLayout{};
  const bool recompute = choice.layout.recompute == Recompute::full && block.input && block.output;

  LoweredBlock result;
  const auto save = [&](TensorId id) {
    const std::int64_t bytes = local_bytes(graph.tensors[id],
                                           placements.canonical[id], choice);
    result.saved.push_back({id, result.saved_bytes, bytes});
    result.saved_bytes = align_up(Bytes(result.saved_bytes + bytes), byte_alignment).count;
  };
  if (block.input) save(*block.input);
  if (!recompute)
    for (TensorId id : training.saved)
      if (id != block.input) save(id);
  if (block.input) result.input_bytes = local_bytes(graph.tensors[*block.input], choice.entering, choice);
  if (block.output)
    result.output_bytes = local_bytes(graph.tensors[*block.output], choice.layout.placements.residual, choice);

  const std::string name = !block.input || !block.output ? block.name : "layers";
  const std::vector<bool> all(training.forward.size(), true);
  {
    // Under recompute only the input is kept: the forward leaves everything but its output in
    // scratch.
    TrainingBlock kept = training;
    if (recompute) kept.saved.clear();
    SegmentBuilder builder(graph, block, choice, placements, kept, own, tied, result.saved);
    builder.forward(all, true, Label::compute);
    result.forward = builder.finish(name + ".forward");
  }
  SegmentBuilder builder(graph, block, choice, placements, training, own, tied, result.saved);
  if (recompute) builder.forward(needed_for_backward(graph, training), false, Label::recompute);
  builder.backward(recompute);
  result.backward = builder.finish(name + ".backward");
  return result;
}

}  // namespace parplan
