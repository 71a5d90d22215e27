#include "planner/simulator/block_shapes.h"

#include <algorithm>
#include <utility>

#include "planner/program/bucket_layout.h"

namespace parplan {
namespace {

BucketElements elements_of(const OpGraph& graph, const Block& block, const std::vector<TensorId>& parameters,
                           const BlockContext& context) {
  const BucketLayout layout = bucket_layout(graph, block, parameters, context);
  BucketElements elements{.all = layout.elements, .of_parameters = {}};
  if (parameters.empty()) return elements;
  for (const BucketUnit& unit : bucket_units(layout, layout.elements, GatherUnit::parameter, 1, 0))
    elements.of_parameters.push_back(unit.range.size());
  return elements;
}

BlockShapes shapes_of(const OpGraph& graph, const BlockContext& context) {
  BlockShapes shapes;
  for (const int first : graph.kinds) {
    const Block& block = graph.blocks[first];
    const BlockParameters parameters = block_parameters(graph, block);
    if (parameters.tied && shapes.tied_elements.all == 0) {
      shapes.tied_elements = elements_of(graph, block, {*parameters.tied}, context);
      shapes.tied_is_frozen = graph.tensors[*parameters.tied].frozen;
    }
    shapes.kinds.push_back(lower_block(graph, first, context));
    shapes.own_elements.push_back(elements_of(graph, block, parameters.own, context));
    shapes.frozen_elements.push_back(elements_of(graph, block, parameters.frozen, context));
  }
  return shapes;
}

}  // namespace

std::shared_ptr<const BlockShapes> KnownBlockShapes::of(const OpGraph& graph, const TrainingSpec& training,
                                                        BackendKind backend, const ParallelSpec& spec,
                                                        const Placements& placements, Recompute recompute,
                                                        LoweredFor purpose) {
  const ParallelSpec key = block_key(spec, recompute);
  // A micro-batch has the same shapes in every batch.
  TrainingSpec of_any_batch = training;
  of_any_batch.global_batch = 0;
  const auto place_of = [&]() -> std::shared_ptr<const BlockShapes>& {
    auto of_training = std::ranges::find_if(known_, [&](const Known& one) {
      return one.backend == backend && one.purpose == purpose && one.training == of_any_batch;
    });
    if (of_training == known_.end()) {
      known_.push_back({.training = of_any_batch, .backend = backend, .purpose = purpose, .shapes = {}});
      of_training = known_.end() - 1;
    }
    return of_training->shapes[key];
  };
  {
    const std::scoped_lock lock(mutex_);
    if (const std::shared_ptr<const BlockShapes>& known = place_of()) return known;
  }
  // Two threads may make the same: better than that one waits for all that others make.
  BlockContext context = block_context(block_layout(spec, placements, recompute), placements.residual, Coordinates{},
                                       training, backend, true);
  context.splits_backward = runs_backward_in_parts(spec.schedule);
  context.scratch_apart = purpose != LoweredFor::runs;
  if (purpose == LoweredFor::floors_unfused) context.fusions = {.norms = false, .activations = false};
  auto made = std::make_shared<const BlockShapes>(shapes_of(graph, context));
  const std::scoped_lock lock(mutex_);
  return place_of() = std::move(made);
}

}  // namespace parplan
