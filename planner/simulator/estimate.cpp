#include "planner/simulator/estimate.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "planner/cost/collective_time.h"
#include "planner/cost/host_time.h"
#include "planner/plan/unlike_replicas.h"
#include "planner/program/bucket_layout.h"
#include "planner/simulator/estimate_sizes.h"

namespace parplan {
namespace {

// Which share of what a device may use is used.
double share_of(const MemoryUse& memory, Bytes capacity) {
  return static_cast<double>(memory.peak().count) / static_cast<double>(std::max<std::int64_t>(capacity.count, 1));
}

}  // namespace

Estimator::Estimator(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                     std::shared_ptr<KnownBlockShapes> known_shapes)
    : graph_(graph),
      training_(training),
      blocks_(graph),
      views_(cluster, training.engine),
      costs_(graph, blocks_, training_, views_, std::move(known_shapes)),
      data_(graph, training_, views_),
      memories_(graph, blocks_, training_, views_, costs_, data_),
      stage_bounds_(graph, blocks_, training_) {}

std::vector<std::pair<int, int>> Estimator::paces(const ParallelSpec& spec, const Placements& placements) {
  const MeshView& view = views_.of(spec.mesh);
  const int shapes = costs_.number_of(spec, placements, recompute_of_every_layer(spec), 0);
  std::vector<std::pair<int, int>> paces;
  for (const int environment : std::span(view.environments).first(view.is_uniform ? 1 : view.environments.size()))
    paces.emplace_back(shapes, environment);
  return paces;
}

std::vector<Seconds> Estimator::block_seconds(const ParallelSpec& spec, const Placements& placements, int stage) {
  const BlockCosts& costs = costs_.of(costs_.number_of(spec, placements, recompute_of_every_layer(spec), stage),
                                      views_.of(spec.mesh).environments[stage]);
  std::vector<Seconds> seconds;
  for (int block = 0; block < blocks_.count(); ++block) {
    const std::size_t kind = blocks_.kind_of(block);
    seconds.push_back(costs.forward_seconds[kind] + costs.backward_seconds[kind]);
  }
  return seconds;
}

std::span<const LoweredBlock> Estimator::lowered_blocks(const ParallelSpec& spec, const Placements& placements,
                                                        Recompute recompute, int stage) {
  return costs_.shapes(costs_.number_of(spec, placements, recompute, stage)).kinds;
}

std::vector<Seconds> Estimator::kind_seconds(const ParallelSpec& spec, const Placements& placements, int stage,
                                             Recompute recompute) {
  const int environment = views_.of(spec.mesh).environments[stage];
  std::vector<Seconds> seconds;
  const auto take_least = [&](int shapes) {
    const BlockCosts& costs = costs_.of(shapes, environment);
    for (std::size_t kind = 0; kind < costs.forward_seconds.size(); ++kind) {
      const Seconds both = costs.forward_seconds[kind] + costs.backward_seconds[kind];
      if (kind == seconds.size()) seconds.push_back(both);
      seconds[kind] = std::min(seconds[kind], both);
    }
  };
  take_least(costs_.number_of(spec, placements, recompute, stage));
  // All stages of a kind of device are asked for as one.
  if (runs_backward_in_parts(spec.schedule))
    take_least(costs_.number_of(spec, placements, recompute, stage == 0 ? 1 : 0));
  return seconds;
}

std::vector<Seconds> Estimator::kind_seconds(const ParallelSpec& spec, const Placements& placements, int stage,
                                             Recompute recompute, int replica) {
  views_.see_replica(replica);
  std::vector<Seconds> seconds = kind_seconds(spec, placements, stage, recompute);
  views_.see_replica(std::nullopt);
  return seconds;
}

std::vector<Seconds> Estimator::kind_data_seconds(const ParallelSpec& spec, const Placements& placements, int stage) {
  const MeshView& view = views_.of(spec.mesh);
  const BlockShapes& shapes = costs_.shapes(costs_.number_of(spec, placements, Recompute::none, stage));
  const DataCosts& data = data_.of(spec, placements, shapes, view, view.environments[stage]);
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

Bytes Estimator::peak(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule, int rank,
                      std::span<const BlockRange> stages, StageRecompute recompute) {
  held_.clear();
  const std::vector<int> numbers = stages.size() > 1 ? stages_of_rank(spec, rank) : std::vector<int>{rank};
  for (std::size_t i = 0; i < stages.size(); ++i)
    held_.push_back(held_stage(spec, recompute, numbers[i], stages[i], blocks_.count(), [&](Recompute rule) {
      return costs_.number_of(spec, placements, rule, numbers[i]);
    }));
  return memories_.of(spec, placements, schedule, rank, held_).peak();
}

// On the gradient norm, over every axis.
Seconds Estimator::agreement(const ParallelSpec& spec, const Placements& placements, const MeshView& view) const {
  Seconds agreed;
  for (const Axis axis : inner_axes_first) {
    if (group_size(spec.mesh, axis) > 1 && (axis == Axis::pp || divides_state(placements, axis)))
      agreed += collective_time(InstructionKind::all_reduce_sum, Bytes(4),
                                axis == Axis::dp ? *view.shard : *view.along[axis], views_.cluster().backend());
  }
  return agreed;
}

// The copy of the gradient norm to the host.
Seconds Estimator::norm_copy(int environment) const {
  const StageEnvironment& where = views_.environment(environment);
  return host_copy_time(Bytes(size_of(DataType::fp32)), *where.device, where.rates, where.host);
}

bool Estimator::knows_reductions(const ParallelSpec& spec, const Placements& placements, const MeshView& view) const {
  const DataShards shards = data_shards(placements, spec.replicas());
  return spec.replicas() > 1 && spec.dp_method != DataMethod::master && !shards.gradients && !shards.parameters &&
         !views_.replica() && view.is_uniform && !views_.is_sequential(view.environments.front()) &&
         training_.engine.host_per_op == Seconds(0.0) && !training_.engine.blocks_launches &&
         !runs_backward_in_parts(spec.schedule) && spec.offload == Offload();
}

void Estimator::begin_stages(const ParallelSpec& spec) {
  stages_.shape = shape_of(spec, micro_batches(spec, training_, views_.replica()));
  stages_.rank_of_stage.clear();
  stages_.ranges.clear();
  for (int s = 0; s < stages_.shape.stages; ++s) {
    const int first = s == 0 ? 0 : stages_.ranges.back().last;
    stages_.ranges.push_back({first, first + spec.stage_blocks[s]});
    stages_.rank_of_stage.push_back(rank_of_stage(spec, s));
  }
  numbers_ = {};
}

HeldStage Estimator::held(const ParallelSpec& spec, const Placements& placements, int stage) {
  const StageRecompute recompute = spec.recompute_of(stage);
  return held_stage(spec, recompute, stage, stages_.ranges[stage], blocks_.count(), [&](Recompute rule) {
    std::optional<int>& known = numbers_[runs_backward_in_parts(spec.schedule, stage) ? 1 : 0][index_of(rule)];
    if (!known) known = costs_.number_of(spec, placements, rule, stage);
    return *known;
  });
}

Estimate Estimator::memory_of_ranks(const ParallelSpec& spec, const Placements& placements,
                                    const ScheduleForms& schedule) {
  const MeshView& view = views_.of(spec.mesh);
  const PipelineShape& shape = stages_.shape;
  Estimate estimate;
  estimate.spare = Bytes(std::numeric_limits<std::int64_t>::max());
  double fullest = -1.0;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    held_.clear();
    for (int s = shape.stages == shape.ranks ? rank : 0; s < shape.stages; ++s) {
      if (stages_.rank_of_stage[s] == rank) held_.push_back(held(spec, placements, s));
      if (shape.stages == shape.ranks) break;
    }
    const MemoryUse memory = memories_.of(spec, placements, schedule, rank, held_);
    const Bytes capacity = view.capacities[rank];
    estimate.spare = std::min(estimate.spare, capacity - memory.peak());
    if (view.hosts[rank]) estimate.spare = std::min(estimate.spare, *view.hosts[rank] - memory.host);
    if (view.drives[rank]) estimate.spare = std::min(estimate.spare, *view.drives[rank] - memory.nvme);
    // The last buffer of a rank is not padded.
    estimate.room_in_all += capacity + Bytes(buffer_alignment) - memory.overhead -
                            (blocks_.has_fixed_state() ? persistent(memory) : Bytes(0));
    if (const double share = share_of(memory, capacity); share > fullest) {
      fullest = share;
      estimate.memory = memory;
      estimate.memory_stage = rank;
    }
  }
  return estimate;
}

// From the first block on the stage's rank that uses the tied parameter to the last.
BlockRange Estimator::tied_on_rank(int stage) const {
  if (stages_.shape.stages == stages_.shape.ranks) return blocks_.tied_in(stages_.ranges[stage]);
  BlockRange uses;
  for (int s = 0; s < stages_.shape.stages; ++s) {
    if (stages_.rank_of_stage[s] != stages_.rank_of_stage[stage]) continue;
    const BlockRange of_stage = blocks_.tied_in(stages_.ranges[s]);
    if (of_stage.size() > 0) uses = {uses.size() > 0 ? uses.first : of_stage.first, of_stage.last};
  }
  return uses;
}

void Estimator::bound_stages(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule) {
  MeshView& view = views_.of(spec.mesh);
  const PipelineShape& shape = stages_.shape;
  const std::vector<int>& rank_of_stage = stages_.rank_of_stage;
  for (std::vector<Seconds>* one :
       {&stages_.forward, &stages_.backward, &stages_.transfer, &stages_.on_nics, &stages_.plain_forward,
        &stages_.plain_backward, &stages_.before, &stages_.weights})
    one->clear();
  stages_.bounds.clear();
  stages_.reductions.clear();
  stages_.first_back = 0;
  const bool plays_reductions = schedule.closed_form == nullptr && knows_reductions(spec, placements, view);
  const bool posts = views_.execution(view.environments.front()).posts_sends();
  const std::optional<int> replica = views_.replica();
  StagePlace place{.micro_batches = shape.micro_batches,
                   .shard = replica ? replica_rank(spec.mesh, {.dp = *replica}) % spec.shard_ranks() : 0};
  WayOfStage way;
  const BlockShapes* shapes = nullptr;
  const DataCosts* data = nullptr;
  const GroupNetwork* known_next = nullptr;
  Seconds before, transfer, on_nics;  // the latter two over `known_next`
  for (int s = 0; s < shape.stages; ++s) {
    const int rank = rank_of_stage[s];
    const int environment = view.environments[rank];
    place.stage = s;
    place.blocks = stages_.ranges[s];
    place.on_first_rank = rank == rank_of_stage.front();
    // After the first stage, equal blocks are bounded once.
    bool as_before = s > 1 && !place.on_first_rank && place.blocks.size() == stages_.ranges[s - 1].size() &&
                     blocks_.run_end(stages_.ranges[s - 1].first) >= place.blocks.last;
    if (s == 0 || environment != view.environments[rank_of_stage[s - 1]] ||
        spec.recompute_of(s) != spec.recompute_of(s - 1) ||
        runs_backward_in_parts(spec.schedule, s) != runs_backward_in_parts(spec.schedule, s - 1)) {
      as_before = false;
      const StageShapes numbers = held(spec, placements, s).shapes;
      const auto way_of = [&](int number) {
        return WayOfBlocks{&costs_.of(number, environment), costs_.copies(spec, number, environment)};
      };
      way.recomputing = way_of(numbers.shapes);
      way.keeping = way_of(numbers.kept_shapes);
      shapes = &costs_.shapes(numbers.shapes);
      data = &data_.of(spec, placements, *shapes, view, environment);
    }
    if (!as_before) {
      const HeldStage stage = held(spec, placements, s);
      place.sequential = views_.is_sequential(environment);
      way.first_kept = stage.shapes.first_kept;
      way.first_on_device = stage.first_on_device;
      if (way.recomputing.copies != nullptr) {
        const SavedByStage saved = memories_.saved_by(spec, stage);
        way.with_others = take_turns_with_others(saved);
        way.turns = way.with_others ? saved.on_device : staging_buffers;
      }
      place.tied_on_rank = tied_on_rank(s);
      stages_.bounds.push_back(stage_bounds_.of(spec, placements, place, way, *shapes, *data));
    } else {
      stages_.bounds.push_back(stages_.bounds.back());
    }
    const StageBound& bound = stages_.bounds.back();
    // What follows the first stage counts its reductions beside a backward that none slow.
    if (plays_reductions) {
      std::vector<StageReductions>& known = stages_.reductions;
      if (s == 0 || tied_on_rank(s).size() > 0)
        known.emplace_back();
      else if (as_before && known.back() != StageReductions() && stages_.on_nics[s - 1] == stages_.on_nics[s - 2])
        known.push_back(known.back());
      else
        known.push_back(stage_bounds_.reductions(place.blocks, shape.stages == shape.ranks, way, *data,
                                                 posts ? Seconds(0.0) : stages_.on_nics[s - 1]));
    }
    stages_.forward.push_back(bound.forward);
    stages_.backward.push_back(bound.backward);
    stages_.plain_forward.push_back(bound.plain_forward);
    stages_.plain_backward.push_back(bound.plain_backward);
    stages_.weights.push_back(bound.weights);
    stages_.before.push_back(before);
    if (s + 1 == shape.stages) break;
    if (!passes_gradient_on(graph_, place.blocks.last)) stages_.first_back = s + 1;
    before += bound.plain_forward;
    // Between stages of one rank nothing is transferred.
    if (rank_of_stage[s + 1] == rank) {
      stages_.transfer.emplace_back(0.0);
      stages_.on_nics.emplace_back(0.0);
      continue;
    }
    const GroupNetwork* next = &views_.between(spec.mesh, view, rank, rank_of_stage[s + 1]);
    if (known_next == nullptr || !(next == known_next || *next == *known_next)) {
      known_next = next;
      const Bytes sent = sent_bytes(crossing_bytes(shapes->kinds.front()), spec, placements, training_);
      transfer = collective_time(InstructionKind::send, sent, *next, views_.cluster().backend());
      on_nics = time_on_links(InstructionKind::send, sent, transfer, *next).nics;
    }
    stages_.transfer.push_back(transfer);
    stages_.on_nics.push_back(on_nics);
    before += transfer;
  }
}

// The closed form of the schedule bounds the end of the last backward on the first stage, from the
// least time of every stage. After it come the reductions that it did not overlap, the gradient
// norm, which all ranks await, the update and the gathers of updated parameters. Data-parallel
// communication of one rank shares one stream: the step takes at least its sum. Every term is work
// that the simulated step does in this order, so the bound is never above the simulated time (a
// property test holds this).
Estimate Estimator::estimate_replica(const ParallelSpec& spec, const Placements& placements,
                                     const ScheduleForms& schedule, Wanted wanted) {
  begin_stages(spec);
  Estimate estimate = memory_of_ranks(spec, placements, schedule);
  if (wanted == Wanted::bound && estimate.spare.count < 0) return estimate;

  bound_stages(spec, placements, schedule);
  const MeshView& view = views_.of(spec.mesh);
  const PipelineShape& shape = stages_.shape;
  const bool norm = computes_norm(training_);
  const bool on_host = updates_on_host(placements.state.homes);
  const StepBound step = bound_of_ranks(stages_, is_v_shaped(spec.schedule), on_host);
  const bool in_parts = runs_backward_in_parts(spec.schedule) && shape.stages > 1;
  const StageBound& first = stages_.bounds.front();
  const Seconds agreed = norm ? agreement(spec, placements, view) : Seconds(0.0);
  // Without a norm, no stage waits for another's gradients.
  const auto follows = [&](const StageBound& bound) {
    if (norm) return bound.behind + bound.norms;
    if (&bound != &first) return std::max(bound.behind + bound.regathers, bound.finish_behind);
    return std::max({bound.behind + step.regathers, bound.finish_behind, step.first_finish});
  };
  // The closed forms have every stage wait for a gradient.
  const bool plays = in_parts || schedule.closed_form == nullptr || stages_.first_back > 0;
  const Seconds whole =
      first.begin + (plays ? end_of_ranks(stages_, schedule.actions(shape), in_parts, norm, follows(first))
                           : end_of_stages(stages_, schedule,
                                           pipeline_time(schedule, stages_.forward, stages_.backward,
                                                         stages_.transfer, shape),
                                           follows));
  // Updates by the host also wait for a copy of the norm, and for this rank's gradients.
  const Seconds normed = std::max({whole, step.synchronised, step.data, step.copies}) + agreed +
                         (on_host && view.is_uniform ? norm_copy(view.environments.front()) : Seconds(0.0));
  estimate.lower_bound = norm ? normed + step.finish : std::max({whole, step.ended, step.data, step.copies});
  if (on_host && norm) estimate.lower_bound = std::max(estimate.lower_bound, step.updated);
  estimate.lower_bound = std::max(estimate.lower_bound, step.drives);
  if (wanted == Wanted::all)
    estimate.time = parts_of(spec, placements, schedule, plays, step, norm ? step.finish + agreed : first.finish,
                             estimate.lower_bound);
  return estimate;
}

// The first rank's own work and what the schedule adds; the rest is communication over the data
// axis.
StepTime Estimator::parts_of(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule,
                             bool plays, const StepBound& step, Seconds updates, Seconds bound) const {
  const PipelineShape& shape = stages_.shape;
  const bool in_parts = runs_backward_in_parts(spec.schedule) && shape.stages > 1;
  StepTime time = step.parts;
  time *= shape.micro_batches;
  const Seconds computing = time.total();
  const auto plain_time = [&](std::span<const Seconds> transfer) {
    return plays ? played_time(schedule.actions(shape), stages_.plain_forward, stages_.plain_backward, transfer,
                               in_parts ? std::span<const Seconds>(stages_.weights) : std::span<const Seconds>(),
                               stages_.first_back)
                 : pipeline_time(schedule, stages_.plain_forward, stages_.plain_backward, transfer, shape);
  };
  const Seconds with_transfers = plain_time(stages_.transfer);
  const Seconds without_transfers = plain_time(std::vector<Seconds>(stages_.transfer.size()));
  time.exposed.pp += with_transfers - without_transfers;
  time.bubble += std::max(without_transfers - computing, Seconds(0.0));
  const auto left = [&] { return std::max(bound - time.total(), Seconds(0.0)); };
  time.optimizer += std::min(updates, left());
  Seconds waits_for_host = step.copies - computing;
  for (const StageBound& of_stage : stages_.bounds)
    waits_for_host = std::max(waits_for_host, static_cast<double>(shape.micro_batches) * of_stage.stalls);
  const StateHomes& homes = placements.state.homes;
  if (spec.offload.activations != Home::device || homes.gradients != Home::device || homes.parameters != Home::device)
    time.offload += std::min(std::max(waits_for_host, Seconds(0.0)), left());
  time.exposed.dp += left();
  return time;
}

// Replicas that do unlike work wait for one another where they reduce gradients: the step takes at
// least as long as each of them alone.
Estimate Estimator::estimate(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule,
                             Wanted wanted) {
  if (spec.replica_micro_batches.empty()) return estimate_replica(spec, placements, schedule, wanted);
  std::optional<Estimate> all;
  double fullest = -1.0;
  for (const int replica : unlike_replicas(views_.cluster(), spec)) {
    views_.see_replica(replica);
    const Estimate one = estimate_replica(spec, placements, schedule, wanted);
    const double share = share_of(one.memory, capacity(spec.mesh, one.memory_stage));
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
  views_.see_replica(std::nullopt);
  return *all;
}

Estimate Estimator::estimate(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule) {
  return estimate(spec, placements, schedule, Wanted::all);
}

Bound Estimator::bound_of_replica(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule,
                                  int replica) {
  views_.see_replica(replica);
  const Bound bound = estimate_replica(spec, placements, schedule, Wanted::bound);
  views_.see_replica(std::nullopt);
  return bound;
}

Bound Estimator::bound(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule) {
  return estimate(spec, placements, schedule, Wanted::bound);
}

}  // namespace parplan
