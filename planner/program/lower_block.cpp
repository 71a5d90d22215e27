#include "planner/program/lower_block.h"

#include <algorithm>
#include <utility>

#include "planner/program/bucket_layout.h"
#include "planner/program/segment_lowering.h"

namespace parplan {
namespace {

constexpr std::int64_t alignment = 64;  // bytes

bool contains(const std::vector<TensorId>& ids, TensorId id) { return std::ranges::find(ids, id) != ids.end(); }

// The block without what the forward leaves for the backward.
BlockLowering block_lowering(const OpGraph& graph, int number, const BlockContext& context) {
  const Block& block = graph.blocks[number];
  BlockLowering result{.graph = graph,
                       .block = block,
                       .context = context,
                       .training = training_block(graph, number),
                       .placements = propagate(graph, block, context),
                       .entering = {},
                       .residual = {},
                       .parameters = {},
                       .saved = {}};
  for (const Axis axis : all_axes)
    if (context.layout.degree[axis] > 1) {
      result.entering[axis] = context.entering[axis];
      result.residual[axis] = context.layout.placements.residual[axis];
    }
  const BlockParameters parameters = block_parameters(graph, block);
  const auto add = [&](const std::vector<TensorId>& ids, const char* values, const char* gradients) {
    for (const ParameterPart& part : bucket_layout(graph, block, ids, result.placements, context).parts) {
      const auto [known, is_first] =
          result.parameters.try_emplace(part.tensor, BlockLowering::Parameter{part, values, gradients});
      if (!is_first) known->second.part.rows += part.rows;  // its rectangles lie side by side
    }
  };
  add(parameters.own, binding::parameters, binding::gradients);
  add(parameters.frozen, binding::frozen, nullptr);
  if (parameters.tied) add({*parameters.tied}, binding::tied_parameters, binding::tied_gradients);
  return result;
}

// What the forward leaves for the backward, the block's input first. Ops that run again find what
// is kept, too: what the rule keeps is not computed again for them.
std::vector<TensorId> kept_tensors(const BlockLowering& lowering, const RecomputeRow& recompute) {
  const Block& block = lowering.block;
  const TrainingBlock& training = lowering.training;
  std::vector<TensorId> kept;
  if (block.input) kept.push_back(*block.input);
  const bool keeps_all = !may_recompute(block);
  std::vector<bool> wanted(lowering.graph.tensors.size(), false);
  for (const TensorId id : training.saved) {
    if (id == block.input) continue;
    if (keeps_all || recompute.keeps(lowering.graph, block, id))
      kept.push_back(id);
    else
      wanted[id] = true;
  }
  const bool keeps_unread = lowering.context.keeps_unread && recompute.kind == Recompute::every_other_product;
  if (keeps_all) return kept;
  for (std::size_t i = training.forward.size(); i-- > 0;) {
    const Op& op = lowering.graph.ops[training.forward[i].forward_op];
    for (const TensorId output : op.outputs)
      if ((wanted[output] || keeps_unread) && !contains(kept, output) &&
          recompute.keeps(lowering.graph, block, output)) {
        kept.push_back(output);
        wanted[output] = false;
      }
    if (std::ranges::any_of(op.outputs, [&](TensorId output) { return wanted[output]; }))
      for (const TensorId input : op.inputs) wanted[input] = wanted[input] || !contains(kept, input);
  }
  return kept;
}

// Whether the block's backward has two parts: the weight gradients of its products apart.
bool splits(const BlockLowering& lowering) {
  return lowering.context.splits_backward && lowering.block.input && lowering.block.output &&
         std::ranges::any_of(lowering.training.backward, is_for_weights);
}

// Whether the second part of the backward reads a forward tensor.
bool is_read_for_weights(const BlockLowering& lowering, TensorId id) {
  return std::ranges::any_of(lowering.training.backward, [&](const TrainingOp& op) {
    return is_for_weights(op) && std::ranges::any_of(op.operands, [&](const TrainingOperand& operand) {
             return operand.source == OperandSource::input && operand.tensor == id;
           });
  });
}

// The bytes of the bindings "saved" and "saved for weights".
struct SavedBytes {
  std::int64_t saved = 0;
  std::int64_t for_weights = 0;
};

// Gives each tensor its place in one of them, or in the binding "input". The block's input arrives
// in "saved" or "input", whoever reads it.
SavedBytes place(BlockLowering& lowering, const std::vector<TensorId>& kept) {
  SavedBytes ends;
  for (const TensorId id : kept) {
    const bool for_weights = id != lowering.block.input && splits(lowering) && is_read_for_weights(lowering, id);
    std::int64_t& end = for_weights ? ends.for_weights : ends.saved;
    const std::int64_t bytes =
        local_bytes(lowering.graph.tensors[id], lowering.placements.canonical[id], lowering.context);
    if (is_apart(lowering, id)) {
      lowering.saved.push_back({id, 0, bytes});
      continue;
    }
    lowering.saved.push_back({id, end, bytes, for_weights});
    end = align_up(Bytes(end + bytes), alignment).count;
  }
  return ends;
}

// Marks the forward ops that make what the backward reads and does not find, and the ops that these
// need.
std::vector<bool> needed_again(const BlockLowering& lowering, const std::vector<TensorId>& kept) {
  const TrainingBlock& training = lowering.training;
  if (lowering.repeats_all) return std::vector<bool>(training.forward.size(), true);
  std::vector<bool> wanted(lowering.graph.tensors.size(), false);
  for (const TensorId id : training.saved) wanted[id] = !contains(kept, id);
  std::vector<bool> needed(training.forward.size(), false);
  for (std::size_t i = training.forward.size(); i-- > 0;) {
    const Op& op = lowering.graph.ops[training.forward[i].forward_op];
    needed[i] = std::ranges::any_of(op.outputs, [&](TensorId output) { return wanted[output]; });
    if (needed[i])
      for (const TensorId input : op.inputs) wanted[input] = wanted[input] || !contains(kept, input);
  }
  return needed;
}

Segment forward_segment(const BlockLowering& lowering, const std::vector<TensorId>& kept, std::string name) {
  SegmentLowering segment(lowering);
  if (const std::optional<TensorId> input = lowering.block.input)
    segment.forward[{*input, lowering.entering}] = *saved_value(segment, *input);
  run_forward(segment, {.needed = std::vector<bool>(lowering.training.forward.size(), true),
                        .preserved = kept,
                        .delivers = true,
                        .label = Label::compute});
  return finish(std::move(segment), std::move(name));
}

// The whole backward, or its first part where `left` says what that leaves.
Segment backward_segment(const BlockLowering& lowering, const std::vector<TensorId>& kept, const LeftForWeights* left,
                         std::string name) {
  SegmentLowering segment(lowering);
  segment.left = left;
  for (const TensorId id : kept)
    segment.forward[{id, lowering.placements.canonical[id]}] = *saved_value(segment, id);
  run_forward(segment, {.needed = needed_again(lowering, kept),
                        .preserved = lowering.training.saved,
                        .delivers = false,
                        .label = Label::recompute});
  run_backward(segment, left == nullptr ? BackwardPart::whole : BackwardPart::inputs);
  return finish(std::move(segment), std::move(name));
}

Segment weights_segment(const BlockLowering& lowering, const LeftForWeights& left, std::string name) {
  SegmentLowering segment(lowering);
  segment.left = &left;
  for (const SavedTensor& saved : lowering.saved)
    if (saved.for_weights)
      segment.forward[{saved.tensor, lowering.placements.canonical[saved.tensor]}] =
          *saved_value(segment, saved.tensor);
  for (const SavedTensor& value : left.values)
    segment.forward[{value.tensor, lowering.placements.canonical[value.tensor]}] = *left_value(segment, value.tensor);
  run_backward(segment, BackwardPart::weights);
  return finish(std::move(segment), std::move(name));
}

}  // namespace

bool may_recompute(const Block& block) {
  return block.input.has_value() && block.output.has_value();
}

LoweredBlock lower_block(const OpGraph& graph, int block, const BlockContext& context, const RecomputeRow& recompute) {
  BlockLowering lowering = block_lowering(graph, block, context);
  const std::vector<TensorId> kept = kept_tensors(lowering, recompute);
  lowering.repeats_all = context.repeats_all && recompute.kind == Recompute::full && may_recompute(lowering.block) &&
                         !lowering.training.backward.empty();

  LoweredBlock result;
  const SavedBytes bytes = place(lowering, kept);
  result.saved_bytes = bytes.saved;
  result.for_weights_bytes = bytes.for_weights;
  result.saved = lowering.saved;
  result.input_apart = lowering.block.input && is_apart(lowering, *lowering.block.input);
  const std::optional<TensorId> input = lowering.block.input, output = lowering.block.output;
  if (input) result.input_bytes = local_bytes(graph.tensors[*input], context.entering, context);
  if (output) result.output_bytes = local_bytes(graph.tensors[*output], context.layout.placements.residual, context);
  if (lowering.training.passes_gradient_on) result.gradient_bytes = result.input_bytes;
  if (!lowering.training.backward.empty()) result.gradient_bytes = std::max(result.gradient_bytes, result.output_bytes);
  const std::string name = input && output ? "layers" : lowering.block.name;
  result.forward = forward_segment(lowering, kept, name + ".forward");
  result.backward = backward_segment(lowering, kept, nullptr, name + ".backward");
  if (!splits(lowering)) {
    if (context.splits_backward) result.backward_inputs = result.backward;
    return result;
  }
  const LeftForWeights left = left_for_weights(lowering);
  result.left_bytes = left.bytes;
  result.backward_inputs = backward_segment(lowering, kept, &left, name + ".backward_inputs");
  result.backward_weights = weights_segment(lowering, left, name + ".backward_weights");
  return result;
}

int transfer_parts(const TensorLayout& residual, const DeviceMesh& mesh, const Engine& engine) {
  return engine.splits_transfers && residual[Axis::tp] == replicate() ? mesh.degree.tp : 1;
}

namespace {

// Joins those that touch or overlap; ascending.
std::vector<ByteRange> joined(std::vector<ByteRange> ranges) {
  std::ranges::sort(ranges, {}, &ByteRange::begin);
  std::vector<ByteRange> joined;
  for (const ByteRange& range : ranges) {
    if (range.begin == range.end) continue;
    if (!joined.empty() && joined.back().end >= range.begin)
      joined.back().end = std::max(joined.back().end, range.end);
    else
      joined.push_back(range);
  }
  return joined;
}

}  // namespace

std::vector<ByteRange> saved_ranges(const LoweredBlock& block, bool with_input) {
  std::vector<ByteRange> ranges;
  for (std::size_t i = with_input && !block.input_apart ? 0 : 1; i < block.saved.size(); ++i)
    if (const SavedTensor& saved = block.saved[i]; !saved.for_weights)
      ranges.push_back({saved.offset, saved.offset + saved.bytes});
  return joined(std::move(ranges));
}

std::vector<ByteRange> for_weights_ranges(const LoweredBlock& block) {
  std::vector<ByteRange> ranges;
  for (const SavedTensor& saved : block.saved)
    if (saved.for_weights) ranges.push_back({saved.offset, saved.offset + saved.bytes});
  return joined(std::move(ranges));
}

std::vector<ByteRange> ranges_read(const Segment& segment, const char* bound) {
  std::vector<ByteRange> ranges;
  for (const Instruction& instruction : segment.instructions)
    for (const Operand& operand : instruction.operands)
      if (segment.bindings[operand.binding] == bound && operand.access != Access::write)
        ranges.push_back({operand.offset, operand.offset + operand.bytes});
  return joined(std::move(ranges));
}

std::int64_t saved_bytes_without_input(const LoweredBlock& block) {
  return block.saved_bytes - align_up(Bytes(block.input_bytes), alignment).count;
}

LoweredBlock lower_block(const OpGraph& graph, int block, const BlockContext& context) {
  return lower_block(graph, block, context, row_of(context.layout.recompute));
}

}  // namespace parplan
