#include "planner/simulator/estimate.h"

#include <algorithm>
#include <numeric>

#include "planner/cost/collective.h"
#include "planner/cost/kernel.h"
#include "planner/program/lower.h"
#include "planner/program/workspace.h"
#include "planner/simulator/segment_cost.h"

namespace parplan {
Estimator::Estimator(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training)
    : graph_(graph), cluster_(cluster), training_(training), networks_(cluster) {
  for (std::size_t b = 0; b < graph.blocks.size(); ++b)
    if (block_parameters(graph, graph.blocks[b]).tied >= 0) tied_users_.push_back(static_cast<int>(b));
}

int Estimator::shapes_of(const ParallelSpec& spec, const Placements& placements) {
  const ShapesKey key{spec.tp(), spec.sequence_parallel, spec.micro_batch, spec.recompute == Recompute::full};
  const auto [entry, inserted] = shapes_index_.try_emplace(key, static_cast<int>(shapes_.size()));
  if (!inserted) return entry->second;
  const Job job{.graph = &graph_, .training = training_, .spec = spec, .placements = placements, .schedule = {},
                .backend = cluster_.backend(), .overhead = memory_overhead(cluster_)};
  const BlockChoice choice = block_choice(job, 0, 0);
  Shapes shapes;
  for (std::size_t b = 0; b < graph_.blocks.size(); ++b) {
    const Block& block = graph_.blocks[b];
    const std::size_t kind = static_cast<std::size_t>(block.kind);
    const BlockParameters parameters = block_parameters(graph_, block);
    if (parameters.tied >= 0 && shapes.tied_elements == 0)
      shapes.tied_elements = bucket_layout(graph_, {parameters.tied}, choice).elements;
    if (kind < shapes.kinds.size() && !shapes.kinds[kind].forward.instructions.empty()) continue;
    shapes.kinds.resize(std::max(shapes.kinds.size(), kind + 1));
    shapes.own_elements.resize(shapes.kinds.size());
    shapes.kinds[kind] = lower_block(graph_, static_cast<int>(b), choice);
    shapes.own_elements[kind] = bucket_layout(graph_, parameters.own, choice).elements;
  }
  shapes_.push_back(std::move(shapes));
  return entry->second;
}

const Estimator::Costs& Estimator::costs_of(int shapes, const CostModel& model) {
  const std::pair environment{model.network(GroupKind::tensor), model.rates};
  const auto found = std::find(environments_.begin(), environments_.end(), environment);
  const int number = static_cast<int>(found - environments_.begin());
  if (found == environments_.end()) environments_.push_back(environment);
  const auto [entry, inserted] = costs_.try_emplace({shapes, number});
  if (inserted)
    for (const LoweredBlock& block : shapes_[static_cast<std::size_t>(shapes)].kinds) {
      entry->second.forward.push_back(cost_segment(block.forward, model).parts);
      entry->second.backward.push_back(cost_segment(block.backward, model).parts);
    }
  return entry->second;
}

std::vector<double> Estimator::block_seconds(const ParallelSpec& spec, const Placements& placements) {
  const int shapes = shapes_of(spec, placements);
  const Costs& costs = costs_of(shapes, cost_model(networks_, spec.mesh, 0));
  std::vector<double> seconds;
  for (const Block& block : graph_.blocks) {
    const std::size_t kind = static_cast<std::size_t>(block.kind);
    seconds.push_back((costs.forward[kind].total() + costs.backward[kind].total()).value);
  }
  return seconds;
}

Estimate Estimator::estimate(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule) {
  const int shapes_number = shapes_of(spec, placements);
  const CostModel first = cost_model(networks_, spec.mesh, 0);
  const Costs& costs = costs_of(shapes_number, first);
  const Shapes& shapes = shapes_[static_cast<std::size_t>(shapes_number)];
  const int micro = static_cast<int>(micro_batches(spec, training_));
  const int stages = spec.pp();
  const bool sequential = !first.device->overlaps_communication;
  const auto sharded = [&](Placement placement) { return spec.dp() > 1 && placement == flat_shard(); };
  const bool shards_optimizer = sharded(placements.optimizer_data_axis);
  const bool shards_gradients = sharded(placements.gradients_data_axis);
  const bool shards_parameters = sharded(placements.parameters_data_axis);
  const BackendKind backend = first.device->backend;
  const GroupNetwork& data = first.network(GroupKind::data);
  const std::int64_t element = size_of(training_.precision);

  Estimate estimate;
  std::vector<Seconds> forward, backward, forward_bound, backward_bound;
  Seconds end_exposed;           // worst stage: what data parallelism adds behind the last backward
  Seconds optimizer_worst;
  Seconds optimizer_least{1e300};
  const auto overlap = [&](Seconds compute, Seconds communication) {
    return sequential ? communication : std::max(communication - compute, Seconds(0.0));
  };

  for (int s = 0; s < stages; ++s) {
    const BlockRange range = blocks_of_stage(spec, s);
    StepTime f, b;
    std::vector<BucketSizes> buckets;
    std::vector<std::int64_t> saved;
    std::int64_t scratch = step_scratch_bytes(training_, backend).count;
    std::int64_t crossing = 0;
    int tied_uses = 0;
    for (int i = range.first; i < range.last; ++i) {
      const std::size_t kind = static_cast<std::size_t>(graph_.blocks[static_cast<std::size_t>(i)].kind);
      f += costs.forward[kind];
      b += costs.backward[kind];
      const LoweredBlock& block = shapes.kinds[kind];
      saved.push_back(block.saved_bytes);
      scratch = std::max({scratch, block.forward.scratch_bytes, block.backward.scratch_bytes});
      crossing = block.crossing_bytes;
      buckets.push_back({.elements = align_up(Bytes(shapes.own_elements[kind]), 16 * spec.dp()).count});
      tied_uses += static_cast<int>(std::count(tied_users_.begin(), tied_users_.end(), i));
    }
    if (tied_uses > 0)
      buckets.push_back({.elements = align_up(Bytes(shapes.tied_elements), 16 * spec.dp()).count, .tied = true, .used_twice = tied_uses > 1});

    MemoryUse memory = stage_memory({.buckets = buckets, .saved_bytes = saved, .crossing_bytes = crossing, .scratch_bytes = scratch,
                                     .in_flight = schedule.in_flight(s, stages, micro), .last_stage = s == stages - 1},
                                    spec, placements, training_);
    memory.overhead = memory_overhead(cluster_);
    if (memory.peak() > estimate.memory.peak()) estimate.memory = memory;

    forward_bound.push_back(f.total());
    backward_bound.push_back(b.total());
    Seconds reduce, gather, optimizer;
    for (const BucketSizes& bucket : buckets) {
      if (bucket.elements == 0) continue;
      const auto collective = [&](InstructionKind kind, std::int64_t bytes) {
        return spec.dp() > 1 ? collective_time(kind, Bytes(bytes), data, backend) : Seconds(0.0);
      };
      reduce += collective(shards_optimizer ? InstructionKind::reduce_scatter : InstructionKind::all_reduce_sum, bucket.elements * 4) *
                (bucket.used_twice ? 2.0 : 1.0);
      gather += collective(InstructionKind::all_gather, bucket.elements * element);
      OpShape shape;
      shape.rows = shards_optimizer ? bucket.elements / spec.dp() : bucket.elements;
      const bool sgd = training_.optimizer == Optimizer::sgd;
      shape.second = sgd && training_.momentum != 0.0;
      shape.norm = computes_norm(training_);
      shape.master = is_half(training_.precision);
      shape.scaled = scales_loss(training_);
      optimizer += kernel_time(sgd ? OpKind::sgd : OpKind::adamw, shape, in_memory(training_.precision), *first.device, first.rates);
    }
    if (shards_parameters) {
      f.data_exposed += overlap(f.total(), gather);
      b.data_exposed += overlap(b.total(), gather + reduce);
    } else if (shards_gradients) {
      b.data_exposed += overlap(b.total(), reduce);
    }
    Seconds exposed;
    if (!shards_gradients) exposed += overlap(b.total(), reduce);
    if (shards_optimizer && !shards_parameters) exposed += gather;
    end_exposed = std::max(end_exposed, exposed);
    optimizer_worst = std::max(optimizer_worst, optimizer);
    optimizer_least = std::min(optimizer_least, optimizer);
    forward.push_back(f.total());
    backward.push_back(b.total());
    if (s == 0) {
      estimate.time = f;
      estimate.time += b;
      estimate.time *= micro;
    }
  }

  const Seconds pipeline = schedule.closed_form(forward, backward, micro);
  estimate.time.bubble += std::max(pipeline - estimate.time.total(), Seconds(0.0));
  if (stages > 1) {
    const Bytes crossing(shapes.kinds.front().crossing_bytes);
    estimate.time.pipeline_exposed +=
        2.0 * (stages - 1) * collective_time(InstructionKind::send, crossing, first.network(GroupKind::next), backend);
  }
  estimate.time.data_exposed += end_exposed;
  estimate.time.optimizer += optimizer_worst;
  estimate.lower_bound = schedule.closed_form(forward_bound, backward_bound, micro) + optimizer_least;
  return estimate;
}

}  // namespace parplan
