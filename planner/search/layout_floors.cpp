#include "planner/search/layout_floors.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <utility>

#include "planner/cluster/price_and_power.h"
#include "planner/cost/collective_time.h"
#include "planner/cost/kernel_time.h"
#include "planner/parallel/pipeline.h"
#include "planner/parallel/techniques.h"
#include "planner/search/space_rows.h"
#include "planner/simulator/segment_cost.h"

namespace parplan {
namespace {

// All that any device of the cluster can send at once.
BytesPerSecond all_links_of_a_device(const Cluster& cluster) {
  BytesPerSecond most;
  for (const NodeGroup& group : cluster.groups)
    for (const int device : group.node.devices) {
      BytesPerSecond all;
      for (const Link& link : group.node.links)
        if (link.a == device || link.b == device) all = BytesPerSecond(all.value + link.bandwidth.value);
      most = std::max(most, all);
    }
  return most;
}

// No algorithm of planner/cost takes less: each rank sends what the others lack; where switches add
// (nvls.h), all that is to be added, once.
Seconds least_collective_time(const Instruction& instruction, int ranks, BytesPerSecond links, bool switches_add) {
  if (ranks <= 1 || links.value <= 0.0) return Seconds(0.0);
  const bool reduces_all =
      instruction.kind == InstructionKind::all_reduce_sum || instruction.kind == InstructionKind::all_reduce_max;
  const double passes = reduces_all && switches_add ? 1.0 : (reduces_all ? 2.0 : 1.0) * (ranks - 1) / ranks;
  return passes * (communicated_bytes(instruction) / links) * (1 - 1e-9);
}

// How many ranks a group of a block has: of one that holds a part of the axis, its own.
int ranks_of(const DeviceMesh& mesh, GroupKey group) {
  if (group.axis != Axis::cp || group.members == Members::all) return mesh.degree_of(group.axis);
  return group.members == Members::heads ? mesh.cp_ulysses : mesh.degree.cp / mesh.cp_ulysses;
}

}  // namespace

void LayoutFloors::take_least(std::span<const Seconds> seconds, std::vector<Seconds>& least) {
  for (std::size_t kind = 0; kind < least.size(); ++kind) least[kind] = std::min(least[kind], seconds[kind]);
}

double LayoutFloors::speeds_of(std::span<const std::vector<Seconds>> stages, std::span<const Seconds> fastest) {
  double sum = 0.0;
  for (const std::vector<Seconds>& stage : stages) {
    double speed = 0.0;
    for (std::size_t kind = 0; kind < fastest.size(); ++kind)
      speed = std::max(speed, stage[kind] > Seconds(0.0) ? fastest[kind].value / stage[kind].value : 1.0);
    sum += speed;
  }
  return sum;
}

// Letters: rank s takes t_s for a block of a kind, of which there are n. Within T it takes T / t_s
// of them, rounded down; with the least T all ranks together take n. All ranks but the first and
// the last have a block that is neither the first nor the last, whatever their order here.
Seconds LayoutFloors::slowest_of(std::span<const std::vector<Seconds>> stages) const {
  Seconds slowest;
  std::vector<std::pair<Seconds, int>> paces;  // and how many ranks have it
  for (std::size_t kind = 0; kind < blocks_.size(); ++kind) {
    if (std::ranges::any_of(stages, [&](const std::vector<Seconds>& rank) { return rank[kind] <= Seconds(0.0); }))
      continue;
    paces.clear();
    for (const std::vector<Seconds>& rank : stages) {
      const auto same = std::ranges::find(paces, rank[kind], &std::pair<Seconds, int>::first);
      if (same == paces.end())
        paces.emplace_back(rank[kind], 1);
      else
        ++same->second;
    }
    double speed = 0.0;  // blocks a second
    for (const auto& [seconds, ranks] : paces) speed += ranks / seconds.value;
    const double evenly = blocks_[kind] / speed * (1 - 1e-9);
    std::vector<int> taken;
    int left = blocks_[kind];
    for (const auto& [seconds, ranks] : paces) {
      taken.push_back(static_cast<int>(evenly / seconds.value));
      left -= ranks * taken.back();
    }
    Seconds within(evenly);
    while (left > 0) {
      std::size_t next = 0;  // that has one more first
      for (std::size_t i = 1; i < paces.size(); ++i)
        if ((taken[i] + 1) * paces[i].first < (taken[next] + 1) * paces[next].first) next = i;
      within = ++taken[next] * paces[next].first;
      left -= paces[next].second;
    }
    slowest = std::max(slowest, within);
  }
  if (!alike_inside_ || stages.size() < 3) return slowest;
  std::vector<Seconds> of_one;
  for (const std::vector<Seconds>& rank : stages)
    of_one.push_back(rank[static_cast<std::size_t>(graph_.blocks[1].kind)]);
  std::ranges::nth_element(of_one, of_one.begin() + 2, std::greater());
  return std::max(slowest, of_one[2]);
}

LayoutFloors::LayoutFloors(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                           const LayoutRequest& request, const SpaceWidth& width, CandidateMaker& maker,
                           SampleFloors samples)
    : graph_(graph),
      cluster_(cluster),
      training_(training),
      maker_(maker),
      bound_(graph, cluster, training, state_homes(with_given(request))),
      fastest_links_(all_links_of_a_device(cluster)),
      switches_add_(has_nvlink_sharp(cluster)) {
  if (request[Choice::recompute])
    recomputes_.push_back(std::get<Recompute>(*request[Choice::recompute]));
  else
    std::ranges::copy(searched_recomputes(training.engine), std::back_inserter(recomputes_));
  // Where some layers alone recompute, the others take the time of those that recompute nothing.
  if (request[Choice::recompute_layers] && std::ranges::find(recomputes_, Recompute::none) == recomputes_.end())
    recomputes_.push_back(Recompute::none);
  for (const ScheduleRow& row : schedule_rows())
    if (request[Choice::schedule] ? std::get<ScheduleKind>(*request[Choice::schedule]) == row.kind
                                  : !runs_backward_in_parts(row.kind))
      schedules_.push_back(&row);
  width_ = width;
  samples_of_ = width.unlike_replicas > 0 ? SampleFloors::shared_by_unlike_replicas : samples;
  balances_ = width.balances_replicas && cluster.groups.size() > 1;
  method_ = given<ContextMethod>(request, Choice::cp_method);
  exchanging_ = static_cast<int>(given<std::int64_t>(request, Choice::cp_ulysses).value_or(1));
  overlap_ = given<TensorOverlap>(request, Choice::tp_overlap).value_or(TensorOverlap::none);
  offload_ = given<Offload>(request, Choice::offload).value_or(Offload{});
  group_ = static_cast<int>(given<std::int64_t>(request, Choice::micro_batch_group).value_or(0));
  if (const std::optional<std::int64_t> size = given<std::int64_t>(request, Choice::micro_batch))
    micro_batches_.push_back(*size);
  else
    micro_batches_ = divisors(training.global_batch);
  blocks_.resize(graph.kinds.size());
  flops_.resize(graph.kinds.size(), std::numeric_limits<double>::infinity());
  for (const Block& block : graph.blocks) {
    const std::size_t kind = static_cast<std::size_t>(block.kind);
    ++blocks_[kind];
    flops_[kind] = std::min(flops_[kind], product_flops(graph, block));
  }
  for (std::size_t block = 2; block + 1 < graph.blocks.size(); ++block)
    alike_inside_ = alike_inside_ && graph.blocks[block].kind == graph.blocks[1].kind;
}

// ---- time ----

Seconds LayoutFloors::least_of_slowest(const ScheduleRow& row, const LeastWork& work, Seconds transfer,
                                       const PipelineShape& shape) {
  return least_pipeline_time(forms_of(row), work.all + 2 * (shape.stages - 1) * transfer, work.all, work.slowest,
                             shape);
}

// `blocks`: by Block::kind. Some rank of the pipeline holds its share of them, rounded up.
LayoutFloors::LeastWork LayoutFloors::work_of(std::span<const int> blocks, std::span<const Seconds> by_kind,
                                              int ranks) {
  LeastWork work;
  for (std::size_t kind = 0; kind < by_kind.size(); ++kind) {
    work.all += static_cast<double>(blocks[kind]) * by_kind[kind];
    work.slowest = std::max(work.slowest, static_cast<double>(ceil_div(blocks[kind], ranks)) * by_kind[kind]);
  }
  return work;
}

// The row's least time grows with transfers, and in proportion to all times: it is kept for work of
// a second, and transfers rounded down to four binary digits of that.
Seconds LayoutFloors::least_of_any_cut(const ScheduleRow& row, Seconds all, Seconds transfer,
                                       const PipelineShape& shape) {
  if (all <= Seconds(0.0) || transfer <= Seconds(0.0)) return row.least(all, transfer, shape);
  constexpr double digits = 16.0;
  int exponent = 0;
  const double mantissa = std::floor(std::frexp(transfer / all, &exponent) * digits) / digits;
  const double rounded = std::ldexp(mantissa, exponent);
  const auto [fill, inserted] =
      fills_.try_emplace({&row, shape.ranks, shape.stages, shape.micro_batches, shape.group, rounded});
  if (inserted) fill->second = row.least(Seconds(1.0), Seconds(rounded), shape);
  return fill->second.value * all * (1 - 1e-9);
}

Seconds LayoutFloors::least_time(std::span<const Seconds> by_kind, const PipelineShape& shape, Seconds below) {
  return least_time(work_of(blocks_, by_kind, shape.ranks), shape, below);
}

Seconds LayoutFloors::least_time(const LeastWork& work, const PipelineShape& shape, Seconds below) {
  if (shape.ranks == 1) return shape.micro_batches * work.all;
  Seconds least = infinite;
  for (const ScheduleRow* row : schedules_) {
    PipelineShape of_row = shape;
    if (row->kind == ScheduleKind::interleaved) {
      if (group_ == 0 && !width_.groups_freely) {
        const std::optional<std::int64_t> group = smallest_group(shape.micro_batches, shape.ranks);
        if (!group || (*group > 0 && !width_.takes_larger_groups)) continue;
        if (*group > 0) of_row.group = static_cast<int>(*group);
      }
      // The bubble is shortest with the most stages on each rank.
      of_row.stages = static_cast<int>(graph_.blocks.size()) / shape.ranks * shape.ranks;
      if (group_ != 0) of_row.group = group_;
      // All larger groups have one bound.
      if (width_.groups_freely) of_row.group = std::max(of_row.group, shape.ranks + 1);
    }
    least = std::min(least, least_time(*row, work, of_row, std::min(least, below)));
  }
  return least;
}

// Infinite where it is not below `below`.
Seconds LayoutFloors::least_time(const ScheduleRow& row, const LeastWork& work, const PipelineShape& shape,
                                 Seconds below) {
  const Seconds of_slowest = least_of_slowest(row, work, Seconds(0.0), shape);
  if (of_slowest >= below) return infinite;
  return std::max(least_of_any_cut(row, work.all, Seconds(0.0), shape), of_slowest);
}

Floor LayoutFloors::of_devices(int devices) const {
  return {.time = bound_.time(devices), .memory = bound_.memory(devices)};
}

Floor LayoutFloors::of_micro_batch_at_peak(const ParallelSpec& spec, Seconds below) {
  if (may_be_unlike(spec) || samples_of_ == SampleFloors::none) return of_devices(spec.mesh.size());
  return of_samples(spec, seconds_of_sample(spec), below);
}

// `kernels`: what those of a block take for a sample at least, by Block::kind.
Floor LayoutFloors::of_samples(const ParallelSpec& spec, std::span<const Seconds> kernels, Seconds below) {
  const int devices = spec.mesh.size();
  Floor floor = of_devices(devices);
  FlopsPerSecond fastest;
  for (std::size_t g = 0; g < cluster_.groups.size(); ++g)
    if (devices_of_group(cluster_, g, devices) > 0)
      fastest = std::max(fastest, fastest_product(stated_precision(training_), cluster_.groups[g].device));
  if (floor.time <= Seconds(0.0) || fastest.value <= 0.0) return floor;
  const int ranks_a_replica = spec.mesh.size() / spec.mesh.batch_ranks() / spec.pp();
  of_micro_batch_.clear();
  for (std::size_t kind = 0; kind < flops_.size(); ++kind)
    of_micro_batch_.push_back(static_cast<double>(spec.micro_batch) *
                              std::max(Seconds(flops_[kind] / fastest.value / ranks_a_replica), kernels[kind]));
  floor.time = std::max(floor.time, least_time(of_micro_batch_, shape_of(spec, training_), below) * (1 - 1e-9));
  return floor;
}

// All times of kernels are subadditive: they grow with the micro-batch at most in proportion, since
// launches are constant, bytes proportional, and tiles rounded up. So a sample takes the least in
// the largest micro-batch, which is a multiple of every other, if it waits for its data alone, and
// each Segment is fused or not, whichever takes less (LoweredFor). They are so with the tokens of a
// sample, too, and those of attention with its pairs of queries and keys and with its heads, of
// which every rank of a context axis has its share.
const std::vector<Seconds>& LayoutFloors::seconds_of_sample(const ParallelSpec& spec) {
  const NetworkCache::StageDevice& device = maker_.estimator().networks().device(spec.mesh, 0);
  const auto [entry, inserted] =
      samples_.try_emplace({device.device.get(), spec.tp(), spec.sequence_parallel, spec.tp_overlap, spec.cp(),
                            spec.cp_method, spec.mesh.cp_ulysses},
                           std::vector<Seconds>(blocks_.size()));
  // The devices of a stage follow from the order of axes, where they are not alike.
  if (!inserted || cluster_.groups.size() > 1) return entry->second;
  ParallelSpec largest = spec;
  largest.micro_batch = micro_batches_.back();
  double shares = static_cast<double>(largest.micro_batch);
  if (samples_of_ == SampleFloors::shared_over_context) {
    shares *= spec.cp();
    largest.mesh.degree.dp *= spec.cp();
    largest.mesh.degree.cp = largest.mesh.cp_ulysses = 1;
    largest.cp_method = {};
  }
  if (samples_of_ == SampleFloors::without_tensor_communication) largest.tp_overlap = TensorOverlap::none;
  entry->second = least_seconds_by_data(largest, device);
  for (Seconds& one : entry->second) one *= (1 - 1e-9) / shares;
  return entry->second;
}

// Whatever is chosen beside the degrees.
const std::vector<Seconds>& LayoutFloors::seconds_of_any_sample(const ParallelSpec& spec) {
  const DeviceKind* const device = maker_.estimator().networks().device(spec.mesh, 0).device.get();
  const auto [entry, inserted] = any_samples_.try_emplace({device, spec.tp(), spec.cp()}, std::vector<Seconds>());
  if (!inserted) return entry->second;
  for (const bool sequence_parallel : {false, true})
    for (const ContextMethod method : context_methods) {
      if (method_ ? method != *method_ : !is_searched(method, spec.cp(), width_)) continue;
      ParallelSpec one = spec;
      one.sequence_parallel = sequence_parallel;
      if (sequence_parallel) one.tp_overlap = overlap_;
      one.cp_method = method;
      if (spec.cp() > 1) one.mesh.cp_ulysses = exchanging_;
      if ((sequence_parallel && spec.tp() == 1) || (method != ContextMethod::all_gather && spec.cp() == 1) ||
          !is_legal(graph_, training_, one))
        continue;
      const std::vector<Seconds>& seconds = seconds_of_sample(one);
      if (entry->second.empty())
        entry->second = seconds;
      else
        take_least(seconds, entry->second);
    }
  if (entry->second.empty()) entry->second.resize(blocks_.size());
  return entry->second;
}

Floor LayoutFloors::of_degrees(const ParallelSpec& spec) {
  if (may_be_unlike(spec) || samples_of_ == SampleFloors::none) return of_devices(spec.mesh.size());
  Floor least{.time = infinite, .memory = of_devices(spec.mesh.size()).memory};
  const std::vector<Seconds>& kernels = seconds_of_any_sample(spec);
  ParallelSpec one = spec;
  for (const std::int64_t size : micro_batches_) {
    if (training_.global_batch / spec.mesh.batch_ranks() % size != 0) continue;
    one.micro_batch = size;
    // (Floors are lowered by a billionth against rounding: none is left out for that.)
    least.time = std::min(least.time, of_samples(one, kernels, least.time * (1 + 1e-8)).time);
  }
  return least;
}

bool LayoutFloors::may_divide() const {
  return std::ranges::any_of(schedules_, [](const ScheduleRow* row) { return runs_backward_in_parts(row->kind); });
}

// Floors are of layouts with every ZeRO stage: of that in which blocks do the least. Where
// parameters are gathered, others than blocks cast them to fp8 (casts_weights_apart).
ParallelSpec LayoutFloors::with_fewest_casts(ParallelSpec spec) const {
  if (training_.fp8 && training_.engine.casts_weights_apart) spec.zero_stage = 3;
  return spec;
}

std::span<const LoweredBlock> LayoutFloors::blocks_of(ParallelSpec spec, Recompute recompute) {
  spec = with_fewest_casts(std::move(spec));
  // Kept for every number of replicas.
  if (spec.zero_stage == 3) spec.mesh.degree.dp = std::max(spec.mesh.degree.dp, 2);
  return maker_.estimator().lowered_blocks(spec, maker_.placements_of(spec), recompute);
}

// `spec` has no schedule yet.
std::span<const LoweredBlock> LayoutFloors::divided_blocks(ParallelSpec spec, Recompute recompute) {
  spec.schedule = ScheduleKind::zero_bubble_h1;
  return maker_.estimator().lowered_blocks(spec, maker_.placements_of(spec), recompute, 1);
}

LayoutFloors::LeastBlocks& LayoutFloors::least_blocks(const ParallelSpec& spec) {
  const auto [entry, inserted] = least_blocks_.try_emplace(blocks_key(spec));
  LeastBlocks& blocks = entry->second;
  if (!inserted) return blocks;
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  blocks.saved.assign(blocks_.size(), most);
  std::vector<std::int64_t> scratch(blocks_.size(), most);
  ParallelSpec offloaded = spec;
  offloaded.offload = offload_;
  for (const Recompute recompute : recomputes_) {
    const std::span<const LoweredBlock> lowered = blocks_of(spec, recompute);
    for (std::size_t kind = 0; kind < lowered.size(); ++kind) {
      const LoweredBlock& block = lowered[kind];
      const bool on_device = maker_.estimator().home_of_saved(offloaded, kind) == Home::device;
      const std::int64_t saved = on_device ? align_up(Bytes(block.saved_bytes), buffer_alignment).count : 0;
      blocks.saved[kind] = std::min(blocks.saved[kind], saved);
      scratch[kind] = std::min(scratch[kind], std::max(block.forward.scratch_bytes, block.backward.scratch_bytes));
    }
    if (!may_divide()) continue;
    const std::span<const LoweredBlock> divided = divided_blocks(spec, recompute);
    for (std::size_t kind = 0; kind < divided.size(); ++kind) {
      const LoweredBlock& block = divided[kind];
      scratch[kind] =
          std::min(scratch[kind], std::max({block.forward.scratch_bytes, block.backward_inputs.scratch_bytes,
                                            block.backward_weights.scratch_bytes}));
    }
  }
  blocks.scratch = *std::ranges::max_element(scratch);
  blocks.least_scratch = *std::ranges::min_element(scratch);
  return blocks;
}

std::vector<LayoutFloors::SegmentSeconds> LayoutFloors::segment_seconds(std::span<const LoweredBlock> blocks,
                                                                        const ParallelSpec& spec,
                                                                        const NetworkCache::StageDevice& device) const {
  const Execution execution = execution_of(*device.device, training_.engine);
  const Seconds host = host_per_op(*device.device, training_.engine);
  const auto duration_of = [&](const Instruction& instruction) {
    if (samples_of_ == SampleFloors::without_tensor_communication && instruction.kind != InstructionKind::kernel &&
        instruction.group.axis == Axis::tp)
      return Seconds(0.0);
    return instruction.kind == InstructionKind::kernel
               ? kernel_time(instruction.op, instruction.shape, instruction.type, *device.device, device.rates)
               : least_collective_time(instruction, ranks_of(spec.mesh, instruction.group), fastest_links_,
                                       switches_add_);
  };
  const auto seconds_of = [&](const Segment& segment) {
    return cost_segment(segment, execution, host, duration_of).duration;
  };
  std::vector<SegmentSeconds> seconds;
  for (const LoweredBlock& block : blocks) {
    const bool in_parts = !block.backward_inputs.instructions.empty();
    seconds.push_back({.forward = seconds_of(block.forward),
                       .backward = seconds_of(in_parts ? block.backward_inputs : block.backward),
                       .weights = in_parts ? seconds_of(block.backward_weights) : Seconds(0.0)});
  }
  return seconds;
}

const std::vector<Seconds>& LayoutFloors::least_seconds(const ParallelSpec& spec,
                                                        const NetworkCache::StageDevice& device) {
  const auto [entry, inserted] = least_blocks(spec).seconds.try_emplace(device.device.get());
  std::vector<Seconds>& least = entry->second;
  if (!inserted) return least;
  least.assign(blocks_.size(), infinite);
  const auto take = [&](std::span<const LoweredBlock> blocks) {
    const std::vector<SegmentSeconds> seconds = segment_seconds(blocks, spec, device);
    for (std::size_t kind = 0; kind < least.size(); ++kind) least[kind] = std::min(least[kind], seconds[kind].all());
  };
  for (const Recompute recompute : recomputes_) {
    take(blocks_of(spec, recompute));
    if (may_divide()) take(divided_blocks(spec, recompute));
  }
  return least;
}

std::vector<Seconds> LayoutFloors::least_seconds_by_data(const ParallelSpec& spec,
                                                         const NetworkCache::StageDevice& device) {
  std::vector<Seconds> least(blocks_.size(), infinite);
  std::vector<ParallelSpec> specs{spec};
  if (may_divide()) {
    specs.push_back(spec);
    specs.back().schedule = ScheduleKind::zero_bubble_h1;
  }
  // What is recomputed is work more: where calls wait for their data alone, none takes the least.
  const Recompute recompute = recomputes_.size() == 1 ? recomputes_.front() : Recompute::none;
  for (const ParallelSpec& one : specs) {
    const auto seconds_for = [&](LoweredFor purpose) {
      return segment_seconds(maker_.estimator().blocks_for(purpose, one, maker_.placements_of(one), recompute)->kinds,
                             one, device);
    };
    const std::vector<SegmentSeconds> fused = seconds_for(LoweredFor::floors_fused),
                                      unfused = seconds_for(LoweredFor::floors_unfused);
    for (std::size_t kind = 0; kind < least.size(); ++kind) {
      const SegmentSeconds &a = fused[kind], &b = unfused[kind];
      const SegmentSeconds both{.forward = std::min(a.forward, b.forward),
                                .backward = std::min(a.backward, b.backward),
                                .weights = std::min(a.weights, b.weights)};
      least[kind] = std::min(least[kind], both.all());
    }
  }
  return least;
}

Floor LayoutFloors::memory_of_micro_batch(const ParallelSpec& spec) {
  if (may_be_unlike()) return of_devices(spec.mesh.size());
  Floor floor = of_micro_batch_at_peak(spec);
  if (!may_be_unlike(spec))
    floor.memory = bound_.memory(spec.mesh.size(), bytes_beside_state(spec, least_blocks(spec)));
  return floor;
}

Floor LayoutFloors::of_micro_batch(const ParallelSpec& spec) {
  Floor floor = memory_of_micro_batch(spec);
  if (may_be_unlike()) return floor;
  const PipelineShape shape = shape_of(spec, training_);
  NetworkCache& networks = maker_.estimator().networks();
  Seconds time;
  if (cluster_.groups.size() == 1) {
    time = least_time(least_seconds(spec, networks.device(spec.mesh, 0)), shape);
  } else {
    // The devices of a stage follow from the order of axes.
    time = infinite;
    for (const ParallelSpec& one : orders_of(spec)) {
      const auto [work, speeds, transfer] = kernels_of_stages(one);
      time = std::min(time, std::max(least_time(work, shape), shape.micro_batches * (work.all / speeds)));
      if (may_be_unlike_in_order(one)) time = std::min(time, time_of_unlike(one));
    }
  }
  floor.time = std::max(floor.time, time * (1 - 1e-9));
  return floor;
}

std::vector<ParallelSpec> LayoutFloors::orders_of(const ParallelSpec& spec) const {
  std::vector<ChoiceValue> orders;
  space_row_of(Choice::mesh_order).values({graph_, training_, spec.mesh.size()}, spec, orders);
  std::vector<ParallelSpec> specs(orders.size(), spec);
  for (std::size_t i = 0; i < orders.size(); ++i) specs[i].mesh.order = std::get<AxisOrder>(orders[i]);
  return specs;
}

Seconds LayoutFloors::time_on_links(const ParallelSpec& of) {
  const ParallelSpec spec = with_fewest_casts(of);
  // Where backwards may run in two parts, blocks follow from the schedule.
  if (cluster_.groups.size() > 1 || may_divide() || may_be_unlike()) return Seconds(0.0);
  const Placements& placements = maker_.placements_of(spec);
  Estimator& estimator = maker_.estimator();
  const PipelineShape shape = shape_of(spec, training_);
  std::vector<std::pair<int, int>> known;
  Seconds time = infinite;
  for (const ParallelSpec& one : orders_of(spec)) {
    const std::vector<std::pair<int, int>> paces = estimator.paces(one, placements);
    if (paces.size() == 1 && std::ranges::find(known, paces.front()) != known.end()) continue;
    known.push_back(paces.front());
    std::vector<Seconds> least(blocks_.size(), infinite);
    for (std::size_t stage = 0; stage < paces.size(); ++stage) {
      const auto [entry, inserted] = seconds_by_pace_.try_emplace(paces[stage], blocks_.size(), infinite);
      if (inserted)
        for (const Recompute recompute : recomputes_)
          take_least(estimator.kind_seconds(one, placements, static_cast<int>(stage), recompute), entry->second);
      take_least(entry->second, least);
    }
    time = std::min(time, least_time(least, shape, time));
  }
  return time * (1 - 1e-9);
}

// The blocks are on some rank each, and one rank has at least their mean, and its share of those of
// each kind, rounded up.
Seconds LayoutFloors::data_time(const ParallelSpec& spec) {
  if (may_be_unlike() || spec.replicas() == 1) return Seconds(0.0);
  constexpr std::size_t most_kept = 1024;
  if (data_times_.size() >= most_kept) data_times_.clear();
  const auto [known, inserted] = data_times_.try_emplace(of_any_schedule(spec));
  if (!inserted) return known->second;
  const Placements& placements = maker_.placements_of(spec);
  Estimator& estimator = maker_.estimator();
  std::vector<Seconds> least(blocks_.size(), infinite);
  const int paces = static_cast<int>(estimator.paces(spec, placements).size());
  for (int stage = 0; stage < paces; ++stage) take_least(estimator.kind_data_seconds(spec, placements, stage), least);
  const LeastWork work = work_of(blocks_, least, spec.pp());
  return known->second = std::max(work.all / spec.pp(), work.slowest) * (1 - 1e-9);
}

Seconds LayoutFloors::data_time_of_any_order(const ParallelSpec& spec, Seconds enough) {
  if (may_be_unlike() || spec.zero_stage < 2) return Seconds(0.0);
  Seconds data = infinite;
  for (const ParallelSpec& one : orders_of(spec)) {
    data = std::min(data, data_time(one));
    if (data <= enough) break;
  }
  return data;
}

Seconds LayoutFloors::time_of_any_shards(const ParallelSpec& spec) {
  if (may_be_unlike()) return of_devices(spec.mesh.size()).time;
  const PipelineShape shape = shape_of(spec, training_);
  const LeastWork work =
      work_of(blocks_, least_seconds(spec, maker_.estimator().networks().device(spec.mesh, 0)), shape.ranks);
  const Seconds time =
      shape.ranks == 1 ? shape.micro_batches * work.all : least_time(row_of(spec.schedule), work, shape, infinite);
  return time * (1 - 1e-9);
}

LayoutFloors::LeastStages LayoutFloors::least_of(std::span<const std::vector<Seconds>> stages, int ranks) const {
  std::vector<Seconds> fastest(blocks_.size(), infinite);
  for (const std::vector<Seconds>& stage : stages) take_least(stage, fastest);
  LeastStages least{.work = work_of(blocks_, fastest, ranks), .speeds = static_cast<double>(ranks), .transfer = {}};
  if (stages.size() == 1) return least;
  least.work.slowest = std::max(least.work.slowest, slowest_of(stages));
  least.speeds = speeds_of(stages, fastest);
  return least;
}

LayoutFloors::LeastStages LayoutFloors::kernels_of_stages(const ParallelSpec& spec) {
  std::vector<std::vector<Seconds>> stages;
  for (int s = 0; s < spec.pp(); ++s)
    stages.push_back(least_seconds(spec, maker_.estimator().networks().device(spec.mesh, s)));
  return least_of(stages, spec.pp());
}

const LayoutFloors::StagesInOrders& LayoutFloors::stages_in_any_order(const ParallelSpec& spec) {
  ParallelSpec key = of_any_schedule(spec);
  key.zero_stage = ParallelSpec().zero_stage;
  key.mesh.dp_shard = ParallelSpec().mesh.dp_shard;
  key.mesh.order = ParallelSpec().mesh.order;
  constexpr std::size_t most_kept = 256;
  if (stages_in_any_order_.size() >= most_kept) stages_in_any_order_.clear();
  const auto [known, inserted] = stages_in_any_order_.try_emplace(std::move(key));
  StagesInOrders& result = known->second;
  if (!inserted) return result;
  for (const ParallelSpec& one : orders_of(spec)) {
    const LeastStages own = kernels_of_stages(one);
    const auto same = std::ranges::find(result.each, own);
    result.of_order.emplace_back(one.mesh.order, static_cast<std::size_t>(same - result.each.begin()));
    if (same == result.each.end()) result.each.push_back(own);
  }
  return result;
}

std::vector<Seconds> LayoutFloors::times_of(const StagesInOrders& stages, const ParallelSpec& spec) {
  const PipelineShape shape = shape_of(spec, training_);
  std::vector<Seconds> times;
  for (const auto& [work, speeds, transfer] : stages.each) {
    const Seconds at_any_speed = shape.ranks == 1 ? shape.micro_batches * work.all
                                                  : least_time(row_of(spec.schedule), work, shape, infinite);
    times.push_back(std::max(at_any_speed, shape.micro_batches * (work.all / speeds)) * (1 - 1e-9));
  }
  return times;
}

Seconds LayoutFloors::time_of_any_order(const ParallelSpec& spec) {
  if (may_be_unlike(spec)) return of_devices(spec.mesh.size()).time;
  return std::ranges::min(times_of(stages_in_any_order(spec), spec));
}

std::vector<Seconds> LayoutFloors::times_in_orders(const ParallelSpec& spec, std::span<const AxisOrder> orders) {
  if (may_be_unlike(spec)) return std::vector<Seconds>(orders.size(), of_devices(spec.mesh.size()).time);
  const StagesInOrders& stages = stages_in_any_order(spec);
  const std::vector<Seconds> times = times_of(stages, spec);
  std::vector<Seconds> result;
  for (const AxisOrder& order : orders) {
    const auto known = std::ranges::find(stages.of_order, order, &std::pair<AxisOrder, std::size_t>::first);
    // An order that was given may be written otherwise.
    result.push_back(known == stages.of_order.end() ? std::ranges::min(times) : times[known->second]);
  }
  return result;
}

// Blocks take as long under every schedule that runs backwards whole.
ParallelSpec LayoutFloors::of_any_schedule(ParallelSpec spec) {
  const ParallelSpec any;
  if (!runs_backward_in_parts(spec.schedule)) spec.schedule = any.schedule;
  spec.virtual_stages = any.virtual_stages;
  spec.micro_batch_group = any.micro_batch_group;
  spec.recompute = any.recompute;
  spec.recompute_layers = any.recompute_layers;
  spec.stage_recompute.clear();
  spec.stage_blocks.clear();
  return spec;
}

// By layouts on all stages, whatever their schedule, ZeRO stage and shards.
const LayoutFloors::LeastStages& LayoutFloors::least_stages(const ParallelSpec& of,
                                                            std::span<const Recompute> choices) {
  const ParallelSpec spec = with_fewest_casts(of);
  StagesKey key{.layout = of_any_schedule(spec), .choices = {choices.begin(), choices.end()}};
  if (spec.recompute_layers > 0) key.choices.push_back(Recompute::none);
  key.layout.zero_stage = ParallelSpec().zero_stage;
  key.layout.mesh.dp_shard = ParallelSpec().mesh.dp_shard;
  constexpr std::size_t most_kept = 1024;
  if (least_stages_.size() >= most_kept) least_stages_.clear();
  const auto [known, inserted] = least_stages_.try_emplace(std::move(key));
  LeastStages& result = known->second;
  if (!inserted) return result;
  const Placements& placements = maker_.placements_of(spec);
  Estimator& estimator = maker_.estimator();
  const std::vector<std::pair<int, int>> paces = estimator.paces(spec, placements);
  std::vector<std::vector<Seconds>> stages;  // by kind
  for (std::size_t stage = 0; stage < paces.size(); ++stage) {
    if (stage > 0 && paces[stage] == paces[stage - 1]) {
      stages.push_back(stages.back());
      continue;
    }
    stages.emplace_back(blocks_.size(), infinite);
    for (const Recompute recompute : known->first.choices)
      take_least(estimator.kind_seconds(spec, placements, static_cast<int>(stage), recompute), stages.back());
  }
  result = least_of(stages, spec.pp());
  if (spec.pp() == 1) return result;
  Bytes crossing(std::numeric_limits<std::int64_t>::max());
  const int parts = transfer_parts(placements.residual, spec.mesh, training_.engine);
  for (const Recompute recompute : known->first.choices)
    for (const LoweredBlock& block : estimator.lowered_blocks(spec, placements, recompute))
      crossing = std::min(crossing, Bytes(std::max(block.input_bytes, block.output_bytes) / parts));
  // Some cut may have a boundary over which no gradient returns.
  const bool surely_returns = passes_gradient_on(graph_, 1);
  result.transfer = !surely_returns ? Seconds(0.0)
                    : boundaries_are_alike(cluster_, spec.mesh)
                        ? collective_time(InstructionKind::send, crossing,
                                          estimator.networks().stages(spec.mesh, 0, 1), cluster_.backend())
                        : (fastest_links_.value > 0.0 ? crossing / fastest_links_ : Seconds(0.0));
  return result;
}

LayoutFloors::LeastLayout LayoutFloors::least_layout(const ParallelSpec& spec, std::span<const Recompute> choices) {
  const auto& [work, speeds, transfer] = least_stages(spec, choices);
  const PipelineShape shape = shape_of(spec, training_);
  if (shape.stages == 1)
    return {.all = work.all, .slowest = work.all, .transfer = {}, .time = shape.micro_batches * work.all};
  const ScheduleRow& row = row_of(spec.schedule);
  const Seconds time =
      std::max({least_of_any_cut(row, work.all, transfer, shape), least_of_slowest(row, work, transfer, shape),
                shape.micro_batches * (work.all / speeds)});
  return {.all = work.all, .slowest = work.slowest, .transfer = transfer, .time = time * (1 - 1e-9)};
}

Seconds LayoutFloors::time_of(const ParallelSpec& spec, std::span<const Recompute> choices) {
  if (may_be_unlike()) return of_devices(spec.mesh.size()).time;
  const Seconds alike = std::max(least_layout(spec, choices).time, data_time(spec));
  return may_be_unlike_in_order(spec) ? std::min(alike, time_of_unlike(spec, choices)) : alike;
}

}  // namespace parplan
