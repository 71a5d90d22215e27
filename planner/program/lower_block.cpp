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
  for (const ParameterPart& part : bucket_layout(graph, block, parameters.own, result.placements, context).parts)
    result.parameters[part.tensor] = {part, false};
  if (parameters.tied)
    for (const ParameterPart& part : bucket_layout(graph, block, {*parameters.tied}, result.placements, context).parts)
      result.parameters[part.tensor] = {part, true};
  return result;
}

// What the forward leaves for the backward, the block's input first. The first and the last block
// keep all that the backward reads: of the one that is little but tokens, and the backward of the
// other follows its forward.
std::vector<TensorId> kept_tensors(const BlockLowering& lowering, const RecomputeRow& recompute) {
  const Block& block = lowering.block;
  std::vector<TensorId> kept;
  if (block.input) kept.push_back(*block.input);
  for (const TensorId id : lowering.training.saved) {
    const bool chooses = block.input && block.output;
    if (id != block.input && (!chooses || recompute.keeps(lowering.graph, block, id))) kept.push_back(id);
  }
  return kept;
}

// Gives each tensor its place in the binding "saved", or "input"; returns the bytes of the first.
std::int64_t place(BlockLowering& lowering, const std::vector<TensorId>& kept) {
  std::int64_t end = 0;
  for (const TensorId id : kept) {
    const std::int64_t bytes =
        local_bytes(lowering.graph.tensors[id], lowering.placements.canonical[id], lowering.context);
    if (is_apart(lowering, id)) {
      lowering.saved.push_back({id, 0, bytes});
      continue;
    }
    lowering.saved.push_back({id, end, bytes});
    end = align_up(Bytes(end + bytes), alignment).count;
  }
  return end;
}

// Marks the forward ops that make what the backward reads and does not find, and the ops that these
// need.
std::vector<bool> needed_again(const BlockLowering& lowering, const std::vector<TensorId>& kept) {
  const TrainingBlock& training = lowering.training;
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

Segment backward_segment(const BlockLowering& lowering, const std::vector<TensorId>& kept, std::string name) {
  SegmentLowering segment(lowering);
  for (const TensorId id : kept)
    segment.forward[{id, lowering.placements.canonical[id]}] = *saved_value(segment, id);
  run_forward(segment, {.needed = needed_again(lowering, kept),
                        .preserved = lowering.training.saved,
                        .delivers = false,
                        .label = Label::recompute});
  run_backward(segment);
  return finish(std::move(segment), std::move(name));
}

}  // namespace

LoweredBlock lower_block(const OpGraph& graph, int block, const BlockContext& context, const RecomputeRow& recompute) {
  BlockLowering lowering = block_lowering(graph, block, context);
  const std::vector<TensorId> kept = kept_tensors(lowering, recompute);

  LoweredBlock result;
  result.saved_bytes = place(lowering, kept);
  result.saved = lowering.saved;
  const std::optional<TensorId> input = lowering.block.input, output = lowering.block.output;
  if (input) result.input_bytes = local_bytes(graph.tensors[*input], context.entering, context);
  if (output) result.output_bytes = local_bytes(graph.tensors[*output], context.layout.placements.residual, context);
  const std::string name = input && output ? "layers" : lowering.block.name;
  result.forward = forward_segment(lowering, kept, name + ".forward");
  result.backward = backward_segment(lowering, kept, name + ".backward");
  return result;
}

std::int64_t saved_bytes_without_input(const LoweredBlock& block) {
  return block.saved_bytes - align_up(Bytes(block.input_bytes), alignment).count;
}

LoweredBlock lower_block(const OpGraph& graph, int block, const BlockContext& context) {
  return lower_block(graph, block, context, row_of(context.layout.recompute));
}

}  // namespace parplan
