#include "planner/simulator/estimate.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "planner/base/enum_index.h"
#include "planner/cluster/communicators.h"
#include "planner/cost/collective_time.h"
#include "planner/cost/host_time.h"
#include "planner/cost/kernel_time.h"
#include "planner/plan/ring_axes.h"
#include "planner/program/activation_slots.h"
#include "planner/program/bucket_layout.h"
#include "planner/program/bucket_work.h"
#include "planner/program/lower.h"
#include "planner/program/rank_buckets.h"
#include "planner/program/workspace.h"
#include "planner/simulator/segment_cost.h"

namespace parplan {
namespace {

std::int64_t padded(std::int64_t elements, const ParallelSpec& spec) {
  return padded_elements(elements, spec.shard_ranks());
}

BucketSizes bucket_of(std::int64_t elements, const ParallelSpec& spec, const Placements& placements) {
  return {.elements = padded(elements, spec),
          .shards = data_shards(placements, spec.replicas()),
          .shard_ranks = spec.shard_ranks(),
          .homes = placements.state.homes};
}

// The bucket of the tied parameter on a rank with so many uses.
BucketSizes tied_bucket(const BlockShapes& shapes, const ParallelSpec& spec, const Placements& placements, int uses) {
  BucketSizes tied = bucket_of(shapes.tied_elements, spec, placements);
  tied.tied = true;
  tied.frozen = shapes.tied_is_frozen;
  tied.accumulates_twice = uses > 1 && spec.tied_gradients == TiedGradients::apart;
  return tied;
}

// The bucket of what is frozen of blocks of a kind.
BucketSizes frozen_bucket(const BlockShapes& shapes, std::size_t kind, const ParallelSpec& spec,
                          const Placements& placements) {
  BucketSizes bucket = bucket_of(shapes.frozen_elements[kind], spec, placements);
  bucket.frozen = true;
  return bucket;
}

Bytes persistent(const MemoryUse& use) { return use.parameters + use.gradients + use.optimizer; }

// What a block's saved activations take in one slot.
std::int64_t saved_with_reserve(std::int64_t bytes, const TrainingSpec& training) {
  return (align_up(Bytes(bytes), buffer_alignment) + reserve_of(bytes, MemoryCategory::activations, training)).count;
}

// State with what the allocator keeps beside it, where there are no activations.
Bytes held_by_state(const MemoryUse& use) {
  return persistent(use) + use.reserve;
}

std::int64_t crossing_bytes(const LoweredBlock& block) { return std::max(block.input_bytes, block.output_bytes); }

// What one rank sends of it.
Bytes sent_bytes(std::int64_t crossing, const ParallelSpec& spec, const Placements& placements,
                 const TrainingSpec& training) {
  return Bytes(crossing / transfer_parts(placements.residual, spec.mesh, training.engine));
}

}  // namespace

bool boundaries_are_alike(const Cluster& cluster, const DeviceMesh& mesh) {
  return cluster.groups.size() == 1 && cluster.network.levels.size() <= 1 &&
         mesh.stride_of(Axis::pp) % cluster.groups.front().devices_per_node() == 0;
}

Estimator::Estimator(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                     std::shared_ptr<KnownBlockShapes> known_shapes)
    : graph_(graph),
      cluster_(cluster),
      training_(training),
      known_shapes_(known_shapes ? std::move(known_shapes) : std::make_shared<KnownBlockShapes>()),
      networks_(cluster, training.engine) {
  for (const Block& block : graph.blocks) {
    if (block_parameters(graph, block).tied) tied_blocks_.push_back(static_cast<int>(uses_tied_.size()));
    uses_tied_.push_back(block_parameters(graph, block).tied.has_value());
    if (static_cast<std::size_t>(block.kind) >= blocks_of_kind_.size())
      blocks_of_kind_.resize(static_cast<std::size_t>(block.kind) + 1);
  }
  const std::int64_t scratch = step_scratch_bytes(training_, cluster_.backend()).count;
  least_memory_ = rank_memory({.buckets = {}, .saved = {}, .scratch_bytes = scratch}, training_).peak();
  has_fixed_state_ = tied_blocks_.size() < 2 ||
                     (tied_blocks_.size() == 2 && tied_blocks_.front() == 0 &&
                      tied_blocks_.back() + 1 == static_cast<int>(graph.blocks.size()));
  is_layer_kind_.assign(blocks_of_kind_.size(), false);
  for (std::size_t b = 0; b < graph.blocks.size(); ++b)
    if (is_layer(graph, static_cast<int>(b))) is_layer_kind_[static_cast<std::size_t>(graph.blocks[b].kind)] = true;
  run_ends_.assign(graph.blocks.size(), static_cast<int>(graph.blocks.size()));
  for (std::size_t b = graph.blocks.size() - 1; b-- > 0;) {
    const bool alike = graph.blocks[b].kind == graph.blocks[b + 1].kind && uses_tied_[b] == uses_tied_[b + 1];
    run_ends_[b] = alike ? run_ends_[b + 1] : static_cast<int>(b) + 1;
  }
  for (std::size_t kind = 0; kind < blocks_of_kind_.size(); ++kind) {
    std::vector<int>& before = blocks_of_kind_[kind];
    before.push_back(0);
    for (const Block& block : graph.blocks)
      before.push_back(before.back() + (static_cast<std::size_t>(block.kind) == kind));
  }
}

int Estimator::shapes_of(const ParallelSpec& spec, const Placements& placements, Recompute recompute, int stage) {
  if (runs_backward_in_parts(spec.schedule) && !runs_backward_in_parts(spec.schedule, stage)) {
    ParallelSpec whole = spec;
    whole.schedule = ParallelSpec().schedule;
    return shapes_of(whole, placements, recompute, stage);
  }
  const auto [entry, inserted] =
      shapes_index_.try_emplace(block_key(spec, recompute), static_cast<int>(shapes_.size()));
  if (!inserted) return entry->second;
  shapes_.push_back(known_shapes_->of(graph_, training_, cluster_.backend(), spec, placements, recompute));
  also_whole_.push_back(also_runs_whole_backwards(spec.schedule));
  return entry->second;
}

const Estimator::Costs& Estimator::costs_of(int shapes, int environment) {
  const auto [entry, inserted] = costs_.try_emplace({shapes, environment});
  if (!inserted) return entry->second;
  const Environment& where = environments_[environment];
  CostModel model{.device = where.device,
                  .rates = where.rates,
                  .execution = execution_of(*where.device, training_.engine),
                  .host_per_op = host_per_op(*where.device, training_.engine),
                  .networks = {}};
  for (const Axis axis : block_axes)
    if (is_planned(axis)) model.networks[all_along(axis)] = where.along[axis];
  Costs& costs = entry->second;
  for (const LoweredBlock& block : shapes_[shapes]->kinds) {
    costs.forward.push_back(cost_segment(block.forward, model).parts);
    const bool in_parts = !block.backward_inputs.instructions.empty();
    costs.backward.push_back(cost_segment(in_parts ? block.backward_inputs : block.backward, model).parts);
    costs.weights_seconds.emplace_back();
    if (!block.backward_weights.instructions.empty()) {
      const StepTime weights = cost_segment(block.backward_weights, model).parts;
      costs.backward.back() += weights;
      costs.weights_seconds.back() = weights.total();
    }
    // Where some backwards are whole, each takes at least the less of the two.
    if (also_whole_[shapes] != 0)
      if (const StepTime whole = cost_segment(block.backward, model).parts;
          whole.total() < costs.backward.back().total())
        costs.backward.back() = whole;
    costs.forward_seconds.push_back(costs.forward.back().total());
    costs.backward_seconds.push_back(costs.backward.back().total());
  }
  return costs;
}

Home Estimator::home_of_saved(const ParallelSpec& spec, std::size_t kind) const {
  return is_layer_kind_[kind] && has_backward(graph_, graph_.kinds[kind]) ? row_of(spec.offload).saved : Home::device;
}

const std::vector<Estimator::SavedCopies>* Estimator::copies_of(const ParallelSpec& spec, int shapes, int environment) {
  if (row_of(spec.offload).saved == Home::device) return nullptr;
  const auto [entry, inserted] = copies_.try_emplace({shapes, environment});
  if (!inserted) return &entry->second;
  const Environment& where = environments_[environment];
  const auto time = [&](const std::vector<ByteRange>& ranges) {
    Seconds sum;
    for (const ByteRange& range : ranges)
      sum += host_copy_time(Bytes(range.end - range.begin), *where.device, where.rates, where.host);
    return sum;
  };
  const std::vector<LoweredBlock>& kinds = shapes_[shapes]->kinds;
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
  }
  return &entry->second;
}

bool Estimator::is_sequential(int environment) const {
  return execution_of(*environments_[environment].device, training_.engine) == sequential_execution;
}

Estimator::MeshView& Estimator::view_of(const DeviceMesh& mesh) {
  if (last_view_ != nullptr && last_view_->first == mesh) return last_view_->second;
  const auto [entry, inserted] = views_.try_emplace(mesh);
  last_view_ = &*entry;
  MeshView& view = entry->second;
  if (!inserted) return view;
  const int stages = mesh.degree_of(Axis::pp);
  const auto is_used = [&](Axis axis) {
    return is_planned(axis) && (!may_be_unnamed(axis) || mesh.degree_of(axis) > 1);
  };
  for (const Axis axis : all_axes)
    if (is_used(axis)) view.along[axis] = &networks_.group(mesh, axis);
  view.shard = &networks_.shard(mesh);
  if (mesh.dp_shard > 0) view.replicas = &networks_.replicas(mesh);
  PerAxis<GroupNetwork> along_blocks;
  for (const Axis axis : block_axes)
    if (is_used(axis)) along_blocks[axis] = *view.along[axis];
  const NetworkCache::StageDevice* before = nullptr;
  for (int s = 0; s < stages; ++s) {
    const NetworkCache::StageDevice& device = networks_.device(mesh, s);
    if (std::exchange(before, &device) == &device) {
      view.environments.push_back(view.environments.back());
      view.capacities.push_back(view.capacities.back());
      view.hosts.push_back(view.hosts.back());
      continue;
    }
    const auto found = std::find_if(environments_.begin(), environments_.end(), [&](const Environment& known) {
      return known.device == device.device && known.rates == device.rates && known.along == along_blocks;
    });
    view.environments.push_back(static_cast<int>(found - environments_.begin()));
    if (found == environments_.end())
      environments_.push_back({along_blocks, device.device, device.rates, device.host});
    view.capacities.push_back(usable_memory(cluster_, mesh, s));
    view.hosts.push_back(host_memory(cluster_, mesh, s));
    view.is_uniform = view.is_uniform && view.environments.back() == view.environments.front();
  }
  return view;
}

// The network between ranks of neighbouring stages: each and the next, or around the ring.
const GroupNetwork& Estimator::next_network(const DeviceMesh& mesh, MeshView& view, int from, int to) {
  if (to != from + 1) return networks_.stages(mesh, from, to);
  if (view.next.empty()) {
    const bool alike = boundaries_are_alike(cluster_, mesh);
    for (int s = 0; s + 1 < mesh.degree_of(Axis::pp); ++s)
      view.next.push_back(&networks_.stages(mesh, alike ? 0 : s, alike ? 1 : s + 1));
  }
  return *view.next[from];
}

Bytes Estimator::overhead_of(const ParallelSpec& spec) {
  const PerAxis<bool> rings = ring_axes(spec);
  if (!last_overhead_ || last_overhead_->mesh != spec.mesh || last_overhead_->rings != rings)
    last_overhead_ = {spec.mesh, rings, memory_overhead(cluster_, training_.engine, spec.mesh, rings)};
  return last_overhead_->bytes;
}

Bytes Estimator::capacity(const DeviceMesh& mesh, int stage) { return capacities(mesh)[stage]; }

const std::vector<Bytes>& Estimator::capacities(const DeviceMesh& mesh) { return view_of(mesh).capacities; }

std::vector<std::pair<int, int>> Estimator::paces(const ParallelSpec& spec, const Placements& placements) {
  const MeshView& view = view_of(spec.mesh);
  const int shapes =
      shapes_of(spec, placements, spec.recompute == Recompute::per_stage ? Recompute::none : spec.recompute, 0);
  std::vector<std::pair<int, int>> paces;
  for (const int environment : std::span(view.environments).first(view.is_uniform ? 1 : view.environments.size()))
    paces.emplace_back(shapes, environment);
  return paces;
}

const Estimator::DataCosts& Estimator::data_costs_of(const ParallelSpec& spec, const Placements& placements,
                                                     const BlockShapes& shapes, const MeshView& view, int environment) {
  const DataShards shards = data_shards(placements, spec.replicas());
  const auto [entry, inserted] = data_costs_.try_emplace({bucket_key(spec), view.shard, environment});
  if (!inserted) return entry->second;
  const Environment& where = environments_[environment];
  const BackendKind backend = where.device->backend;
  const std::int64_t element = size_of(training_.precision);
  const auto kernel = [&](const Instruction& work) {
    return work.shape.rows == 0 ? Seconds(0.0)
                                : kernel_time(work.op, work.shape, work.type, *where.device, where.rates);
  };
  const auto collective = [&](InstructionKind kind, std::int64_t bytes) {
    if (spec.replicas() == 1 || bytes == 0) return Seconds(0.0);
    return collective_time(kind, Bytes(bytes), *view.shard, backend);
  };
  const auto copy = [&](std::int64_t bytes) {
    return host_copy_time(Bytes(bytes), *where.device, where.rates, where.host);
  };
  const auto costs_of_buckets = [&](std::int64_t trained, std::int64_t frozen, bool runs_back) {
    const std::int64_t whole = padded(trained, spec);
    const auto local = [&](bool is_sharded) { return is_sharded ? whole / spec.shard_ranks() : whole; };
    BucketCosts costs;
    costs.regather = collective(InstructionKind::all_gather, whole * element);
    costs.gather = costs.regather + collective(InstructionKind::all_gather, padded(frozen, spec) * element);
    if (runs_back) costs.gather_again = costs.gather;
    const bool has_master = spec.dp_method == DataMethod::master;
    if (has_master)
      costs.hand_out = collective(InstructionKind::broadcast, whole * element) +
                       collective(InstructionKind::broadcast, padded(frozen, spec) * element);
    if (whole == 0) return costs;
    if (has_master)
      costs.collect = collective(InstructionKind::reduce_sum, whole * gradient_bytes(training_));
    else
      costs.reduce = collective(gradient_reduction(shards, training_), whole * reduced_bytes(training_));
    if (spec.mesh.dp_shard > 0)
      costs.across = collective_time(InstructionKind::all_reduce_sum, Bytes(local(true) * reduced_bytes(training_)),
                                     *view.replicas, backend);
    if (shards.gradients) {
      costs.accumulate = kernel(accumulate_gradients(local(true), Stream::dp, Label::dp));
      costs.clear = kernel(clear_gradients(whole, Label::dp, gradient_type(training_)));
    }
    costs.begin_clear = kernel(clear_gradients(
        local(shards.gradients) * gradient_bytes(training_) / size_of(DataType::fp32), Label::optimizer));
    if (computes_norm(training_)) costs.norm = kernel(sum_of_squares(local(shards.optimizer)));
    if (updates_on_host(placements.state.homes)) {
      costs.update = host_kernel_time(update_on_host(local(shards.optimizer), false, training_), *where.device,
                                      where.rates, where.host);
      if (placements.state.homes.gradients == Home::device)
        costs.to_host = copy(local(shards.optimizer) * gradient_bytes(training_));
      if (placements.state.homes.parameters == Home::device)
        costs.from_host = copy(local(shards.optimizer) * element);
    } else {
      costs.update = kernel(update_parameters(local(shards.optimizer), false, training_));
    }
    return costs;
  };
  for (std::size_t kind = 0; kind < shapes.own_elements.size(); ++kind)
    entry->second.own.push_back(costs_of_buckets(shapes.own_elements[kind], shapes.frozen_elements[kind],
                                                 has_backward(graph_, graph_.kinds[kind])));
  entry->second.tied = shapes.tied_is_frozen ? costs_of_buckets(0, shapes.tied_elements, true)
                                             : costs_of_buckets(shapes.tied_elements, 0, true);
  // A rank holds the loss scale once, which tied_state counts.
  const std::int64_t scale =
      held_by_state(rank_memory({.buckets = {}, .saved = {}, .computes_loss = false}, training_)).count;
  const auto state_of = [&](const BucketSizes& bucket) {
    return held_by_state(rank_memory({.buckets = {&bucket, 1}, .saved = {}, .computes_loss = false}, training_)).count;
  };
  for (std::size_t kind = 0; kind < shapes.own_elements.size(); ++kind) {
    const BucketSizes frozen = frozen_bucket(shapes, kind, spec, placements);
    const std::int64_t of_frozen = frozen.elements > 0 ? state_of(frozen) - scale : 0;
    entry->second.own_state.push_back(state_of(bucket_of(shapes.own_elements[kind], spec, placements)) - scale +
                                      of_frozen);
  }
  const BucketSizes tied = tied_bucket(shapes, spec, placements, 2);
  entry->second.tied_state = shapes.tied_elements > 0 ? state_of(tied) : scale;
  return entry->second;
}

std::vector<Seconds> Estimator::block_seconds(const ParallelSpec& spec, const Placements& placements, int stage) {
  const Recompute recompute = spec.recompute == Recompute::per_stage ? Recompute::none : spec.recompute;
  const Costs& costs = costs_of(shapes_of(spec, placements, recompute, stage), view_of(spec.mesh).environments[stage]);
  std::vector<Seconds> seconds;
  for (const Block& block : graph_.blocks) {
    const std::size_t kind = static_cast<std::size_t>(block.kind);
    seconds.push_back(costs.forward_seconds[kind] + costs.backward_seconds[kind]);
  }
  return seconds;
}

std::span<const LoweredBlock> Estimator::lowered_blocks(const ParallelSpec& spec, const Placements& placements,
                                                        Recompute recompute, int stage) {
  return shapes_[shapes_of(spec, placements, recompute, stage)]->kinds;
}

std::shared_ptr<const BlockShapes> Estimator::blocks_for(LoweredFor purpose, const ParallelSpec& spec,
                                                         const Placements& placements, Recompute recompute) {
  return known_shapes_->of(graph_, training_, cluster_.backend(), spec, placements, recompute, purpose);
}

std::vector<Seconds> Estimator::kind_seconds(const ParallelSpec& spec, const Placements& placements, int stage,
                                             Recompute recompute) {
  const int environment = view_of(spec.mesh).environments[stage];
  std::vector<Seconds> seconds;
  const auto take_least = [&](int shapes) {
    const Costs& costs = costs_of(shapes, environment);
    for (std::size_t kind = 0; kind < costs.forward_seconds.size(); ++kind) {
      const Seconds both = costs.forward_seconds[kind] + costs.backward_seconds[kind];
      if (kind == seconds.size()) seconds.push_back(both);
      seconds[kind] = std::min(seconds[kind], both);
    }
  };
  take_least(shapes_of(spec, placements, recompute, stage));
  // All stages of a kind of device are asked for as one.
  if (runs_backward_in_parts(spec.schedule)) take_least(shapes_of(spec, placements, recompute, stage == 0 ? 1 : 0));
  return seconds;
}

std::vector<Seconds> Estimator::kind_data_seconds(const ParallelSpec& spec, const Placements& placements, int stage) {
  const MeshView& view = view_of(spec.mesh);
  const BlockShapes& shapes = *shapes_[shapes_of(spec, placements, Recompute::none, stage)];
  const DataCosts& data = data_costs_of(spec, placements, shapes, view, view.environments[stage]);
  const DataShards shards = data_shards(placements, spec.replicas());
  const double micro = static_cast<double>(micro_batches(spec, training_));
  std::vector<Seconds> seconds;
  for (const BucketCosts& own : data.own) {
    const Seconds gathers = shards.parameters ? own.gather + own.gather_again : Seconds(0.0),
                  reduces = own.reduce + own.accumulate;
    seconds.push_back((micro * (gathers + (shards.gradients ? reduces : Seconds(0.0))) +
                       (shards.gradients ? Seconds(0.0) : reduces) + own.across));
  }
  return seconds;
}

Estimator::KindBytes Estimator::kind_bytes(const ParallelSpec& spec, const Placements& placements,
                                           Recompute recompute) {
  const MeshView& view = view_of(spec.mesh);
  const BlockShapes& shapes = *shapes_[shapes_of(spec, placements, recompute, 0)];
  KindBytes bytes{.state = data_costs_of(spec, placements, shapes, view, view.environments.front()).own_state,
                  .saved = {},
                  .least_fixed = least_memory_.count + overhead_of(spec).count};
  for (std::size_t kind = 0; kind < shapes.kinds.size(); ++kind)
    bytes.saved.push_back(
        home_of_saved(spec, kind) == Home::device ? saved_with_reserve(shapes.kinds[kind].saved_bytes, training_) : 0);
  return bytes;
}

BlockTable Estimator::block_table(const ParallelSpec& spec, const Placements& placements, int stage,
                                  Recompute recompute, BlockTable room) {
  const int shapes_number = shapes_of(spec, placements, recompute, stage);
  const MeshView& view = view_of(spec.mesh);
  const int environment = view.environments[stage];
  const Costs& costs = costs_of(shapes_number, environment);
  const BlockShapes& shapes = *shapes_[shapes_number];
  const DataCosts& data = data_costs_of(spec, placements, shapes, view, environment);
  // The part that does not grow with blocks is largest with all blocks on the stage, and so with
  // every use of the tied parameter.
  buckets_.clear();
  std::int64_t scratch = step_scratch_bytes(training_, cluster_.backend()).count;
  std::int64_t crossing = 0, gradient = 0, staged = 0, staged_for_weights = 0;
  for (std::size_t k = 0; k < shapes.kinds.size(); ++k) {
    if (home_of_saved(spec, k) == Home::host) {
      staged = std::max(staged, shapes.kinds[k].saved_bytes);
      staged_for_weights = std::max(staged_for_weights, shapes.kinds[k].for_weights_bytes);
    }
    buckets_.push_back(bucket_of(shapes.own_elements[k], spec, placements));
    buckets_.back().of_layer = is_layer_kind_[k];
    if (shapes.frozen_elements[k] > 0) buckets_.push_back(frozen_bucket(shapes, k, spec, placements));
    scratch = std::max({scratch, shapes.kinds[k].forward.scratch_bytes, shapes.kinds[k].backward.scratch_bytes});
    crossing = std::max(crossing, crossing_bytes(shapes.kinds[k]));
    gradient = std::max(gradient, shapes.kinds[k].gradient_bytes);
  }
  if (shapes.tied_elements > 0) buckets_.push_back(tied_bucket(shapes, spec, placements, 2));
  const int exchanges = exchange_buffers(shape_of(spec, training_)) * (is_v_shaped(spec.schedule) ? 2 : 1);
  const MemoryUse all = rank_memory({.buckets = buckets_,
                                     .saved = {},
                                     .staged_bytes = staged,
                                     .staged_for_weights_bytes = staged_for_weights,
                                     .gradient_bytes = gradient,
                                     .sent_bytes = crossing,
                                     .scratch_bytes = scratch,
                                     .outputs = exchanges,
                                     .gradients = exchanges,
                                     .computes_loss = false},
                                    training_);
  const std::int64_t overhead = overhead_of(spec).count;
  // An input that lies apart takes one more buffer, and its padding in each.
  const std::int64_t inputs =
      spec.input_slots == InputSlots::one_more
          ? saved_with_reserve(crossing, training_) + 2 * buffer_alignment * micro_batches(spec, training_)
          : 0;
  BlockTable table{.seconds = std::move(room.seconds),
                   .state = std::move(room.state),
                   .saved = std::move(room.saved),
                   .least_fixed = least_memory_.count + overhead,
                   .most_fixed = (all.peak() - persistent(all)).count + data.tied_state + overhead + inputs};
  const std::size_t blocks = graph_.blocks.size();
  table.seconds.resize(blocks + 1);
  table.state.resize(blocks + 1);
  table.saved.resize(blocks + 1);
  table.seconds.front() = Seconds(0.0);
  table.state.front() = table.saved.front() = 0;
  for (std::size_t run = 0; run < blocks; run = static_cast<std::size_t>(run_ends_[run])) {
    const auto kind = static_cast<std::size_t>(graph_.blocks[run].kind);
    const Seconds seconds = costs.forward_seconds[kind] + costs.backward_seconds[kind];
    const std::int64_t saved =
        home_of_saved(spec, kind) == Home::device ? saved_with_reserve(shapes.kinds[kind].saved_bytes, training_) : 0;
    const auto length = static_cast<std::size_t>(run_ends_[run]) - run;
    for (std::size_t n = 1; n <= length; ++n) {
      table.seconds[run + n] = table.seconds[run] + static_cast<double>(n) * seconds;
      table.state[run + n] = table.state[run] + static_cast<std::int64_t>(n) * data.own_state[kind];
      table.saved[run + n] = table.saved[run] + static_cast<std::int64_t>(n) * saved;
    }
  }
  return table;
}

namespace {

// The scratch that the Segments of a block need, with backwards as they run.
std::int64_t scratch_of(const LoweredBlock& block, bool also_whole) {
  const bool in_parts = !block.backward_inputs.instructions.empty();
  return std::max({block.forward.scratch_bytes, block.backward_inputs.scratch_bytes,
                   block.backward_weights.scratch_bytes,
                   in_parts && !also_whole ? std::int64_t{0} : block.backward.scratch_bytes});
}

}  // namespace

// A slot of saved activations holds any of the rank's stages: of each the largest block in one
// place, the second largest in another, as positions_in_slot (make_buffers.cpp) has it.
std::int64_t Estimator::share_slots(const ParallelSpec& spec, std::span<const HeldStage> held) {
  saved_.clear();
  host_saved_.clear();
  const bool inputs_lie_apart = spec.input_slots == InputSlots::one_more;
  std::int64_t head = 0;
  const auto share = [](std::vector<SavedSizes>& shared, std::vector<std::int64_t>& sizes, Home home) {
    std::ranges::sort(sizes, std::ranges::greater());
    shared.resize(std::max(shared.size(), sizes.size()));
    for (std::size_t i = 0; i < sizes.size(); ++i)
      shared[i] = {.bytes = std::max(shared[i].bytes, sizes[i]), .times = 1, .home = home};
  };
  for (const HeldStage& stage : held) {
    sizes_.clear();
    host_sizes_.clear();
    for (int b = stage.blocks.first; b < stage.blocks.last; ++b) {
      const auto kind = static_cast<std::size_t>(graph_.blocks[b].kind);
      const LoweredBlock& lowered = shapes_[stage.shapes]->kinds[kind];
      const bool input_apart = (inputs_lie_apart || stage.is_handed_its_input) && b > 0 && b == stage.blocks.first;
      (home_of_saved(spec, kind) == Home::device ? sizes_ : host_sizes_)
          .push_back(input_apart ? saved_bytes_without_input(lowered) : lowered.saved_bytes);
    }
    if (stage.blocks.last == static_cast<int>(graph_.blocks.size())) {
      head = sizes_.back();
      sizes_.pop_back();
    }
    share(saved_, sizes_, Home::device);
    share(host_saved_, host_sizes_, Home::host);
  }
  saved_.insert(saved_.end(), host_saved_.begin(), host_saved_.end());
  return head;
}

// As make_buffers.cpp has it.
void Estimator::share_slots_for_weights(const ParallelSpec& spec, std::span<const HeldStage> held) {
  for_weights_.clear();
  left_.clear();
  for (const Home home : all_homes) {
    const std::size_t begin = for_weights_.size();
    for (const HeldStage& stage : held) {
      sizes_for_weights_.clear();
      for (int b = stage.blocks.first; b < stage.blocks.last; ++b) {
        const auto kind = static_cast<std::size_t>(graph_.blocks[b].kind);
        const LoweredBlock& lowered = shapes_[stage.shapes]->kinds[kind];
        if (home_of_saved(spec, kind) == home)
          sizes_for_weights_.emplace_back(lowered.for_weights_bytes, lowered.left_bytes);
      }
      std::ranges::stable_sort(sizes_for_weights_, std::ranges::greater(),
                               [](const auto& block) { return block.first + block.second; });
      for_weights_.resize(std::max(for_weights_.size(), begin + sizes_for_weights_.size()));
      left_.resize(for_weights_.size());
      for (std::size_t i = 0; i < sizes_for_weights_.size(); ++i) {
        SavedSizes &kept = for_weights_[begin + i], &left = left_[begin + i];
        kept = {.bytes = std::max(kept.bytes, sizes_for_weights_[i].first), .times = 1, .home = home};
        left.bytes = std::max(left.bytes, sizes_for_weights_[i].second);
      }
    }
  }
}

// Asked for one rank after the other.
const std::vector<int>& Estimator::inputs_of_ranks(const ScheduleForms& schedule, const PipelineShape& shape,
                                                   InputSlots inputs) {
  const std::array wanted{shape.ranks, shape.stages, shape.micro_batches, shape.group};
  if (!last_inputs_ || last_inputs_->actions != schedule.actions || last_inputs_->inputs != inputs ||
      last_inputs_->shape != wanted) {
    last_inputs_ = Inputs{.actions = schedule.actions, .inputs = inputs, .shape = wanted, .of_rank = {}};
    const Schedule actions = schedule.actions(shape);
    for (int rank = 0; rank < shape.ranks; ++rank)
      last_inputs_->of_rank.push_back(input_buffers(actions, rank, inputs));
  }
  return last_inputs_->of_rank;
}

MemoryUse Estimator::memory_of_rank(const ParallelSpec& spec, const Placements& placements,
                                    const ScheduleForms& schedule, int rank, std::span<const HeldStage> held) {
  buckets_.clear();
  frozen_.clear();
  saved_.clear();
  for_weights_.clear();
  left_.clear();
  std::int64_t scratch = step_scratch_bytes(training_, cluster_.backend()).count;
  std::int64_t crossing = 0, gradient = 0;
  std::int64_t input = 0;
  std::int64_t staged = 0, staged_for_weights = 0;
  int tied_uses = 0;
  const bool inputs_lie_apart = spec.input_slots == InputSlots::one_more;
  for (const HeldStage& stage : held) {
    const BlockShapes& shapes = *shapes_[stage.shapes];
    for (std::size_t kind = 0; kind < shapes.kinds.size(); ++kind) {
      const std::vector<int>& before = blocks_of_kind_[kind];
      const int times = before[stage.blocks.last] - before[stage.blocks.first];
      if (times == 0) continue;
      const LoweredBlock& block = shapes.kinds[kind];
      const Home home = home_of_saved(spec, kind);
      const bool first_apart = (inputs_lie_apart || stage.is_handed_its_input) && stage.blocks.first > 0 &&
                               static_cast<std::size_t>(graph_.blocks[stage.blocks.first].kind) == kind;
      saved_.push_back({.bytes = block.saved_bytes, .times = times - (first_apart ? 1 : 0), .home = home});
      for_weights_.push_back({.bytes = block.for_weights_bytes, .times = times, .home = home});
      left_.push_back({.bytes = block.left_bytes, .times = times});
      if (first_apart) {
        saved_.push_back({.bytes = saved_bytes_without_input(block), .times = 1, .home = home});
        input = std::max(input, block.input_bytes);
      }
      if (home == Home::host) {
        staged = std::max(staged, first_apart && times == 1 ? saved_bytes_without_input(block) : block.saved_bytes);
        staged_for_weights = std::max(staged_for_weights, block.for_weights_bytes);
      }
      scratch = std::max(scratch, scratch_of(block, also_whole_[stage.shapes] != 0));
      crossing = std::max(crossing, crossing_bytes(block));
      gradient = std::max(gradient, block.gradient_bytes);
      buckets_.push_back(bucket_of(shapes.own_elements[kind], spec, placements));
      buckets_.back().times = times;
      buckets_.back().of_layer = is_layer_kind_[kind];
      if (shapes.frozen_elements[kind] > 0) {
        frozen_.push_back(frozen_bucket(shapes, kind, spec, placements));
        frozen_.back().times = times;
      }
    }
    for (const int block : tied_blocks_) tied_uses += block >= stage.blocks.first && block < stage.blocks.last;
  }
  const std::int64_t head = held.size() > 1 ? share_slots(spec, held) : 0;
  if (held.size() > 1) share_slots_for_weights(spec, held);
  if (tied_uses > 0) buckets_.push_back(tied_bucket(*shapes_[held.front().shapes], spec, placements, tied_uses));
  buckets_.insert(buckets_.end(), frozen_.begin(), frozen_.end());
  const PipelineShape shape = shape_of(spec, training_);
  const bool holds_last = held.back().blocks.last == static_cast<int>(graph_.blocks.size());
  const int in_flight = schedule.in_flight(rank, shape);
  const SlotsForWeights slots =
      schedule.for_weights != nullptr ? schedule.for_weights(rank, shape) : SlotsForWeights{};
  int heads = 0;
  if (held.size() > 1 && holds_last)
    heads = schedule.last_stage_in_flight != nullptr ? schedule.last_stage_in_flight(shape)
                                                     : most_in_flight_of_last_stage(schedule.actions(shape));
  int inputs = 0;
  if (input > 0)
    inputs = held.size() == 1 ? std::min(in_flight + 1, shape.micro_batches)
                              : inputs_of_ranks(schedule, shape, spec.input_slots)[static_cast<std::size_t>(rank)];
  const ExchangeWays ways = exchange_ways(is_v_shaped(spec.schedule), rank, shape.ranks);
  MemoryUse memory = rank_memory({.buckets = buckets_,
                                  .saved = saved_,
                                  .for_weights = for_weights_,
                                  .left = left_,
                                  .staged_bytes = staged,
                                  .staged_for_weights_bytes = staged_for_weights,
                                  .gradient_bytes = gradient,
                                  .sent_bytes = holds_last && held.size() == 1 ? 0 : crossing,
                                  .scratch_bytes = scratch,
                                  .in_flight = in_flight,
                                  .head_bytes = head,
                                  .head_in_flight = heads,
                                  .for_weights_in_flight = slots.saved,
                                  .left_in_flight = slots.left,
                                  .outputs = exchange_buffers(shape) * ways.outputs,
                                  .gradients = exchange_buffers(shape) * ways.gradients,
                                  .input_bytes = input,
                                  .inputs = inputs,
                                  .computes_loss = holds_last},
                                 training_);
  memory.overhead = overhead_of(spec);
  return memory;
}

Bytes Estimator::peak(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule, int rank,
                      std::span<const BlockRange> stages, Recompute recompute) {
  held_.clear();
  const std::vector<int> numbers = stages.size() > 1 ? stages_of_rank(spec, rank) : std::vector<int>{rank};
  for (std::size_t i = 0; i < stages.size(); ++i)
    held_.push_back({.blocks = stages[i],
                     .shapes = shapes_of(spec, placements, recompute, numbers[i]),
                     .is_handed_its_input = is_handed_its_input(spec, numbers[i])});
  return memory_of_rank(spec, placements, schedule, rank, held_).peak();
}

BlockRange Estimator::tied_in(BlockRange range) const {
  BlockRange uses;
  for (const int block : tied_blocks_)
    if (block >= range.first && block < range.last) uses = {uses.size() > 0 ? uses.first : block, block + 1};
  return uses;
}

std::uint64_t Estimator::kinds_in(BlockRange range) const {
  // With too many kinds, each range is taken as different from the others.
  if (blocks_of_kind_.size() > 31)
    return std::uint64_t{1} << 63 | static_cast<std::uint64_t>(range.first) << 31 |
           static_cast<std::uint64_t>(range.last);
  std::uint64_t kinds = 0;
  for (const std::vector<int>& before : blocks_of_kind_)
    kinds = kinds << 2 | static_cast<std::uint64_t>(std::min(before[range.last] - before[range.first], 2));
  return kinds;
}

// Letters: blocks 1 .. n of the stage in the order in which a phase visits them; k_1 .. k_m those
// that keep what they save on the host, with computation c_i. staging_buffers take turns. In a
// forward, block k_m waits for the copy of block k_(m-3), and copies follow one another from the
// end of block k_1; in a backward, the copy for block k_4 waits for block k_1.
std::pair<Seconds, Seconds> Estimator::chains_of_copies() const {
  std::vector<std::size_t> kept;
  for (std::size_t i = 0; i < visits_.size(); ++i)
    if (visits_[i].out > Seconds(0.0)) kept.push_back(i);
  if (kept.size() <= staging_buffers) return {};
  Seconds forward, backward;
  for (std::size_t i = 0; i < visits_.size(); ++i) {
    if (i <= kept.front() || i >= kept.back()) forward += visits_[i].forward;
    if (i <= kept.front() || i >= kept.back()) backward += visits_[i].backward;
  }
  for (std::size_t k = 0; k + staging_buffers < kept.size(); ++k) {
    forward += visits_[kept[k]].out;
    backward += visits_[kept[k]].back;
  }
  return {forward, backward};
}

// Letters: blocks 1 .. n of the stage in the order in which a phase visits them; c_k a block's
// computation in that phase, g_k the gather of its parameters (ZeRO-3), r_k the reduction of its
// gradients after its backward (ZeRO-2, 3: of every micro-batch; else of the last one only).
//
// A phase takes at least sum c_k. Two buffers of gathered parameters and two of unreduced gradients
// take turns, so that from its first block on it takes at least c_1 + sum_{k>=3} g_k + sum_{k<=n-2}
// r_k + c_n: on one stream, the gather of block k waits for block k - 2, and block n waits for the
// reduction of block n - 2 (that of its own bucket; the tied bucket's comes later). After the last
// backward come the reductions that it did not overlap: max over k of (sum_{i>=k} r_i - sum_{i>k}
// c_i). Updates run in the order of blocks, and each gather of updated parameters (ZeRO-1, 2)
// follows its update.
//
// A master hands out all parameters before each forward, and collects gradients after each
// backward.
//
// With hybrid sharding, the reductions of the last micro-batch also sum shards over their replicas.
//
// What blocks keep on the host is copied out after their forward, on one stream, and back before
// their backward, on another (chains_of_copies).
//
// Ranks that carry out their own communication do all of this one after another.
Estimator::StageBound Estimator::bound_of_stage(const ParallelSpec& spec, const Placements& placements,
                                                BlockRange range, BlockRange tied_on_rank, int stage,
                                                bool on_first_rank, bool sequential, const Costs& costs,
                                                const BlockShapes& shapes, const DataCosts& data,
                                                const std::vector<SavedCopies>* copies) {
  const DataShards shards = data_shards(placements, spec.replicas());
  const int micro = static_cast<int>(micro_batches(spec, training_));
  const int count = range.last - range.first;
  StageBound bound;
  visits_.assign(static_cast<std::size_t>(count), {});
  Seconds clears, updates, gathers, gathers_again, reduces, across, to_host, from_host, hands_out, collects;
  int tied_uses = 0;
  // Blocks all have buckets that take turns, and a backward.
  bool every_own = true;
  const auto has_frozen = [&](int i) {
    return shapes.frozen_elements[static_cast<std::size_t>(graph_.blocks[range.first + i].kind)] > 0;
  };
  const bool in_parts = runs_backward_in_parts(spec.schedule, stage);
  const bool together = spec.tied_gradients == TiedGradients::together;
  for (int i = 0; i < count; ++i) {
    const std::size_t block = static_cast<std::size_t>(range.first + i);
    const std::size_t kind = static_cast<std::size_t>(graph_.blocks[block].kind);
    const BucketCosts& own = data.own[kind];
    BucketCosts tied = uses_tied_[block] != 0 ? data.tied : BucketCosts{};
    // Uses that share an accumulator are reduced after the backward of the first block. Their
    // buffer is cleared before that of the last, in every micro-batch if that is of this stage.
    if (together && range.first + i != tied_on_rank.first)
      tied.reduce = tied.accumulate = tied.across = tied.begin_clear = {};
    if (together && (range.first + i + 1 != tied_on_rank.last || tied_on_rank.first < range.first)) tied.clear = {};
    // Once on a rank, however many uses it holds.
    if (range.first + i != tied_on_rank.first) tied.to_host = tied.from_host = {};
    tied_uses += uses_tied_[block];
    every_own = every_own && shapes.own_elements[kind] > 0 && has_frozen(i) == has_frozen(0) &&
                has_backward(graph_, range.first + i);
    Visit& visit = visits_[i];
    visit = {.forward = costs.forward_seconds[kind],
             .backward = costs.backward_seconds[kind],
             .weights = costs.weights_seconds[kind],
             .clear = own.clear + tied.clear,
             .gather = shards.parameters ? own.gather : Seconds(0.0),
             .gather_again = shards.parameters ? own.gather_again : Seconds(0.0),
             .reduce = own.reduce + own.accumulate + tied.reduce + tied.accumulate,
             .own_reduce = own.reduce + own.accumulate,
             .across = own.across + tied.across,
             .to_host = own.to_host + tied.to_host,
             .out = {},
             .back = {}};
    if (copies != nullptr) {
      const SavedCopies& saved = (*copies)[kind];
      // A stage's input may lie apart: the bound is that of both.
      const bool with_input = i > 0 || stage == 0;
      visit.out = with_input ? saved.out : saved.out_without_input;
      visit.back = with_input ? saved.back : saved.back_without_input;
      const Seconds again = in_parts ? saved.for_weights : Seconds(0.0);
      bound.out += visit.out;
      bound.back += visit.back + again;
      if (sequential) {
        visit.forward += visit.out;
        visit.backward += visit.back + again;
        visit.weights += again;
      }
    }
    to_host += visit.to_host;
    bound.returns += own.from_host;
    from_host += own.from_host + tied.from_host;
    across += visit.across;
    bound.plain_forward += visit.forward;
    bound.plain_backward += visit.backward + visit.clear;
    bound.weights += visit.weights;
    gathers += visit.gather;
    gathers_again += visit.gather_again;
    hands_out += own.hand_out;
    collects += own.collect;
    if (shards.parameters) gathers += tied.gather;
    if (shards.parameters && has_backward(graph_, range.first + i)) gathers_again += tied.gather;
    reduces += visit.reduce;
    clears += own.begin_clear + tied.begin_clear;
    updates += own.update;
    // In two parts: those that follow the last second part, which is among the backwards.
    if (!shards.gradients && !sequential && (!in_parts || visit.weights > Seconds(0.0)))
      bound.reduces += visit.own_reduce + own.across;
    if (shards.optimizer && !shards.parameters) bound.regathers += own.regather;
    bound.norms += own.norm;
    if (on_first_rank) {
      bound.parts += costs.forward[kind];
      bound.parts += costs.backward[kind];
      if (sequential)
        bound.parts.offload +=
            visit.forward + visit.backward - (costs.forward_seconds[kind] + costs.backward_seconds[kind]);
    }
  }
  bound.updates = updates;
  if (tied_uses > 0) updates += data.tied.update;
  if (tied_uses > 0 && stage == 0) bound.norms += data.tied.norm;
  bound.occupied = bound.plain_forward + bound.plain_backward;
  // The first block's buffer is cleared while the stage may still wait for the gradient.
  if (!sequential) bound.plain_backward -= visits_.back().clear;
  bound.forward = bound.plain_forward;
  bound.backward = bound.plain_backward;
  bound.data = static_cast<double>(micro) * (gathers + gathers_again + (shards.gradients ? reduces : Seconds(0.0))) +
               (shards.gradients ? Seconds(0.0) : reduces) + across;

  Seconds stall;  // of the backward, beyond what it waits for anyway
  if (sequential) {
    bound.begin = clears;
    bound.forward += gathers;
    bound.backward += gathers_again + (shards.gradients ? reduces : Seconds(0.0));
    bound.behind = (shards.gradients ? across : reduces + across) + to_host;
  } else {
    bound.begin = std::max(clears, visits_.front().gather);
    if (every_own && count >= 2 && (shards.parameters || shards.gradients)) {
      Seconds down = visits_.front().forward + visits_.back().forward,
              up = visits_.front().backward + visits_.back().backward;
      for (int i = 2; i < count; ++i) {
        down += visits_[i].gather;
        up += visits_[count - 1 - i].gather_again;
        // All but the reductions of the last two visited blocks, 0 and 1. Block 0 waits only for
        // block 2's own buffer: a tied one lies elsewhere.
        if (shards.gradients) up += i == 2 ? visits_[2].own_reduce : visits_[i].reduce;
      }
      bound.forward = std::max(bound.forward, down);
      bound.backward = std::max(bound.backward, up);
    }
    if (copies != nullptr) {
      const auto [down, up] = chains_of_copies();
      const Seconds forward = std::max(bound.forward, down);
      const Seconds backward = in_parts ? bound.backward : std::max(bound.backward, up);
      bound.stalls = (forward - bound.forward) + (backward - bound.backward);
      stall = backward - bound.backward;
      bound.forward = forward;
      bound.backward = backward;
    }
    // Reductions from block i on, less the backwards after it; where these have two parts, those of
    // the blocks that have the second, which comes last.
    Seconds suffix;
    // Likewise copies to the host from block i on, the first of which follows its reduction.
    Seconds to_copy;
    const int last = shards.gradients ? std::min(count, 2) : count;
    for (int i = 0; i < last; ++i) {
      const Visit& visit = visits_[i];
      // The last backward may wait that long for what comes from the host, while others reduce.
      if (i == 1) {
        suffix -= stall;
        to_copy -= stall;
      }
      if (in_parts && visit.weights == Seconds(0.0)) continue;
      const Seconds overlapped = in_parts ? visit.weights : visit.backward + visit.clear;
      if (visit.to_host > Seconds(0.0)) {
        to_copy += visit.to_host;
        bound.copied = std::max(bound.copied, to_copy + (spec.replicas() > 1 ? visit.own_reduce : Seconds(0.0)));
        to_copy -= overlapped;
      }
      if (spec.replicas() == 1) continue;
      suffix += visit.reduce + visit.across;
      bound.behind = std::max(bound.behind, suffix);
      suffix -= overlapped;
    }
  }
  if (tied_uses > 0) {
    hands_out += data.tied.hand_out;
    collects += (together ? 1.0 : tied_uses) * data.tied.collect;
  }
  bound.forward += hands_out;
  bound.backward += collects;
  // Each bucket is updated, copied back where the host has updated it, and gathered.
  const bool regathers = shards.optimizer && !shards.parameters;
  Seconds updated = sequential ? updates + from_host : Seconds(0.0), copied = updated, gathered = updated;
  const auto finish = [&](const BucketCosts& bucket) {
    if (!sequential) updated += bucket.update;
    copied = std::max(copied, updated) + (sequential ? Seconds(0.0) : bucket.from_host);
    gathered = std::max(gathered, copied) + (regathers ? bucket.regather : Seconds(0.0));
  };
  if (regathers || from_host > Seconds(0.0)) {
    for (int i = range.first; i < range.last; ++i) finish(data.own[graph_.blocks[i].kind]);
    if (tied_uses > 0) finish(data.tied);
  }
  bound.finish = std::max({updates, copied, gathered});
  // The host updates the first bucket once its gradients are there: the first blocks may have none.
  Seconds ahead;
  if (updates_on_host(placements.state.homes) && !sequential)
    for (int i = 0; i < count && data.own[graph_.blocks[range.first + i].kind].update == Seconds(0.0); ++i)
      ahead += in_parts ? visits_[i].weights : visits_[i].backward + visits_[i].clear;
  if (ahead > Seconds(0.0)) ahead += stall;
  bound.finish_behind = std::max(bound.finish - ahead, Seconds(0.0));
  return bound;
}

// A rank carries out its stages one after another: their work, their communication over the data
// axis, their norms, their updates and the gathers of these add up. Reductions follow the last
// backward of one of them. Those of the rank's first k stages also follow the beginning of the last
// micro-batch's backward on the k-th, after which the rank runs that backward, and the last group
// of micro-batches backward through the stages before the k-th. Schedules in the shape of a V have
// no such order.
Estimator::StepBound Estimator::bound_of_ranks(const PipelineShape& shape, bool goes_back) {
  ranks_.assign(static_cast<std::size_t>(shape.ranks), {});
  const int remainder = shape.micro_batches % shape.group;
  const int last_group = shape.stages == shape.ranks ? 1 : remainder > 0 ? remainder : shape.group;
  StepBound step;
  for (int s = 0; s < shape.stages; ++s) {
    const StageBound& bound = bounds_[s];
    RankBound& rank = ranks_[rank_of_stage_[s]];
    if (!rank.before) {
      rank.before = before_[s];
      rank.behind = bound.behind;
      rank.copied = bound.copied;
    }
    const Seconds both = std::max(bound.forward + bound.backward, bound.occupied);
    rank.busy += static_cast<double>(shape.micro_batches) * both;
    rank.behind = std::min(rank.behind, bound.behind);
    rank.copied = std::min(rank.copied, bound.copied);
    rank.reduces += bound.reduces;
    const Seconds last = bound.weights > Seconds(0.0) ? bound.weights : both - bound.forward;
    if (!goes_back) rank.behind_all = std::max(rank.behind_all, rank.reduces - rank.backwards - last);
    rank.backwards += last_group * (both - bound.forward);
    rank.norms += bound.norms;
    rank.updates += bound.updates;
    rank.regathers += bound.regathers;
    rank.returns += bound.returns;
    rank.data += bound.data;
    rank.out += static_cast<double>(shape.micro_batches) * bound.out;
    rank.back += static_cast<double>(shape.micro_batches) * bound.back;
    rank.finish = std::max(rank.finish, bound.finish);
    if (rank_of_stage_[s] == rank_of_stage_.front()) step.parts += bound.parts;
  }
  for (const RankBound& rank : ranks_) {
    step.synchronised =
        std::max(step.synchronised, *rank.before + rank.busy + std::max(rank.behind, rank.behind_all) + rank.norms);
    const Seconds finish = std::max({rank.finish, rank.updates, rank.regathers, rank.returns});
    step.finish = std::max(step.finish, finish);
    step.updated = std::max(step.updated, *rank.before + rank.busy + rank.copied + finish);
    step.data = std::max(step.data, rank.data);
    step.copies = std::max(step.copies, *rank.before + std::max(rank.out, rank.back));
  }
  return step;
}

// On the gradient norm, over every axis.
Seconds Estimator::agreement(const ParallelSpec& spec, const Placements& placements, const MeshView& view) const {
  Seconds agreed;
  for (const Axis axis : inner_axes_first) {
    if (group_size(spec.mesh, axis) > 1 && (axis == Axis::pp || divides_state(placements, axis)))
      agreed += collective_time(InstructionKind::all_reduce_sum, Bytes(4),
                                axis == Axis::dp ? *view.shard : *view.along[axis], cluster_.backend());
  }
  return agreed;
}

// The copy of the gradient norm to the host.
Seconds Estimator::norm_copy(int environment) const {
  const Environment& where = environments_[environment];
  return host_copy_time(Bytes(size_of(DataType::fp32)), *where.device, where.rates, where.host);
}

// With backwards in two parts: the latest end of a rank's actions with the reductions that follow
// them, and the norm's own part (without a norm: its update), by playing the actions.
Seconds Estimator::end_of_parts(const ScheduleForms& schedule, const PipelineShape& shape, bool norm) {
  const std::vector<Seconds> ends =
      played_ends(schedule.actions(shape), forward_, backward_, transfer_, weights_, first_back_);
  Seconds latest;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    // The last action is of one of the rank's stages.
    Seconds behind(std::numeric_limits<double>::infinity()), norms;
    for (int s = 0; s < shape.stages; ++s) {
      if (rank_of_stage_[s] != rank) continue;
      const StageBound& bound = bounds_[s];
      behind = std::min(behind, norm ? bound.behind : std::max(bound.behind, bound.finish_behind));
      norms += bound.norms;
    }
    latest = std::max(latest, ends[rank] + behind + (norm ? norms : Seconds(0.0)));
  }
  return latest;
}

// The closed form of the schedule bounds the end of the last backward on the first stage, from the
// least time of every stage. After it come the reductions that it did not overlap, the gradient
// norm, which all ranks await, the update and the gathers of updated parameters. Data-parallel
// communication of one rank shares one stream: the step takes at least its sum. Every term is work
// that the simulated step does in this order, so the bound is never above the simulated time (a
// property test holds this).
Estimate Estimator::estimate(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule,
                             Wanted wanted) {
  MeshView& view = view_of(spec.mesh);
  const PipelineShape shape = shape_of(spec, training_);
  const int stages = shape.stages;
  const BackendKind backend = cluster_.backend();
  const bool norm = computes_norm(training_);

  // The Shapes of stages with the same recompute, looked up once; per_stage is no stage's.
  std::array<std::array<std::optional<int>, index_of(Recompute::per_stage)>, 2> known_shapes;
  const auto shapes_for = [&](Recompute recompute, int stage) {
    std::optional<int>& known =
        known_shapes[runs_backward_in_parts(spec.schedule, stage) ? 1 : 0][index_of(recompute)];
    if (!known) known = shapes_of(spec, placements, recompute, stage);
    return *known;
  };
  rank_of_stage_.clear();
  ranges_.clear();
  for (int s = 0; s < stages; ++s) {
    const int first = s == 0 ? 0 : ranges_.back().last;
    ranges_.push_back({first, first + spec.stage_blocks[s]});
    rank_of_stage_.push_back(rank_of_stage(spec, s));
  }

  // From the first block on the stage's rank that uses the tied parameter to the last.
  const auto tied_on_rank = [&](int stage) {
    if (stages == shape.ranks) return tied_in(ranges_[stage]);
    BlockRange uses;
    for (int s = 0; s < stages; ++s) {
      if (rank_of_stage_[s] != rank_of_stage_[stage]) continue;
      const BlockRange of_stage = tied_in(ranges_[s]);
      if (of_stage.size() > 0) uses = {uses.size() > 0 ? uses.first : of_stage.first, of_stage.last};
    }
    return uses;
  };

  Estimate estimate;
  estimate.spare = Bytes(std::numeric_limits<std::int64_t>::max());
  double fullest = -1.0;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    held_.clear();
    for (int s = stages == shape.ranks ? rank : 0; s < stages; ++s) {
      if (rank_of_stage_[s] == rank)
        held_.push_back({ranges_[s], shapes_for(spec.recompute_of(s), s), is_handed_its_input(spec, s)});
      if (stages == shape.ranks) break;
    }
    const MemoryUse memory = memory_of_rank(spec, placements, schedule, rank, held_);
    const Bytes capacity = view.capacities[rank];
    estimate.spare = std::min(estimate.spare, capacity - memory.peak());
    if (view.hosts[rank]) estimate.spare = std::min(estimate.spare, *view.hosts[rank] - memory.host);
    // The last buffer of a rank is not padded.
    estimate.room_in_all += capacity + Bytes(buffer_alignment) - memory.overhead -
                            (has_fixed_state_ ? persistent(memory) : Bytes(0));
    if (const double share =
            static_cast<double>(memory.peak().count) / static_cast<double>(std::max<std::int64_t>(capacity.count, 1));
        share > fullest) {
      fullest = share;
      estimate.memory = memory;
      estimate.memory_stage = rank;
    }
  }
  if (wanted == Wanted::bound && estimate.spare.count < 0) return estimate;

  for (std::vector<Seconds>* one :
       {&forward_, &backward_, &transfer_, &plain_forward_, &plain_backward_, &before_, &weights_})
    one->clear();
  bounds_.clear();
  first_back_ = 0;
  Seconds before;

  int shapes_number = 0;
  const Costs* costs = nullptr;
  const DataCosts* data_costs = nullptr;
  const GroupNetwork* known_next = nullptr;
  Seconds known_transfer;
  for (int s = 0; s < stages; ++s) {
    const int rank = rank_of_stage_[s];
    const int environment = view.environments[rank];
    const BlockRange range = ranges_[s];
    // After the first stage, equal blocks are bounded once.
    bool as_before = s > 1 && rank != rank_of_stage_.front() && range.size() == ranges_[s - 1].size() &&
                     run_ends_[ranges_[s - 1].first] >= range.last;
    if (s == 0 || environment != view.environments[rank_of_stage_[s - 1]] ||
        spec.recompute_of(s) != spec.recompute_of(s - 1) ||
        runs_backward_in_parts(spec.schedule, s) != runs_backward_in_parts(spec.schedule, s - 1)) {
      as_before = false;
      shapes_number = shapes_for(spec.recompute_of(s), s);
      costs = &costs_of(shapes_number, environment);
      data_costs = &data_costs_of(spec, placements, *shapes_[shapes_number], view, environment);
    }
    const BlockShapes& shapes = *shapes_[shapes_number];

    const bool sequential = is_sequential(environment);
    bounds_.push_back(as_before ? bounds_.back()
                                : bound_of_stage(spec, placements, range, tied_on_rank(s), s,
                                                 rank == rank_of_stage_.front(), sequential, *costs, shapes,
                                                 *data_costs, copies_of(spec, shapes_number, environment)));
    const StageBound& bound = bounds_.back();
    forward_.push_back(bound.forward);
    backward_.push_back(bound.backward);
    plain_forward_.push_back(bound.plain_forward);
    plain_backward_.push_back(bound.plain_backward);
    weights_.push_back(bound.weights);
    before_.push_back(before);
    if (s + 1 == stages) break;
    if (!passes_gradient_on(graph_, range.last)) first_back_ = s + 1;
    before += bound.plain_forward;
    // Between stages of one rank nothing is transferred.
    if (rank_of_stage_[s + 1] == rank) {
      transfer_.emplace_back(0.0);
      continue;
    }
    const GroupNetwork* next = &next_network(spec.mesh, view, rank, rank_of_stage_[s + 1]);
    if (known_next == nullptr || !(next == known_next || *next == *known_next)) {
      known_next = next;
      known_transfer = collective_time(InstructionKind::send,
                                       sent_bytes(crossing_bytes(shapes.kinds.front()), spec, placements, training_),
                                       *next, backend);
    }
    transfer_.push_back(known_transfer);
    before += known_transfer;
  }
  const StepBound step = bound_of_ranks(shape, is_v_shaped(spec.schedule));
  const bool in_parts = runs_backward_in_parts(spec.schedule) && stages > 1;
  const StageBound& first = bounds_.front();

  const Seconds agreed = norm ? agreement(spec, placements, view) : Seconds(0.0);
  // The closed forms have every stage wait for a gradient.
  const auto pipeline = [&](const std::vector<Seconds>& forward, const std::vector<Seconds>& backward) {
    return first_back_ == 0 ? pipeline_time(schedule, forward, backward, transfer_, shape)
                            : played_time(schedule.actions(shape), forward, backward, transfer_, {}, first_back_);
  };
  // Without a norm, no stage waits for another's gradients.
  const Seconds whole =
      first.begin + (in_parts ? end_of_parts(schedule, shape, norm)
                              : pipeline(forward_, backward_) +
                                    (norm ? first.behind + first.norms : std::max(first.behind, first.finish_behind)));
  // Updates by the host also wait for a copy of the norm, and for this rank's gradients.
  const bool on_host = updates_on_host(placements.state.homes);
  const Seconds normed = std::max({whole, step.synchronised, step.data, step.copies}) + agreed +
                         (on_host && view.is_uniform ? norm_copy(view.environments.front()) : Seconds(0.0));
  estimate.lower_bound = norm ? normed + step.finish : std::max({whole, step.data, step.copies});
  if (on_host && norm) estimate.lower_bound = std::max(estimate.lower_bound, step.updated);

  if (wanted == Wanted::bound) return estimate;

  // The first rank's own work and what the schedule adds; the rest is communication over the data
  // axis.
  estimate.time = step.parts;
  estimate.time *= shape.micro_batches;
  const Seconds computing = estimate.time.total();
  const auto plain_time = [&] {
    return in_parts
               ? played_time(schedule.actions(shape), plain_forward_, plain_backward_, transfer_, weights_, first_back_)
               : pipeline(plain_forward_, plain_backward_);
  };
  const Seconds with_transfers = plain_time();
  std::ranges::fill(transfer_, Seconds(0.0));
  const Seconds without_transfers = plain_time();
  estimate.time.exposed.pp += with_transfers - without_transfers;
  estimate.time.bubble += std::max(without_transfers - computing, Seconds(0.0));
  const auto left = [&] { return std::max(estimate.lower_bound - estimate.time.total(), Seconds(0.0)); };
  estimate.time.optimizer += std::min(norm ? step.finish + agreed : first.finish, left());
  Seconds waits_for_host = step.copies - computing;
  for (const StageBound& bound : bounds_)
    waits_for_host = std::max(waits_for_host, static_cast<double>(shape.micro_batches) * bound.stalls);
  if (row_of(spec.offload).saved == Home::host)
    estimate.time.offload += std::min(std::max(waits_for_host, Seconds(0.0)), left());
  estimate.time.exposed.dp += left();
  return estimate;
}

Estimate Estimator::estimate(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule) {
  return estimate(spec, placements, schedule, Wanted::all);
}

Bound Estimator::bound(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule) {
  return estimate(spec, placements, schedule, Wanted::bound);
}

Estimator::CutFrame Estimator::cut_frame(const ParallelSpec& spec, const Placements& placements,
                                         std::span<const Recompute> recomputes) {
  MeshView& view = view_of(spec.mesh);
  CutFrame frame{.shape = {spec.pp(), spec.pp(), static_cast<int>(micro_batches(spec, training_))},
                 .synchronises = computes_norm(training_),
                 .agreed = {},
                 .forward = {Seconds()},
                 .computing = {Seconds()},
                 .crossing = {Seconds()},
                 .slowest_transfer = {},
                 .ways = {}};
  if (frame.synchronises) frame.agreed = agreement(spec, placements, view);
  std::int64_t crossing = std::numeric_limits<std::int64_t>::max();
  std::vector<int> shapes;
  for (const Recompute recompute : recomputes) {
    shapes.push_back(shapes_of(spec, placements, recompute, 0));
    crossing = std::min(crossing, crossing_bytes(shapes_[shapes.back()]->kinds.front()));
  }
  std::vector<Seconds> forward, backward;  // by kind of block
  const auto take_least = [](std::vector<Seconds>& least, const std::vector<Seconds>& seconds) {
    if (least.empty()) least = seconds;
    for (std::size_t kind = 0; kind < least.size(); ++kind) least[kind] = std::min(least[kind], seconds[kind]);
  };
  for (int s = 0; s < frame.shape.stages; ++s) {
    const int environment = view.environments[s];
    if (s > 0 && environment == view.environments[s - 1]) {
      frame.ways.push_back(frame.ways.back());
      continue;
    }
    std::vector<CutFrame::Way>& ways = frame.ways.emplace_back();
    for (const int number : shapes) {
      const Costs& costs = costs_of(number, environment);
      take_least(forward, costs.forward_seconds);
      take_least(backward, costs.backward_seconds);
      ways.push_back({.shapes = number,
                      .costs = &costs,
                      .data = &data_costs_of(spec, placements, *shapes_[number], view, environment),
                      .copies = copies_of(spec, number, environment),
                      .sequential = is_sequential(environment)});
    }
  }
  for (const Block& block : graph_.blocks) {
    const std::size_t kind = static_cast<std::size_t>(block.kind);
    frame.forward.push_back(frame.forward.back() + forward[kind]);
    frame.computing.push_back(frame.computing.back() + (forward[kind] + backward[kind]));
  }
  const GroupNetwork* known = nullptr;
  Seconds transfer;
  for (int s = 0; s + 1 < frame.shape.stages; ++s) {
    const GroupNetwork* next = &next_network(spec.mesh, view, s, s + 1);
    if (known == nullptr || !(next == known || *next == *known))
      transfer = collective_time(InstructionKind::send, sent_bytes(crossing, spec, placements, training_), *next,
                                 cluster_.backend());
    known = next;
    // The next stage begins with this block or a later one.
    const bool surely_returns = passes_gradient_on(graph_, s + 1);
    frame.crossing.push_back(frame.crossing.back() + (surely_returns ? transfer : Seconds(0.0)));
    if (surely_returns) frame.slowest_transfer = std::max(frame.slowest_transfer, transfer);
  }
  return frame;
}

StagePath Estimator::path_of(const CutFrame& frame, int stage, BlockRange range) {
  const Seconds sent = frame.crossing.back() - frame.crossing[stage];
  return {.stage = stage,
          .forward = frame.forward[range.last] - frame.forward[range.first],
          .backward = (frame.computing[range.last] - frame.computing[range.first]) -
                      (frame.forward[range.last] - frame.forward[range.first]),
          .before = frame.computing[range.first] + 2.0 * frame.crossing[stage],
          .after = frame.computing.back() - frame.computing[range.last] + 2.0 * sent,
          .round_trip = frame.computing.back() - frame.computing[range.first] + 2.0 * sent,
          .slowest_transfer = frame.slowest_transfer};
}

Seconds Estimator::least_through(const CutFrame& frame, const ScheduleForms& schedule, int stage,
                                 BlockRange range) const {
  return time_through_stage(schedule, path_of(frame, stage, range), frame.shape) + frame.agreed;
}

// As the estimate of a whole cut, by its terms for one stage; what the other stages hold adds at
// least their computation. The end of the step is that of the slowest stage, so at least this
// one's.
StageOfCut Estimator::stage_of_cut(CutFrame& frame, const ParallelSpec& spec, const Placements& placements,
                                   const ScheduleForms& schedule, int stage, BlockRange range, std::size_t choice) {
  const CutFrame::Way& way = frame.ways[stage][choice];
  const auto find_bound = [&] {
    return bound_of_stage(spec, placements, range, tied_in(range), stage, false, way.sequential, *way.costs,
                          *shapes_[way.shapes], *way.data, way.copies);
  };
  StageBound bound;
  if (const int end = run_ends_[static_cast<std::size_t>(range.first)];
      end >= range.last && !uses_tied_[static_cast<std::size_t>(range.first)]) {
    const CutFrame::AlikeKey key{.costs = way.costs,
                                 .data = way.data,
                                 .kind = graph_.blocks[static_cast<std::size_t>(range.first)].kind,
                                 .blocks = range.size(),
                                 .is_first = stage == 0};
    const auto [entry, inserted] = frame.alike.try_emplace(key);
    if (inserted) entry->second = find_bound();
    bound = entry->second;
  } else {
    bound = find_bound();
  }
  StagePath path = path_of(frame, stage, range);
  path.round_trip += bound.forward + bound.backward - (path.forward + path.backward);
  path.forward = bound.forward;
  path.backward = bound.backward;
  StageOfCut result{
      .opening = {}, .pipeline = time_through_stage(schedule, path, frame.shape), .alone = bound.data, .end = {}};
  if (frame.synchronises) {
    const Seconds before = frame.forward[range.first] + frame.crossing[stage];
    const Seconds busy = frame.shape.micro_batches * std::max(bound.forward + bound.backward, bound.occupied);
    result.opening = bound.begin + bound.behind + bound.norms;
    result.alone = std::max({result.alone, before + busy + bound.behind + bound.norms,
                             before + frame.shape.micro_batches * std::max(bound.out, bound.back)});
    result.end = frame.agreed + bound.finish;
  } else {
    result.opening = bound.begin + std::max(bound.behind, bound.finish_behind);
  }
  return result;
}

}  // namespace parplan
