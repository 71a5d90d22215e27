#include "planner/simulator/block_costs.h"

#include <utility>

#include "planner/cost/host_time.h"
#include "planner/simulator/segment_cost.h"

namespace parplan {

KnownBlockCosts::KnownBlockCosts(const OpGraph& graph, const ModelBlocks& blocks, const TrainingSpec& training,
                                 MeshViews& views, std::shared_ptr<KnownBlockShapes> shapes)
    : graph_(graph),
      blocks_(blocks),
      training_(training),
      views_(views),
      known_shapes_(shapes ? std::move(shapes) : std::make_shared<KnownBlockShapes>()) {}

int KnownBlockCosts::number_of(const ParallelSpec& spec, const Placements& placements, Recompute recompute, int stage) {
  if (runs_backward_in_parts(spec.schedule) && !runs_backward_in_parts(spec.schedule, stage)) {
    ParallelSpec whole = spec;
    whole.schedule = ParallelSpec().schedule;
    return number_of(whole, placements, recompute, stage);
  }
  const auto [entry, inserted] =
      numbers_.try_emplace(block_key(spec, recompute, training_), static_cast<int>(shapes_.size()));
  if (!inserted) return entry->second;
  shapes_.push_back(known_shapes_->of(graph_, training_, views_.cluster().backend(), spec, placements, recompute));
  also_whole_.push_back(also_runs_whole_backwards(spec.schedule));
  return entry->second;
}

std::shared_ptr<const BlockShapes> KnownBlockCosts::shapes_for(LoweredFor purpose, const ParallelSpec& spec,
                                                               const Placements& placements,
                                                               Recompute recompute) const {
  return known_shapes_->of(graph_, training_, views_.cluster().backend(), spec, placements, recompute, purpose);
}

const BlockCosts& KnownBlockCosts::of(int number, int environment) {
  const auto [entry, inserted] = costs_.try_emplace({number, environment});
  if (!inserted) return entry->second;
  const StageEnvironment& where = views_.environment(environment);
  CostModel model = kernel_model(where.device, where.rates, training_.engine);
  for (const Axis axis : block_axes)
    if (is_planned(axis)) model.networks[all_along(axis)] = where.along[axis];
  if (where.exchange.ranks > 1) set_context_groups(where.exchange, where.keys, model.networks);
  BlockCosts& costs = entry->second;
  for (const LoweredBlock& block : shapes(number).kinds) {
    const CostedSegment forward = cost_segment(block.forward, model);
    const bool in_parts = !block.backward_inputs.instructions.empty();
    const CostedSegment backward = cost_segment(in_parts ? block.backward_inputs : block.backward, model);
    costs.forward.push_back(forward.parts);
    costs.backward.push_back(backward.parts);
    costs.forward_bound.push_back(forward.bound);
    costs.backward_bound.push_back(in_parts ? BoundTimes{} : backward.bound);
    costs.weights_seconds.emplace_back();
    if (!block.backward_weights.instructions.empty()) {
      const StepTime weights = cost_segment(block.backward_weights, model).parts;
      costs.backward.back() += weights;
      costs.weights_seconds.back() = weights.total();
    }
    // Where some backwards are whole, each takes at least the less of the two.
    if (also_runs_whole(number))
      if (const StepTime whole = cost_segment(block.backward, model).parts;
          whole.total() < costs.backward.back().total())
        costs.backward.back() = whole;
    costs.forward_seconds.push_back(costs.forward.back().total());
    costs.backward_seconds.push_back(costs.backward.back().total());
  }
  return costs;
}

Home KnownBlockCosts::home_of_saved(const ParallelSpec& spec, std::size_t kind) const {
  const bool may_be_elsewhere = blocks_.is_layer_kind(kind) && has_backward(graph_, graph_.kinds[kind]);
  return may_be_elsewhere ? spec.offload.activations : Home::device;
}

const std::vector<SavedCopies>* KnownBlockCosts::copies(const ParallelSpec& spec, int number, int environment) {
  if (spec.offload.activations == Home::device) return nullptr;
  const auto [entry, inserted] = copies_.try_emplace({number, environment, spec.offload.activations});
  if (!inserted) return &entry->second;
  const StageEnvironment& where = views_.environment(environment);
  const auto sum_of = [](const std::vector<ByteRange>& ranges, const auto& time_of) {
    Seconds sum;
    for (const ByteRange& range : ranges) sum += time_of(Bytes(range.end - range.begin));
    return sum;
  };
  const auto time = [&](const std::vector<ByteRange>& ranges) {
    return sum_of(ranges, [&](Bytes bytes) { return host_copy_time(bytes, *where.device, where.rates, where.host); });
  };
  const auto in_file = [&](Stream stream, const std::vector<ByteRange>& ranges) {
    return sum_of(ranges, [&](Bytes bytes) { return file_time(stream, bytes, where.nvme); });
  };
  const std::vector<LoweredBlock>& kinds = shapes(number).kinds;
  for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
    SavedCopies& copies = entry->second.emplace_back();
    if (home_of_saved(spec, kind) == Home::device) continue;
    const LoweredBlock& block = kinds[kind];
    copies.for_weights = time(for_weights_ranges(block));
    copies.out = time(saved_ranges(block, true)) + copies.for_weights;
    copies.out_without_input = time(saved_ranges(block, false)) + copies.for_weights;
    const Seconds for_first_part = time(ranges_read(block.backward_inputs, binding::for_weights));
    copies.back = copies.out - copies.for_weights + for_first_part;
    copies.back_without_input = copies.out_without_input - copies.for_weights + for_first_part;
    if (spec.offload.activations != Home::nvme) continue;
    // An input that lies apart is not there.
    copies.write =
        in_file(Stream::to_nvme, saved_ranges(block, false)) + in_file(Stream::to_nvme, for_weights_ranges(block));
    copies.read = in_file(Stream::from_nvme, saved_ranges(block, false));
  }
  return &entry->second;
}

}  // namespace parplan
