#include "planner/search/layout_floors.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <ranges>
#include <utility>

#include "planner/cluster/price_and_power.h"
#include "planner/cost/collective_time.h"
#include "planner/cost/kernel_time.h"
#include "planner/parallel/techniques.h"
#include "planner/program/memory.h"
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

void take_least(std::span<const Seconds> seconds, std::vector<Seconds>& least) {
  for (std::size_t kind = 0; kind < least.size(); ++kind) least[kind] = std::min(least[kind], seconds[kind]);
}

// How many times as fast as the fastest stage the stages are together, at most: each as fast as it
// is with the kind of block that suits it best.
double speeds_of(std::span<const std::vector<Seconds>> stages, std::span<const Seconds> fastest) {
  double sum = 0.0;
  for (const std::vector<Seconds>& stage : stages) {
    double speed = 0.0;
    for (std::size_t kind = 0; kind < fastest.size(); ++kind)
      speed = std::max(speed, stage[kind] > Seconds(0.0) ? fastest[kind].value / stage[kind].value : 1.0);
    sum += speed;
  }
  return sum;
}

// The slots that the last block has of its own.
std::int64_t slots_of_last_block(const ParallelSpec& spec, const PipelineShape& shape) {
  return spec.virtual_stages > 1 ? row_of(spec.schedule).last_stage_in_flight(shape) : 0;
}

}  // namespace

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
  samples_of_ =
      width.unlike_replicas > 0 || width.balances_replicas ? SampleFloors::shared_by_unlike_replicas : samples;
  method_ = given<ContextMethod>(request, Choice::cp_method);
  exchanging_ = static_cast<int>(given<std::int64_t>(request, Choice::cp_ulysses).value_or(1));
  overlap_ = given<TensorOverlap>(request, Choice::tp_overlap).value_or(TensorOverlap::none);
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
  const LeastWork work = work_of(blocks_, by_kind, shape.ranks);
  if (shape.ranks == 1) return shape.micro_batches * work.all;
  Seconds least = infinite;
  for (const ScheduleRow* row : schedules_) {
    PipelineShape of_row = shape;
    if (row->kind == ScheduleKind::interleaved) {
      if (group_ == 0 && shape.micro_batches % shape.ranks != 0) continue;
      // The bubble is shortest with the most stages on each rank.
      of_row.stages = static_cast<int>(graph_.blocks.size()) / shape.ranks * shape.ranks;
      if (group_ != 0) of_row.group = group_;
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
  if (may_be_unlike()) return of_devices(spec.mesh.size());
  return of_samples(spec, seconds_of_sample(spec), below);
}

// `kernels`: what those of a block take for a sample at least, by Block::kind.
Floor LayoutFloors::of_samples(const ParallelSpec& spec, std::span<const Seconds> kernels, Seconds below) {
  const int devices = spec.mesh.size();
  Floor floor = of_devices(devices);
  FlopsPerSecond fastest;
  for (std::size_t g = 0; g < cluster_.groups.size(); ++g)
    if (devices_of_group(cluster_, g, devices) > 0)
      fastest = std::max(fastest, fastest_product(training_.precision, cluster_.groups[g].device));
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
  if (may_be_unlike()) return of_devices(spec.mesh.size());
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

// `spec` has no schedule yet.
std::span<const LoweredBlock> LayoutFloors::divided_blocks(ParallelSpec spec, Recompute recompute) {
  spec.schedule = ScheduleKind::zero_bubble_h1;
  return maker_.estimator().lowered_blocks(spec, maker_.placements_of(spec), recompute, 1);
}

LayoutFloors::LeastBlocks& LayoutFloors::least_blocks(const ParallelSpec& spec) {
  const auto [entry, inserted] =
      least_blocks_.try_emplace({spec.tp(), spec.sequence_parallel, spec.tp_overlap, spec.cp(), spec.cp_method,
                                 spec.mesh.cp_ulysses, spec.micro_batch});
  LeastBlocks& blocks = entry->second;
  if (!inserted) return blocks;
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  blocks.saved.assign(blocks_.size(), most);
  std::vector<std::int64_t> scratch(blocks_.size(), most);
  for (const Recompute recompute : recomputes_) {
    const std::span<const LoweredBlock> lowered =
        maker_.estimator().lowered_blocks(spec, maker_.placements_of(spec), recompute);
    for (std::size_t kind = 0; kind < lowered.size(); ++kind) {
      const LoweredBlock& block = lowered[kind];
      const bool on_device = maker_.estimator().home_of_saved(spec, kind) == Home::device;
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
    take(maker_.estimator().lowered_blocks(spec, maker_.placements_of(spec), recompute));
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

Floor LayoutFloors::of_micro_batch(const ParallelSpec& spec) {
  if (may_be_unlike()) return of_devices(spec.mesh.size());
  Floor floor = of_micro_batch_at_peak(spec);
  floor.memory = bound_.memory(spec.mesh.size(), bytes_beside_state(spec, least_blocks(spec)));
  const PipelineShape shape = shape_of(spec, training_);
  NetworkCache& networks = maker_.estimator().networks();
  Seconds time;
  if (cluster_.groups.size() == 1) {
    time = least_time(least_seconds(spec, networks.device(spec.mesh, 0)), shape);
  } else {
    // The devices of a stage follow from the order of axes.
    time = infinite;
    for (const ParallelSpec& one : orders_of(spec)) {
      std::vector<std::vector<Seconds>> stages;
      std::vector<Seconds> fastest(blocks_.size(), infinite);
      for (int s = 0; s < shape.stages; ++s) {
        stages.push_back(least_seconds(one, networks.device(one.mesh, s)));
        take_least(stages.back(), fastest);
      }
      const Seconds all = work_of(blocks_, fastest, shape.stages).all;
      time = std::min(time,
                      std::max(least_time(fastest, shape), shape.micro_batches * (all / speeds_of(stages, fastest))));
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

Seconds LayoutFloors::time_on_links(const ParallelSpec& spec) {
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
  if (spec.replicas() == 1) return Seconds(0.0);
  const Placements& placements = maker_.placements_of(spec);
  Estimator& estimator = maker_.estimator();
  std::vector<Seconds> least(blocks_.size(), infinite);
  const int paces = static_cast<int>(estimator.paces(spec, placements).size());
  for (int stage = 0; stage < paces; ++stage) take_least(estimator.kind_data_seconds(spec, placements, stage), least);
  const LeastWork work = work_of(blocks_, least, spec.pp());
  return std::max(work.all / spec.pp(), work.slowest) * (1 - 1e-9);
}

Seconds LayoutFloors::time_of_any_order(const ParallelSpec& spec) {
  if (may_be_unlike()) return of_devices(spec.mesh.size()).time;
  Seconds data(0.0);
  if (spec.zero_stage >= 2) {
    data = infinite;
    for (const ParallelSpec& one : orders_of(spec)) data = std::min(data, data_time(one));
  }
  const PipelineShape shape = shape_of(spec, training_);
  const LeastWork work =
      work_of(blocks_, least_seconds(spec, maker_.estimator().networks().device(spec.mesh, 0)), shape.ranks);
  const Seconds time =
      shape.ranks == 1 ? shape.micro_batches * work.all : least_time(row_of(spec.schedule), work, shape, infinite);
  return std::max(time * (1 - 1e-9), data);
}

LayoutFloors::LeastLayout LayoutFloors::least_layout(const ParallelSpec& spec, std::span<const Recompute> choices) {
  const Placements& placements = maker_.placements_of(spec);
  Estimator& estimator = maker_.estimator();
  const PipelineShape shape = shape_of(spec, training_);
  const std::vector<std::pair<int, int>> paces = estimator.paces(spec, placements);
  std::vector<std::vector<Seconds>> stages;  // by kind
  for (std::size_t stage = 0; stage < paces.size(); ++stage) {
    if (stage > 0 && paces[stage] == paces[stage - 1]) {
      stages.push_back(stages.back());
      continue;
    }
    stages.emplace_back(blocks_.size(), infinite);
    for (const Recompute recompute : choices)
      take_least(estimator.kind_seconds(spec, placements, static_cast<int>(stage), recompute), stages.back());
    if (spec.recompute_layers > 0)
      take_least(estimator.kind_seconds(spec, placements, static_cast<int>(stage), Recompute::none), stages.back());
  }
  std::vector<Seconds> least(blocks_.size(), infinite);
  for (const std::vector<Seconds>& stage : stages) take_least(stage, least);
  const LeastWork work = work_of(blocks_, least, shape.ranks);
  if (shape.stages == 1)
    return {.all = work.all, .slowest = work.all, .transfer = {}, .time = shape.micro_batches * work.all};
  Bytes crossing(std::numeric_limits<std::int64_t>::max());
  const int parts = transfer_parts(placements.residual, spec.mesh, training_.engine);
  for (const LoweredBlock& block : estimator.lowered_blocks(spec, placements, choices.front()))
    crossing = std::min(crossing, Bytes(std::max(block.input_bytes, block.output_bytes) / parts));
  // Some cut may have a boundary over which no gradient returns.
  const bool surely_returns = passes_gradient_on(graph_, 1);
  const Seconds transfer = !surely_returns ? Seconds(0.0)
                           : boundaries_are_alike(cluster_, spec.mesh)
                               ? collective_time(InstructionKind::send, crossing,
                                                 estimator.networks().stages(spec.mesh, 0, 1), cluster_.backend())
                               : (fastest_links_.value > 0.0 ? crossing / fastest_links_ : Seconds(0.0));
  const ScheduleRow& row = row_of(spec.schedule);
  Seconds time =
      std::max(least_of_any_cut(row, work.all, transfer, shape), least_of_slowest(row, work, transfer, shape));
  if (stages.size() > 1) time = std::max(time, shape.micro_batches * (work.all / speeds_of(stages, least)));
  return {.all = work.all, .slowest = work.slowest, .transfer = transfer, .time = time * (1 - 1e-9)};
}

Seconds LayoutFloors::time_of(const ParallelSpec& spec, std::span<const Recompute> choices) {
  if (may_be_unlike()) return of_devices(spec.mesh.size()).time;
  return std::max(least_layout(spec, choices).time, data_time(spec));
}

// ---- memory ----

double LayoutFloors::bytes_beside_state(const ParallelSpec& spec, const LeastBlocks& blocks) const {
  const int stages = spec.pp();
  double saved = 0.0;  // of all stages, for one micro-batch
  for (std::size_t kind = 0; kind < blocks_.size(); ++kind)
    saved += static_cast<double>(blocks_[kind]) * static_cast<double>(blocks.saved[kind]);
  const double scratch = static_cast<double>(stages == 1 ? blocks.scratch : blocks.least_scratch);
  return static_cast<double>(spec.mesh.size()) * (saved / stages + scratch);
}

bool LayoutFloors::lacks_room(const ParallelSpec& spec) {
  const auto lacks = [&](const LeastBlocks& blocks) {
    return bound_.lacks_room(spec.mesh.size(), bytes_beside_state(spec, blocks));
  };
  // A larger micro-batch takes no less: the next smaller one that is known may tell.
  const auto key_of = [](const ParallelSpec& of) {
    return std::tuple(of.tp(), of.sequence_parallel, of.tp_overlap, of.cp(), of.cp_method, of.mesh.cp_ulysses,
                      of.micro_batch);
  };
  const auto larger = least_blocks_.lower_bound(key_of(spec));
  if (larger != least_blocks_.begin()) {
    ParallelSpec smaller = spec;
    smaller.micro_batch = std::get<6>(std::prev(larger)->first);
    if (key_of(smaller) == std::prev(larger)->first && smaller.micro_batch < spec.micro_batch &&
        lacks(std::prev(larger)->second))
      return true;
  }
  return lacks(least_blocks(spec));
}

LayoutFloors::Holdings& LayoutFloors::holdings_of(const ParallelSpec& spec, Recompute choice, bool with_seconds) {
  const ParallelSpec plain;
  ParallelSpec key = spec;
  key.recompute = choice;
  key.schedule = plain.schedule;
  key.virtual_stages = plain.virtual_stages;
  key.micro_batch_group = plain.micro_batch_group;
  key.input_slots = plain.input_slots;
  if (!with_seconds) key.mesh.order = plain.mesh.order;
  const auto [entry, inserted] = holdings_.try_emplace({std::move(key), with_seconds});
  Holdings& holdings = entry->second;
  if (!inserted) return holdings;
  const Placements& placements = maker_.placements_of(spec);
  std::vector<std::pair<int, int>> paces = maker_.estimator().paces(spec, placements);
  if (!with_seconds) paces.resize(1);
  std::vector<std::pair<int, int>> known;
  for (std::size_t stage = 0; stage < paces.size(); ++stage) {
    const auto pace = std::ranges::find(known, paces[stage]);
    holdings.of_stage.push_back(static_cast<std::size_t>(pace - known.begin()));
    if (pace != known.end()) continue;
    known.push_back(paces[stage]);
    BlockTable room;
    if (!spare_tables_.empty()) {
      room = std::move(spare_tables_.back());
      spare_tables_.pop_back();
    }
    holdings.each.push_back(
        {.table = maker_.estimator().block_table(spec, placements, static_cast<int>(stage), choice, std::move(room)),
         .fixed = {}});
  }
  return holdings;
}

void LayoutFloors::forget_holdings() {
  for (auto& [key, holdings] : holdings_)
    for (Holding& one : holdings.each) spare_tables_.push_back(std::move(one.table));
  holdings_.clear();
}

bool LayoutFloors::holds_anything(const ParallelSpec& spec) const {
  return spec.virtual_stages > 1 &&
         (!alike_inside_ || spec.input_slots == InputSlots::one_more || is_v_shaped(spec.schedule));
}

LayoutFloors::Shares LayoutFloors::shares_of(const ParallelSpec& spec, std::span<const Recompute> choices) {
  const Placements& placements = maker_.placements_of(spec);
  const ScheduleRow& row = row_of(spec.schedule);
  const PipelineShape shape = shape_of(spec, training_);
  Estimator::KindBytes bytes = maker_.estimator().kind_bytes(spec, placements, choices.front());
  for (const Recompute recompute : choices.subspan(1)) {
    const Estimator::KindBytes other = maker_.estimator().kind_bytes(spec, placements, recompute);
    for (std::size_t kind = 0; kind < bytes.saved.size(); ++kind)
      bytes.saved[kind] = std::min(bytes.saved[kind], other.saved[kind]);
  }
  const auto most = static_cast<std::size_t>(std::ranges::max_element(blocks_) - blocks_.begin());
  Shares shares{.of_byte = {}, .needed = 0.0, .least_fixed = bytes.least_fixed};
  std::vector<double> least(blocks_.size(), std::numeric_limits<double>::infinity());
  // The last block has its own slots.
  const auto last = static_cast<std::size_t>(graph_.blocks.back().kind);
  const std::int64_t heads = slots_of_last_block(spec, shape);
  int in_flight = -1;
  for (int s = 0; s < shape.ranks; ++s) {
    // Ranks that hold equally much follow one another.
    if (const int now = row.in_flight(s, shape); std::exchange(in_flight, now) == now) {
      shares.of_byte.push_back(shares.of_byte.back());
      continue;
    }
    const auto takes = [&](std::size_t kind) {
      std::int64_t saved = in_flight * bytes.saved[kind] / spec.virtual_stages;
      if (spec.virtual_stages > 1 && kind == last) saved = std::min(saved, heads * bytes.saved[kind]);
      return static_cast<double>(bytes.state[kind] + saved);
    };
    shares.of_byte.push_back(1.0 / std::max(takes(most), 1.0));
    for (std::size_t kind = 0; kind < least.size(); ++kind)
      least[kind] = std::min(least[kind], takes(kind) * shares.of_byte.back());
  }
  for (std::size_t kind = 0; kind < least.size(); ++kind)
    shares.needed += static_cast<double>(blocks_[kind]) * least[kind];
  return shares;
}

Bytes LayoutFloors::memory_by_share(const ParallelSpec& spec, std::span<const Recompute> choices) {
  if (may_be_unlike()) return Bytes(0);
  if (holds_anything(spec) || spec.input_slots == InputSlots::one_more || runs_backward_in_parts(spec.schedule))
    return Bytes(0);
  const Shares shares = shares_of(spec, choices);
  double room = 0.0;
  for (const double of_byte : shares.of_byte) room += of_byte;
  return Bytes(shares.least_fixed + static_cast<std::int64_t>(shares.needed / room * (1 - 1e-9)));
}

// Letters: the blocks take t_0 seconds and grow by b_0 bytes without recompute, t_1 and b_1 where
// all of their layers recompute; F bytes of the stage's C do not grow. With a share f of alike
// layers that recompute, blocks that fit take b_0 - f (b_0 - b_1) <= C - F bytes, and at least
// t_0 + f (t_1 - t_0) seconds.
Seconds LayoutFloors::least_seconds_held(const ParallelSpec& spec, const BlockTable& none, const BlockTable& own,
                                         int in_flight, std::int64_t heads, std::int64_t capacity, std::size_t begin,
                                         std::size_t end) const {
  const Seconds all = own.seconds[end] - own.seconds[begin];
  const Seconds least = none.seconds[end] - none.seconds[begin];
  if (!alike_inside_ || runs_backward_in_parts(spec.schedule) || all <= least) return std::min(all, least);
  const auto grows = [&](const BlockTable& of) {
    const std::size_t shared = spec.virtual_stages > 1 && end + 1 == of.state.size() ? end - 1 : end;
    return static_cast<double>(of.state[end] - of.state[begin]) +
           static_cast<double>(in_flight) * static_cast<double>(of.saved[shared] - of.saved[begin]) /
               spec.virtual_stages +
           static_cast<double>(heads) * static_cast<double>(of.saved[end] - of.saved[shared]);
  };
  const double freed = grows(none) - grows(own),
               lacking = grows(none) + static_cast<double>(none.least_fixed - capacity);
  const double share = freed > 0.0 ? std::clamp(lacking / freed, 0.0, 1.0) : 0.0;
  return least + share * (1 - 1e-6) * (all - least);
}

bool LayoutFloors::can_hold(const ParallelSpec& spec, std::span<const Recompute> choices, std::optional<Seconds> most,
                            std::optional<Bytes> memory) {
  if (holds_anything(spec) || may_be_unlike()) return true;
  const Placements& placements = maker_.placements_of(spec);
  Estimator& estimator = maker_.estimator();
  const ScheduleForms schedule = forms_of(row_of(spec.schedule));
  const PipelineShape shape = shape_of(spec, training_);
  const std::size_t blocks = graph_.blocks.size();
  const std::vector<Bytes>& capacities = estimator.capacities(spec.mesh);
  // What a stage holds besides the state does not grow with its blocks alone.
  const bool in_parts = runs_backward_in_parts(spec.schedule);
  const bool has_own_peaks = spec.input_slots == InputSlots::one_more || in_parts;
  if (!most && !has_own_peaks) {
    const Shares shares = shares_of(spec, choices);
    double room = 0.0;
    for (std::size_t s = 0; s < shares.of_byte.size(); ++s)
      room += shares.of_byte[s] * static_cast<double>(memory.value_or(capacities[s]).count - shares.least_fixed);
    if (shares.needed * (1 - 1e-9) > room) return false;
  }
  constexpr std::size_t most_kept = 256;
  if (holdings_.size() + choices.size() > most_kept) forget_holdings();
  std::vector<Holdings*> holdings;
  for (const Recompute choice : choices) holdings.push_back(&holdings_of(spec, choice, most.has_value()));
  // Each rank takes as many blocks as it can and leaves one for each stage of the later ranks: what
  // it can hold with more blocks it can with fewer, so no cut gets further. The last rank takes the
  // rest: it may hold that, although it could not hold less and send it on. Where ranks hold
  // several stages, this counts blocks: all but the first and the last, which are on the first and
  // the last rank, are alike. Slots of saved activations are as large as the largest stage needs;
  // the last block has its own.
  const int stages = spec.virtual_stages;  // of a rank
  const std::int64_t heads = slots_of_last_block(spec, shape);
  const auto of_none = [&](std::size_t stage) -> const BlockTable& {
    return holdings.front()->each[holdings.front()->of_stage[stage]].table;
  };
  const bool may_recompute_few = width_.recomputes_fewest_layers;
  const Seconds slowest = most ? *most * (1 + 1e-9) : infinite;
  std::vector<std::size_t> taken(choices.size(), 0);  // by the rank before, with each choice or those before it
  std::vector<std::size_t> turns(choices.size());     // of the choices: the one that took the rank before farthest
  std::iota(turns.begin(), turns.end(), std::size_t{0});
  std::size_t held = 0;
  for (int s = 0; s < shape.ranks; ++s) {
    const bool is_last = s + 1 == shape.ranks;
    const std::size_t last = blocks - static_cast<std::size_t>((shape.ranks - 1 - s) * stages);
    const std::int64_t capacity = memory.value_or(capacities[static_cast<std::size_t>(s)]).count;
    const int in_flight = schedule.in_flight(s, shape);
    std::size_t farthest = held;
    std::size_t farthest_turn = 0;
    for (std::size_t turn = 0; turn < turns.size(); ++turn) {
      const std::size_t choice = turns[turn];
      Holdings& of_choice = *holdings[choice];
      const std::size_t stage = of_choice.of_stage.size() == 1 ? 0 : static_cast<std::size_t>(s);
      Holding& holding = of_choice.each[of_choice.of_stage[stage]];
      const auto& table = holding.table;
      auto& fixed = holding.fixed;
      const auto fits = [&](std::size_t end) {
        if (most && table.seconds[end] - table.seconds[held] > slowest &&
            (!may_recompute_few || choice == 0 ||
             least_seconds_held(spec, of_none(stage), table, in_flight, heads, capacity, held, end) > slowest))
          return false;
        const std::size_t shared = stages > 1 && end == blocks ? end - 1 : end;  // of these blocks
        const std::int64_t state = table.state[end] - table.state[held];
        const BlockRange range{static_cast<int>(held), static_cast<int>(end)};
        if (in_parts)
          return state <= capacity &&
                 estimator.peak(spec, placements, schedule, s, range, choices[choice]).count <= capacity;
        const std::int64_t growing = state + in_flight * (table.saved[shared] - table.saved[held]) / stages +
                                     heads * (table.saved[end] - table.saved[shared]);
        if (growing + table.least_fixed > capacity) return false;
        if (stages > 1) return true;
        if (spec.input_slots == InputSlots::one_more)
          return estimator.peak(spec, placements, schedule, s, range, choices[choice]).count <= capacity;
        const std::pair kinds(spec.schedule,
                              estimator.kinds_in(range) << 1 | static_cast<std::uint64_t>(end == blocks));
        auto known = std::ranges::find_if(fixed, [&](const auto& one) { return one.first == kinds; });
        if (known == fixed.end())
          known = fixed.insert(
              known, {kinds, estimator.peak(spec, placements, schedule, s, range, choices[choice]).count - growing});
        return growing + known->second <= capacity;
      };
      if (is_last) {
        if (fits(blocks)) return true;
        continue;
      }
      const std::size_t farthest_before = farthest;
      // Mostly as many as the rank before.
      if (const std::size_t alike = held + taken[choice]; alike > farthest && alike <= last && fits(alike))
        farthest = alike;
      while (farthest < last && fits(farthest + 1)) {
        // In steps that double, from one anew.
        std::size_t step = 1;
        while (farthest + 2 * step <= last && fits(farthest + 2 * step)) step *= 2;
        farthest += step;
      }
      taken[choice] = farthest - held;
      if (farthest > farthest_before) farthest_turn = turn;
    }
    std::swap(turns.front(), turns[farthest_turn]);
    // Where layers are alike, a rank that cannot hold the next one cannot hold any; else it may
    // hold one that the ranks before it could.
    const std::size_t before = alike_inside_ ? held : static_cast<std::size_t>(s * stages);
    if (farthest < before + static_cast<std::size_t>(stages)) return false;
    held = farthest;
  }
  return false;
}

Seconds LayoutFloors::time_within_memory(const ParallelSpec& spec, std::span<const Recompute> choices, Seconds enough) {
  if (may_be_unlike()) return of_devices(spec.mesh.size()).time;
  const PipelineShape shape = shape_of(spec, training_);
  const LeastLayout least = least_layout(spec, choices);
  // Tables have all layers of a stage alike.
  if (spec.recompute_layers > 0) return least.time;
  const auto floor_of = [&](Seconds slowest) {
    const LeastWork work{.all = least.all, .slowest = std::max(slowest, least.slowest)};
    return std::max(least.time, least_of_slowest(row_of(spec.schedule), work, least.transfer, shape) * (1 - 1e-9));
  };
  // What the slowest stage takes at least for a micro-batch, in steps.
  const Seconds first = least.time / (shape.micro_batches + shape.stages);
  const Seconds step = (least.time / shape.micro_batches * 2.0 - first) / 64;
  if (can_hold(spec, choices, first)) return least.time;
  int below = 0, above = 64;
  const auto slowest = [&](int steps) { return first + steps * step; };
  if (floor_of(slowest(above)) >= enough) {
    const auto all = std::views::iota(1, above);
    const int steps = *std::ranges::partition_point(all, [&](int n) { return floor_of(slowest(n)) < enough; });
    (can_hold(spec, choices, slowest(steps)) ? above : below) = steps;
    if (below == steps) return floor_of(slowest(steps));
  }
  while (above - below > 1) {
    const int middle = std::midpoint(below, above);
    (can_hold(spec, choices, slowest(middle)) ? above : below) = middle;
  }
  return floor_of(slowest(below));
}

Bytes LayoutFloors::memory_of(const ParallelSpec& spec, std::span<const Recompute> choices, Bytes least) {
  // On heterogeneous devices the fullest is not always the one that needs the most.
  if (cluster_.groups.size() > 1 || may_be_unlike()) return least;
  constexpr std::size_t most_kept = 4096;
  if (memories_.size() >= most_kept) memories_.clear();
  ParallelSpec key = spec;
  key.mesh.order = {};
  const auto [entry, inserted] = memories_.try_emplace({std::move(key), choices.size()}, least);
  if (!inserted) return std::max(entry->second, least);
  if (can_hold(spec, choices, {}, least)) return least;
  Bytes enough = std::max(2 * least, Bytes(1));
  for (; !can_hold(spec, choices, {}, enough); enough = 2 * enough) least = enough;
  for (int halvings = 0; halvings < 10; ++halvings) {
    const Bytes middle = least + Bytes((enough - least).count / 2);
    (can_hold(spec, choices, {}, middle) ? enough : least) = middle;
  }
  return entry->second = least;
}

}  // namespace parplan
