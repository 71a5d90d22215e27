#include "planner/simulator/block_shapes.h"

#include <algorithm>
#include <set>
#include <utility>

#include "planner/program/bucket_layout.h"
#include "planner/program/orthogonalize.h"

namespace parplan {
namespace {

BucketElements elements_of(const BucketLayout& layout, const std::vector<TensorId>& parameters, std::int64_t least) {
  BucketElements elements{.all = layout.elements, .of_parameters = {}, .begins_unit = {}};
  if (parameters.empty()) return elements;
  const auto units_of = [&](std::int64_t of_at_least) {
    return bucket_units(layout, layout.elements, GatherUnit::parameter, 1, 0, of_at_least);
  };
  std::set<std::int64_t> begins;
  for (const BucketUnit& unit : units_of(least)) begins.insert(unit.range.begin);
  for (const BucketUnit& parameter : units_of(0)) {
    elements.of_parameters.push_back(parameter.range.size());
    elements.begins_unit.push_back(begins.contains(parameter.range.begin) ? 1 : 0);
  }
  return elements;
}

// `least`: Engine::persists_below.
BlockShapes shapes_of(const OpGraph& graph, const BlockContext& context, std::int64_t least) {
  BlockShapes shapes;
  for (const int first : graph.kinds) {
    const Block& block = graph.blocks[first];
    const BlockParameters parameters = block_parameters(graph, block);
    if (parameters.tied && shapes.tied_elements.all == 0) {
      const std::vector<TensorId> tied{*parameters.tied};
      shapes.tied_elements = elements_of(bucket_layout(graph, block, tied, context), tied, least);
      shapes.tied_is_frozen = graph.tensors[*parameters.tied].frozen;
    }
    shapes.kinds.push_back(lower_block(graph, first, context));
    const BucketLayout own = bucket_layout(graph, block, parameters.own, context);
    shapes.own_elements.push_back(elements_of(own, parameters.own, least));
    shapes.matrix_elements.push_back(own.matrix_elements);
    std::vector<Instruction>& kernels = shapes.orthogonalizations.emplace_back();
    std::int64_t& scratch = shapes.orthogonalization_scratch.emplace_back();
    for (const BucketMatrix& matrix : matrices_of(graph, own, context.layout.degree.tp)) {
      const Orthogonalization work = orthogonalize(matrix, context.precision, context.backend);
      for (const MatrixInstruction& one : work.instructions)
        if (one.instruction.kind == InstructionKind::kernel) kernels.push_back(one.instruction);
      scratch = std::max(scratch, work.scratch_bytes);
    }
    shapes.frozen_elements.push_back(
        elements_of(bucket_layout(graph, block, parameters.frozen, context), parameters.frozen, least));
  }
  return shapes;
}

// From those with another recompute.
BlockShapes shapes_of(const OpGraph& graph, const BlockContext& context, const BlockShapes& other) {
  BlockShapes shapes = other;
  for (std::size_t kind = 0; kind < shapes.kinds.size(); ++kind)
    if (const int first = graph.kinds[kind]; may_recompute(graph.blocks[first]))
      shapes.kinds[kind] = lower_block(graph, first, context);
  return shapes;
}

}  // namespace

std::shared_ptr<const BlockShapes> KnownBlockShapes::of(const OpGraph& graph, const TrainingSpec& training,
                                                        BackendKind backend, const ParallelSpec& spec,
                                                        const Placements& placements, Recompute recompute,
                                                        LoweredFor purpose) {
  const ParallelSpec key = block_key(spec, recompute, training);
  // A micro-batch has the same shapes in every batch.
  TrainingSpec of_any_batch = training;
  of_any_batch.global_batch = 0;
  const auto place_of = [&](const ParallelSpec& of) -> std::shared_ptr<const BlockShapes>& {
    auto of_training = std::ranges::find_if(known_, [&](const Known& one) {
      return one.backend == backend && one.purpose == purpose && one.training == of_any_batch;
    });
    if (of_training == known_.end()) {
      known_.push_back({.training = of_any_batch, .backend = backend, .purpose = purpose, .shapes = {}});
      of_training = known_.end() - 1;
    }
    return of_training->shapes[of];
  };
  std::shared_ptr<const BlockShapes> other;
  {
    const std::scoped_lock lock(mutex_);
    if (const std::shared_ptr<const BlockShapes>& known = place_of(key)) return known;
    if (recompute != Recompute::none) other = place_of(block_key(spec, Recompute::none, training));
  }
  // Two threads may make the same: better than that one waits for all that others make.
  BlockContext context = block_context(block_layout(spec, placements, recompute), placements.residual, Coordinates{},
                                       training, backend, true);
  context.splits_backward = runs_backward_in_parts(spec.schedule);
  context.scratch_apart = purpose != LoweredFor::runs;
  // Floors hold whether or not parameters are gathered.
  if (purpose != LoweredFor::runs && training.engine.casts_weights_apart && context.fp8 == Fp8Casts::each_product)
    context.fp8 = Fp8Casts::but_weights;
  if (purpose == LoweredFor::floors_unfused) context.fusions = {.norms = false, .activations = false};
  auto made =
      std::make_shared<const BlockShapes>(other ? shapes_of(graph, context, *other)
                                                : shapes_of(graph, context, training.engine.persists_below));
  const std::scoped_lock lock(mutex_);
  return place_of(key) = std::move(made);
}

}  // namespace parplan
