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
#include "planner/plan/unlike_replicas.h"
#include "planner/program/bucket_layout.h"
#include "planner/program/bucket_work.h"
#include "planner/program/orthogonalize.h"
#include "planner/program/rank_buckets.h"
#include "planner/program/workspace.h"
#include "planner/simulator/estimate_sizes.h"
#include "planner/simulator/segment_cost.h"

namespace parplan {
bool boundaries_are_alike(const Cluster& cluster, const DeviceMesh& mesh) {
  return groups_in_use(cluster, mesh.size()).size() == 1 && cluster.network.levels.size() <= 1 &&
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
  const std::int64_t scratch = step_scratch_bytes(training_, graph, cluster_.backend()).count;
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

Estimator::StageShapes Estimator::stage_shapes(const ParallelSpec& spec, const Placements& placements,
                                               const StageRecompute& recompute, int stage, BlockRange blocks) {
  const int shapes = shapes_of(spec, placements, recompute.rule, stage);
  return {.shapes = shapes,
          .kept_shapes = recompute.layers > 0 ? shapes_of(spec, placements, Recompute::none, stage) : shapes,
          .first_kept = first_kept_block(blocks, recompute, static_cast<int>(graph_.blocks.size()))};
}

const Estimator::Costs& Estimator::costs_of(int shapes, int environment) {
  const auto [entry, inserted] = costs_.try_emplace({shapes, environment});
  if (!inserted) return entry->second;
  const Environment& where = environments_[environment];
  CostModel model{.device = where.device,
                  .rates = where.rates,
                  .execution = execution_of(*where.device, training_.engine),
                  .host_per_op = host_per_op(*where.device, training_.engine),
                  .fills_outputs = training_.engine.fills_outputs,
                  .networks = {}};
  for (const Axis axis : block_axes)
    if (is_planned(axis)) model.networks[all_along(axis)] = where.along[axis];
  if (where.exchange.ranks > 1) set_context_groups(where.exchange, where.keys, model.networks);
  Costs& costs = entry->second;
  for (const LoweredBlock& block : shapes_[shapes]->kinds) {
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
  return is_layer_kind_[kind] && has_backward(graph_, graph_.kinds[kind]) ? spec.offload.activations : Home::device;
}

const std::vector<Estimator::SavedCopies>* Estimator::copies_of(const ParallelSpec& spec, int shapes, int environment) {
  if (spec.offload.activations == Home::device) return nullptr;
  const auto [entry, inserted] = copies_.try_emplace({shapes, environment});
  if (!inserted) return &entry->second;
  const Environment& where = environments_[environment];
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
    if (spec.offload.activations != Home::nvme) continue;
    // An input that lies apart is not there.
    copies.write =
        in_file(Stream::to_nvme, saved_ranges(block, false)) + in_file(Stream::to_nvme, for_weights_ranges(block));
    copies.read = in_file(Stream::from_nvme, saved_ranges(block, false));
  }
  return &entry->second;
}

bool Estimator::is_sequential(int environment) const {
  return execution_of(*environments_[environment].device, training_.engine) == sequential_execution;
}

Estimator::MeshView& Estimator::view_of(const DeviceMesh& mesh) {
  if (replica_) {
    const auto [entry, inserted] = replica_views_.try_emplace({mesh, *replica_});
    if (inserted) entry->second = make_view(mesh);
    return entry->second;
  }
  if (last_view_ != nullptr && last_view_->first == mesh) return last_view_->second;
  const auto [entry, inserted] = views_.try_emplace(mesh);
  last_view_ = &*entry;
  if (inserted) entry->second = make_view(mesh);
  return entry->second;
}

Estimator::MeshView Estimator::make_view(const DeviceMesh& mesh) {
  MeshView view;
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
  const bool exchanges = mesh.cp_ulysses > 1;
  const GroupNetwork exchange = exchanges ? networks_.exchange(mesh) : GroupNetwork{};
  const GroupNetwork keys = exchanges ? networks_.keys(mesh) : GroupNetwork{};
  const NetworkCache::StageDevice* before = nullptr;
  for (int s = 0; s < stages; ++s) {
    const NetworkCache::StageDevice& device =
        replica_ ? networks_.device(mesh, s, *replica_) : networks_.device(mesh, s);
    if (std::exchange(before, &device) == &device) {
      view.environments.push_back(view.environments.back());
      view.capacities.push_back(view.capacities.back());
      view.hosts.push_back(view.hosts.back());
      view.drives.push_back(view.drives.back());
      continue;
    }
    const auto found = std::find_if(environments_.begin(), environments_.end(), [&](const Environment& known) {
      return known.device == device.device && known.rates == device.rates && known.along == along_blocks &&
             known.exchange == exchange && known.keys == keys;
    });
    view.environments.push_back(static_cast<int>(found - environments_.begin()));
    if (found == environments_.end())
      environments_.push_back({along_blocks, exchange, keys, device.device, device.rates, device.host, device.nvme});
    const std::uint64_t groups =
        replica_ ? groups_of_stage(cluster_, mesh, s, *replica_) : groups_of_stage(cluster_, mesh, s);
    view.capacities.push_back(usable_memory(memory_capacity(cluster_, groups), cluster_.memory_headroom));
    view.hosts.push_back(host_memory(cluster_, mesh, groups));
    view.drives.push_back(nvme_capacity(cluster_, mesh, groups));
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
  const int shapes = shapes_of(spec, placements, recompute_of_every_layer(spec), 0);
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
  const auto units_of = [&](const BucketElements& bucket, auto seconds) {
    Seconds all;
    for_each_unit(bucket, spec, training_, [&](std::int64_t elements) { all += seconds(elements); });
    return all;
  };
  // `kind`: whose matrices the bucket holds, if any.
  const auto costs_of_buckets = [&](const BucketElements& trained, const BucketElements& frozen, bool runs_back,
                                    const StateHomes& homes, std::optional<std::size_t> kind) {
    const std::int64_t whole = padded(trained, spec, training_);
    const auto local = [&](bool is_sharded) { return is_sharded ? whole / spec.shard_ranks() : whole; };
    BucketCosts costs;
    costs.regather = collective(InstructionKind::all_gather, whole * element);
    const auto gather = [&](std::int64_t elements) {
      return collective(InstructionKind::all_gather, elements * element);
    };
    costs.gather = units_of(trained, gather) + units_of(frozen, gather);
    if (runs_back) costs.gather_again = costs.gather;
    if (homes.parameters != Home::device) {
      const auto bring = [&](std::int64_t elements) {
        return copy((shards.parameters ? elements / spec.shard_ranks() : elements) * element);
      };
      costs.up = units_of(trained, bring) + units_of(frozen, bring);
      if (homes.parameters == Home::nvme)
        for (const std::int64_t elements : {whole, padded(frozen, spec, training_)})
          if (elements > 0)
            costs.read_up +=
                file_time(Stream::from_nvme,
                          Bytes((shards.parameters ? elements / spec.shard_ranks() : elements) * element), where.nvme);
      if (runs_back) costs.up_again = costs.up;
      if (runs_back) costs.read_again = costs.read_up;
    }
    const bool has_master = spec.dp_method == DataMethod::master;
    if (has_master)
      costs.hand_out = collective(InstructionKind::broadcast, whole * element) +
                       collective(InstructionKind::broadcast, padded(frozen, spec, training_) * element);
    if (whole == 0) return costs;
    if (has_master)
      costs.collect = collective(InstructionKind::reduce_sum, whole * gradient_bytes(training_));
    else
      costs.reduce = units_of(trained, [&](std::int64_t elements) {
        return collective(gradient_reduction(shards, training_), elements * reduced_bytes(training_));
      });
    if (!has_master && !shards.gradients && spec.replicas() > 1)
      for (const Instruction& copy_of : accumulated_reduction(whole, shards, training_).copies())
        costs.reduce += kernel(copy_of);
    if (spec.mesh.dp_shard > 0)
      costs.across = collective_time(InstructionKind::all_reduce_sum, Bytes(local(true) * reduced_bytes(training_)),
                                     *view.replicas, backend);
    if (shards.gradients) {
      costs.accumulate = units_of(trained, [&](std::int64_t elements) {
        return kernel(accumulate_gradients(elements / spec.shard_ranks(), Stream::dp, Label::dp));
      });
      costs.clear = kernel(clear_gradients(whole, Label::dp, gradient_type(training_)));
    }
    const auto host_kernel = [&](const Instruction& work) {
      return host_kernel_time(work, *where.device, where.rates, where.host);
    };
    const bool stages = homes.gradients != Home::device;
    if (stages)
      costs.sum = copy(local(shards.gradients) * gradient_bytes(training_));
    if (homes.gradients == Home::nvme) {
      const Bytes sum(local(shards.gradients) * gradient_bytes(training_)),
          shard(local(shards.optimizer) * gradient_bytes(training_));
      costs.sum_read = file_time(Stream::from_nvme, sum, where.nvme);
      costs.sum_write = file_time(Stream::to_nvme, sum, where.nvme);
      costs.shard_read = file_time(Stream::from_nvme, shard, where.nvme);
      costs.shard_write = file_time(Stream::to_nvme, shard, where.nvme);
    }
    if (!stages)
      costs.begin_clear = kernel(clear_gradients(
          local(shards.gradients) * gradient_bytes(training_) / size_of(DataType::fp32), Label::optimizer));
    if (computes_norm(training_)) {
      costs.norm = kernel(sum_of_squares(local(shards.optimizer)));
      // A rank that has nothing but a tied parameter sums on the device.
      if (updates_on_host(homes) && placements.state.homes.gradients != Home::device) {
        const Seconds on_host = host_kernel(sum_of_squares_on_host(local(shards.optimizer)));
        costs.norm = stages ? on_host : std::min(costs.norm, on_host);
      }
    }
    if (stages || updates_on_host(homes)) costs.to_host = copy(local(shards.optimizer) * gradient_bytes(training_));
    if (updates_on_host(homes)) {
      costs.update = host_kernel(update_on_host(local(shards.optimizer), false, training_));
      if (homes.parameters == Home::device) costs.from_host = copy(local(shards.optimizer) * element);
      const std::int64_t parts = bytes_of_state(training_, homes) / state_bytes;  // each by a copy of its own
      if (homes.optimizer == Home::nvme && parts > 0) {
        const Bytes part(local(shards.optimizer) * state_bytes);
        costs.read = static_cast<double>(parts) * file_time(Stream::from_nvme, part, where.nvme);
        costs.write = static_cast<double>(parts) * file_time(Stream::to_nvme, part, where.nvme);
      }
      if (homes.parameters == Home::nvme) {
        const Bytes part(local(shards.optimizer) * element);
        costs.read += file_time(Stream::from_nvme, part, where.nvme);
        costs.write += file_time(Stream::to_nvme, part, where.nvme);
      }
    } else {
      // The first rank's shard, which begins with the matrices.
      const std::int64_t own = local(shards.optimizer),
                         in_matrices = std::min(own, kind ? shapes.matrix_elements[*kind] : 0);
      costs.update = kernel(update_parameters(own - in_matrices, false, training_));
      if (in_matrices > 0) {
        costs.update += kernel(update_momentum(in_matrices, training_));
        for (const Instruction& work : shapes.orthogonalizations[*kind]) costs.orthogonalize += kernel(work);
        costs.update += kernel(move_along(in_matrices, 1.0, false, training_));
        if (shards.optimizer)
          costs.exchange = collective(InstructionKind::all_gather, whole * gradient_bytes(training_)) +
                           collective(InstructionKind::reduce_scatter, whole * element);
      }
    }
    return costs;
  };
  for (std::size_t kind = 0; kind < shapes.own_elements.size(); ++kind)
    entry->second.own.push_back(costs_of_buckets(shapes.own_elements[kind], shapes.frozen_elements[kind],
                                                 has_backward(graph_, graph_.kinds[kind]), placements.state.homes,
                                                 kind));
  for (const BucketElements& trained : shapes.own_elements)
    entry->second.reductions.push_back(reductions_of(trained, spec, shards, view, where));
  const StateHomes of_tied = homes_of_tied(placements.state.homes);
  entry->second.tied = shapes.tied_is_frozen ? costs_of_buckets({}, shapes.tied_elements, true, of_tied, {})
                                             : costs_of_buckets(shapes.tied_elements, {}, true, of_tied, {});
  // A rank holds the loss scale once, which tied_state counts.
  const std::int64_t scale =
      held_by_state(rank_memory({.buckets = {}, .saved = {}, .computes_loss = false}, training_)).count;
  const auto state_of = [&](const BucketSizes& bucket) {
    return held_by_state(rank_memory({.buckets = {&bucket, 1}, .saved = {}, .computes_loss = false}, training_)).count;
  };
  for (std::size_t kind = 0; kind < shapes.own_elements.size(); ++kind) {
    const BucketSizes frozen = frozen_bucket(shapes, kind, spec, placements, training_);
    const std::int64_t of_frozen = frozen.elements > 0 ? state_of(frozen) - scale : 0;
    entry->second.own_state.push_back(state_of(own_bucket(shapes, kind, spec, placements, training_)) - scale +
                                      of_frozen);
  }
  const BucketSizes tied = tied_bucket(shapes, spec, placements, training_, 2);
  entry->second.tied_state = shapes.tied_elements.all > 0 ? state_of(tied) : scale;
  return entry->second;
}

std::vector<Seconds> Estimator::block_seconds(const ParallelSpec& spec, const Placements& placements, int stage) {
  const Costs& costs = costs_of(shapes_of(spec, placements, recompute_of_every_layer(spec), stage),
                                view_of(spec.mesh).environments[stage]);
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

std::vector<Estimator::Reduction> Estimator::reductions_of(const BucketElements& trained, const ParallelSpec& spec,
                                                           const DataShards& shards, const MeshView& view,
                                                           const Environment& where) const {
  const std::int64_t whole = padded(trained, spec, training_);
  const bool beside_kernels =
      execution_of(*where.device, training_.engine).stream_of(Stream::dp) != index_of(Stream::compute);
  if (spec.replicas() == 1 || whole == 0 || shards.gradients || spec.dp_method == DataMethod::master ||
      !beside_kernels || !accumulated_reduction(whole, shards, training_).copies().empty())
    return {};
  std::vector<Reduction> reductions;
  const auto add = [&](InstructionKind kind, std::int64_t elements, const GroupNetwork& network) {
    const Bytes bytes(elements * reduced_bytes(training_));
    const Seconds duration = collective_time(kind, bytes, network, where.device->backend);
    reductions.push_back({duration, contention(kind, bytes, duration, network, *where.device, where.rates)});
  };
  for_each_unit(trained, spec, training_,
                [&](std::int64_t elements) { add(gradient_reduction(shards, training_), elements, *view.shard); });
  if (spec.mesh.dp_shard > 0) add(InstructionKind::all_reduce_sum, whole / spec.shard_ranks(), *view.replicas);
  return reductions;
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

std::vector<Seconds> Estimator::kind_seconds(const ParallelSpec& spec, const Placements& placements, int stage,
                                             Recompute recompute, int replica) {
  replica_ = replica;
  std::vector<Seconds> seconds = kind_seconds(spec, placements, stage, recompute);
  replica_.reset();
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

// A rank carries out its stages one after another: their work, their communication over the data
// axis, their norms, their updates and the gathers of these add up. Reductions follow the last
// backward of one of them. Those of the rank's first k stages also follow the beginning of the last
// micro-batch's backward on the k-th, after which the rank runs that backward, and the last group
// of micro-batches backward through the stages before the k-th. Schedules in the shape of a V have
// no such order.
Estimator::StepBound Estimator::bound_of_ranks(const PipelineShape& shape, bool goes_back, bool on_host) {
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
    rank.out += static_cast<double>(shape.micro_batches) * bound.out + bound.other_out;
    rank.back += static_cast<double>(shape.micro_batches) * bound.back + bound.other_back;
    rank.finish = std::max(rank.finish, bound.finish);
    rank.drives = std::max(rank.drives, bound.drives);
    rank.reads += static_cast<double>(shape.micro_batches) * bound.reads;
    rank.writes += static_cast<double>(shape.micro_batches) * bound.writes;
    rank.update_reads += bound.update_reads;
    rank.update_writes += bound.update_writes;
    if (rank_of_stage_[s] == rank_of_stage_.front()) step.parts += bound.parts;
  }
  for (const RankBound& rank : ranks_) {
    step.synchronised =
        std::max(step.synchronised, *rank.before + rank.busy + std::max(rank.behind, rank.behind_all) + rank.norms);
    const Seconds finish = std::max({rank.finish, rank.updates, rank.regathers, rank.returns});
    step.finish = std::max(step.finish, finish);
    // The host may update while others compute.
    const Seconds follows = on_host ? rank.regathers : finish;
    step.ended = std::max(step.ended, *rank.before + rank.busy +
                                          std::max(std::max(rank.behind, rank.behind_all) + rank.regathers, follows));
    if (first_back_ == 0 && &rank == &ranks_[rank_of_stage_.front()]) {
      step.regathers = rank.regathers;
      step.first_finish = follows;
    }
    step.updated = std::max(step.updated, *rank.before + rank.busy + rank.copied + finish);
    step.data = std::max(step.data, rank.data);
    // Each way one after another.
    step.drives =
        std::max({step.drives, rank.drives, rank.reads + rank.update_reads, rank.writes + rank.update_writes});
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

// By playing the actions: the latest end of a rank's actions with the reductions that follow them,
// and the norm's own part (without a norm: its update). `follows_first`: what follows the first
// stage's last backward.
Seconds Estimator::end_of_ranks(const Schedule& schedule, bool in_parts, bool norm, Seconds follows_first) {
  const std::vector<PlayedEnd> ends =
      played_ends(schedule, forward_, backward_, transfer_, weights_, first_back_, reductions_);
  Seconds latest;
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    // The last action is of one of the rank's stages: with backwards in two parts, of any.
    const int last = schedule.ranks[rank].back().stage;
    Seconds behind(std::numeric_limits<double>::infinity()), norms;
    for (int s = 0; s < schedule.stages(); ++s) {
      if (rank_of_stage_[s] != static_cast<int>(rank)) continue;
      const StageBound& bound = bounds_[s];
      norms += bound.norms;
      if (!in_parts && s != last) continue;
      behind = std::min(behind, norm ? bound.behind
                                     : std::max(bound.behind + ranks_[rank].regathers, bound.finish_behind));
    }
    // A backward that reductions slow hides as much more of them.
    Seconds follows = std::max(behind - ends[rank].slowed, Seconds(0.0)) + (norm ? norms : Seconds(0.0));
    if (!in_parts && last == 0) follows = std::max(follows, follows_first);
    latest = std::max(latest, ends[rank].time + follows);
  }
  return latest;
}

// By the closed form: the latest end of a stage's last backward, on the way through it, with what
// follows it. That of the first stage is the pipeline's end.
Seconds Estimator::end_of_stages(const ScheduleForms& schedule, const PipelineShape& shape, Seconds ends_first,
                                 const std::function<Seconds(const StageBound&)>& follows) const {
  Seconds latest = ends_first + follows(bounds_.front());
  if (schedule.through_stage == nullptr || shape.stages != shape.ranks) return latest;
  Seconds all, before, back;  // of the stages before: both ways, and back alone
  for (int s = 0; s < shape.stages; ++s) all += forward_[s] + backward_[s];
  for (const Seconds transfer : transfer_) all += 2.0 * transfer;
  for (int s = 1; s < shape.stages; ++s) {
    before += forward_[s - 1] + backward_[s - 1] + 2.0 * transfer_[s - 1];
    back += backward_[s - 1] + transfer_[s - 1];
    // The way through any stage is no longer than the pipeline. A slow transfer between stages
    // before this one delays the end of the step, but not this stage's last backward: none is
    // counted.
    if (ends_first - back + follows(bounds_[s]) <= latest) continue;
    const StagePath path{.stage = s,
                         .forward = forward_[s],
                         .backward = backward_[s],
                         .before = before,
                         .after = all - before - forward_[s] - backward_[s],
                         .round_trip = all - before,
                         .slowest_transfer = {}};
    latest = std::max(latest, time_through_stage(schedule, path, shape) - back + follows(bounds_[s]));
  }
  return latest;
}

// The closed form of the schedule bounds the end of the last backward on the first stage, from the
// least time of every stage. After it come the reductions that it did not overlap, the gradient
// norm, which all ranks await, the update and the gathers of updated parameters. Data-parallel
// communication of one rank shares one stream: the step takes at least its sum. Every term is work
// that the simulated step does in this order, so the bound is never above the simulated time (a
// property test holds this).
Estimate Estimator::estimate_replica(const ParallelSpec& spec, const Placements& placements,
                                     const ScheduleForms& schedule, Wanted wanted) {
  MeshView& view = view_of(spec.mesh);
  const PipelineShape shape = shape_of(spec, micro_batches_of(spec));
  const int stages = shape.stages;
  const BackendKind backend = cluster_.backend();
  const bool norm = computes_norm(training_);

  // The Shapes of stages with the same recompute, looked up once; per_stage is no stage's.
  std::array<std::array<std::optional<int>, index_of(Recompute::per_stage)>, 2> known_shapes;
  const auto shapes_with = [&](Recompute recompute, int stage) {
    std::optional<int>& known =
        known_shapes[runs_backward_in_parts(spec.schedule, stage) ? 1 : 0][index_of(recompute)];
    if (!known) known = shapes_of(spec, placements, recompute, stage);
    return *known;
  };
  const auto shapes_for = [&](int stage) {
    const StageRecompute recompute = spec.recompute_of(stage);
    const int shapes = shapes_with(recompute.rule, stage);
    return StageShapes{
        .shapes = shapes,
        .kept_shapes = recompute.layers > 0 ? shapes_with(Recompute::none, stage) : shapes,
        .first_kept = first_kept_block(ranges_[stage], recompute, static_cast<int>(graph_.blocks.size()))};
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

  const auto held_stage = [&](int stage) {
    return HeldStage{
        .blocks = ranges_[stage],
        .shapes = shapes_for(stage),
        .first_on_device = first_block_on_device(ranges_[stage], spec, static_cast<int>(graph_.blocks.size())),
        .is_handed_its_input = is_handed_its_input(spec, stage)};
  };
  Estimate estimate;
  estimate.spare = Bytes(std::numeric_limits<std::int64_t>::max());
  double fullest = -1.0;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    held_.clear();
    for (int s = stages == shape.ranks ? rank : 0; s < stages; ++s) {
      if (rank_of_stage_[s] == rank) held_.push_back(held_stage(s));
      if (stages == shape.ranks) break;
    }
    const MemoryUse memory = memory_of_rank(spec, placements, schedule, rank, held_);
    const Bytes capacity = view.capacities[rank];
    estimate.spare = std::min(estimate.spare, capacity - memory.peak());
    if (view.hosts[rank]) estimate.spare = std::min(estimate.spare, *view.hosts[rank] - memory.host);
    if (view.drives[rank]) estimate.spare = std::min(estimate.spare, *view.drives[rank] - memory.nvme);
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
  reductions_.clear();
  on_nics_.clear();
  const bool plays_reductions = schedule.closed_form == nullptr && knows_reductions(spec, placements, view);
  first_back_ = 0;
  Seconds before;

  StageShapes numbers;
  WayOfStage way;
  const DataCosts* data_costs = nullptr;
  const GroupNetwork* known_next = nullptr;
  Seconds known_transfer, known_on_nics;
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
      numbers = shapes_for(s);
      way.recomputing = {&costs_of(numbers.shapes, environment), copies_of(spec, numbers.shapes, environment)};
      way.keeping = {&costs_of(numbers.kept_shapes, environment), copies_of(spec, numbers.kept_shapes, environment)};
      data_costs = &data_costs_of(spec, placements, *shapes_[numbers.shapes], view, environment);
    }
    if (!as_before) {
      way.first_kept = first_kept_block(range, spec.recompute_of(s), static_cast<int>(graph_.blocks.size()));
      way.first_on_device = first_block_on_device(range, spec, static_cast<int>(graph_.blocks.size()));
      if (way.recomputing.copies != nullptr) {
        const SavedByStage saved = saved_by(spec, held_stage(s));
        way.with_others = take_turns_with_others(saved);
        way.turns = way.with_others ? saved.on_device : staging_buffers;
      }
    }
    const BlockShapes& shapes = *shapes_[numbers.shapes];

    const bool sequential = is_sequential(environment);
    bounds_.push_back(as_before ? bounds_.back()
                                : bound_of_stage(spec, placements, range, tied_on_rank(s), s,
                                                 rank == rank_of_stage_.front(), sequential, way, shapes, *data_costs));
    const StageBound& bound = bounds_.back();
    // What follows the first stage counts its reductions beside a backward that none slow.
    if (plays_reductions) {
      const BlockRange tied = tied_on_rank(s);
      reductions_.push_back(s == 0 || tied.size() > 0 ? StageReductions()
                            : as_before && reductions_.back() != StageReductions()
                                ? reductions_.back()
                                : reductions_of_stage(range, stages == shape.ranks, way, *data_costs));
    }
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
      on_nics_.emplace_back(0.0);
      continue;
    }
    const GroupNetwork* next = &next_network(spec.mesh, view, rank, rank_of_stage_[s + 1]);
    if (known_next == nullptr || !(next == known_next || *next == *known_next)) {
      known_next = next;
      const Bytes sent = sent_bytes(crossing_bytes(shapes.kinds.front()), spec, placements, training_);
      known_transfer = collective_time(InstructionKind::send, sent, *next, backend);
      known_on_nics = time_on_links(InstructionKind::send, sent, known_transfer, *next).nics;
    }
    transfer_.push_back(known_transfer);
    on_nics_.push_back(known_on_nics);
    before += known_transfer;
  }
  // Posted sends wait for what the receiver's rank has in flight.
  const bool posts =
      execution_of(*environments_[view.environments.front()].device, training_.engine).posts_sends();
  for (std::size_t s = 0; s < reductions_.size() && !posts; ++s) {
    StageReductions& reduces = reductions_[s];
    const Contention taken{.nics = reduces.nics};
    if (s > 0) reduces.sends_back = slowed_by({.nics = on_nics_[s - 1]}, taken);
    if (s + 1 < reductions_.size()) reduces.sends_on = slowed_by({.nics = on_nics_[s]}, taken);
  }
  const bool on_host = updates_on_host(placements.state.homes);
  const StepBound step = bound_of_ranks(shape, is_v_shaped(spec.schedule), on_host);
  const bool in_parts = runs_backward_in_parts(spec.schedule) && stages > 1;
  const StageBound& first = bounds_.front();

  const Seconds agreed = norm ? agreement(spec, placements, view) : Seconds(0.0);
  // Without a norm, no stage waits for another's gradients.
  const auto follows = [&](const StageBound& bound) {
    if (norm) return bound.behind + bound.norms;
    if (&bound != &first) return std::max(bound.behind + bound.regathers, bound.finish_behind);
    return std::max({bound.behind + step.regathers, bound.finish_behind, step.first_finish});
  };
  // The closed forms have every stage wait for a gradient.
  const bool plays = in_parts || schedule.closed_form == nullptr || first_back_ > 0;
  const Seconds whole =
      first.begin + (plays ? end_of_ranks(schedule.actions(shape), in_parts, norm, follows(first))
                           : end_of_stages(schedule, shape,
                                           pipeline_time(schedule, forward_, backward_, transfer_, shape), follows));
  // Updates by the host also wait for a copy of the norm, and for this rank's gradients.
  const Seconds normed = std::max({whole, step.synchronised, step.data, step.copies}) + agreed +
                         (on_host && view.is_uniform ? norm_copy(view.environments.front()) : Seconds(0.0));
  const StateHomes& homes = placements.state.homes;
  const bool moves_state = homes.gradients != Home::device || homes.parameters != Home::device;
  estimate.lower_bound = norm ? normed + step.finish : std::max({whole, step.ended, step.data, step.copies});
  if (on_host && norm) estimate.lower_bound = std::max(estimate.lower_bound, step.updated);
  estimate.lower_bound = std::max(estimate.lower_bound, step.drives);

  if (wanted == Wanted::bound) return estimate;

  // The first rank's own work and what the schedule adds; the rest is communication over the data
  // axis.
  estimate.time = step.parts;
  estimate.time *= shape.micro_batches;
  const Seconds computing = estimate.time.total();
  const auto plain_time = [&] {
    return plays ? played_time(schedule.actions(shape), plain_forward_, plain_backward_, transfer_,
                               in_parts ? std::span<const Seconds>(weights_) : std::span<const Seconds>(), first_back_)
                 : pipeline_time(schedule, plain_forward_, plain_backward_, transfer_, shape);
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
  if (spec.offload.activations != Home::device || moves_state)
    estimate.time.offload += std::min(std::max(waits_for_host, Seconds(0.0)), left());
  estimate.time.exposed.dp += left();
  return estimate;
}

// Replicas that do unlike work wait for one another where they reduce gradients: the step takes at
// least as long as each of them alone.
Estimate Estimator::estimate(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule,
                             Wanted wanted) {
  if (spec.replica_micro_batches.empty()) return estimate_replica(spec, placements, schedule, wanted);
  std::optional<Estimate> all;
  double fullest = -1.0;
  for (const int replica : unlike_replicas(cluster_, spec)) {
    replica_ = replica;
    const Estimate one = estimate_replica(spec, placements, schedule, wanted);
    const Bytes capacity = view_of(spec.mesh).capacities[static_cast<std::size_t>(one.memory_stage)];
    const double share =
        static_cast<double>(one.memory.peak().count) / static_cast<double>(std::max<std::int64_t>(capacity.count, 1));
    if (!all) all = one;
    if (share > fullest) {
      fullest = share;
      all->memory = one.memory;
      all->memory_stage = one.memory_stage;
      all->memory_replica = replica;
    }
    all->spare = std::min(all->spare, one.spare);
    all->room_in_all = std::min(all->room_in_all, one.room_in_all);
    if (one.lower_bound <= all->lower_bound) continue;
    all->lower_bound = one.lower_bound;
    all->time = one.time;
  }
  replica_.reset();
  return *all;
}

Estimate Estimator::estimate(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule) {
  return estimate(spec, placements, schedule, Wanted::all);
}

Bound Estimator::bound_of_replica(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule,
                                  int replica) {
  replica_ = replica;
  const Bound bound = estimate_replica(spec, placements, schedule, Wanted::bound);
  replica_.reset();
  return bound;
}

Bound Estimator::bound(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule) {
  return estimate(spec, placements, schedule, Wanted::bound);
}

}  // namespace parplan
