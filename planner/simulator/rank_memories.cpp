#include "planner/simulator/rank_memories.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "planner/cluster/communicators.h"
#include "planner/program/activation_slots.h"
#include "planner/program/workspace.h"
#include "planner/simulator/estimate_sizes.h"

namespace parplan {

RankMemories::RankMemories(const OpGraph& graph, const ModelBlocks& blocks, const TrainingSpec& training,
                           MeshViews& views, KnownBlockCosts& costs, KnownDataCosts& data)
    : graph_(graph),
      blocks_(blocks),
      training_(training),
      views_(views),
      costs_(costs),
      data_(data),
      step_scratch_(step_scratch_bytes(training, graph, views.cluster().backend()).count),
      least_memory_(rank_memory({.buckets = {}, .saved = {}, .scratch_bytes = step_scratch_}, training).peak()) {}

Bytes RankMemories::overhead_of(const ParallelSpec& spec) {
  const PerAxis<bool> rings = ring_axes(spec);
  if (!last_overhead_ || last_overhead_->mesh != spec.mesh || last_overhead_->rings != rings)
    last_overhead_ = {spec.mesh, rings, memory_overhead(views_.cluster(), training_.engine, spec.mesh, rings)};
  return last_overhead_->bytes;
}

std::int64_t RankMemories::on_device(const ParallelSpec& spec, std::size_t kind, std::int64_t saved) const {
  return costs_.home_of_saved(spec, kind) == Home::device ? saved_with_reserve(saved, training_) : 0;
}

KindBytes RankMemories::kind_bytes(const ParallelSpec& spec, const Placements& placements, Recompute recompute) {
  const MeshView& view = views_.of(spec.mesh);
  const BlockShapes& shapes = costs_.shapes(costs_.number_of(spec, placements, recompute, 0));
  KindBytes bytes{.state = data_.of(spec, placements, shapes, view, view.environments.front()).own_state,
                  .saved = {},
                  .libraries = overhead_of(spec).count};
  bytes.least_fixed = least_memory_.count + bytes.libraries;
  for (std::size_t kind = 0; kind < shapes.kinds.size(); ++kind)
    bytes.saved.push_back(on_device(spec, kind, shapes.kinds[kind].saved_bytes));
  return bytes;
}

BlockTable RankMemories::block_table(const ParallelSpec& spec, const Placements& placements, int stage,
                                  Recompute recompute, BlockTable room) {
  const int number = costs_.number_of(spec, placements, recompute, stage);
  const MeshView& view = views_.of(spec.mesh);
  const int environment = view.environments[stage];
  const BlockCosts& costs = costs_.of(number, environment);
  const BlockShapes& shapes = costs_.shapes(number);
  const DataCosts& data = data_.of(spec, placements, shapes, view, environment);
  // The part that does not grow with blocks is largest with all blocks on the stage, and so with
  // every use of the tied parameter.
  buckets_.clear();
  std::int64_t scratch = step_scratch_;
  std::int64_t crossing = 0, gradient = 0, staged = 0, staged_for_weights = 0;
  for (std::size_t k = 0; k < shapes.kinds.size(); ++k) {
    if (costs_.home_of_saved(spec, k) != Home::device) {
      staged = std::max(staged, shapes.kinds[k].saved_bytes);
      staged_for_weights = std::max(staged_for_weights, shapes.kinds[k].for_weights_bytes);
    }
    buckets_.push_back(own_bucket(shapes, k, spec, placements, training_));
    buckets_.back().of_layer = blocks_.is_layer_kind(k);
    if (shapes.frozen_elements[k].all > 0) buckets_.push_back(frozen_bucket(shapes, k, spec, placements, training_));
    scratch = std::max({scratch, shapes.kinds[k].forward.scratch_bytes, shapes.kinds[k].backward.scratch_bytes,
                        shapes.orthogonalization_scratch[k]});
    crossing = std::max(crossing, crossing_bytes(shapes.kinds[k]));
    gradient = std::max(gradient, shapes.kinds[k].gradient_bytes);
  }
  if (shapes.tied_elements.all > 0) buckets_.push_back(tied_bucket(shapes, spec, placements, training_, 2));
  const int exchanges = exchange_buffers(shape_of(spec, training_)) * (is_v_shaped(spec.schedule) ? 2 : 1);
  const MemoryUse all = rank_memory(
      {.buckets = buckets_,
       .saved = {},
       .staged_bytes = staged,
       .staged_for_weights_bytes = staged_for_weights,
       .in_file_bytes = spec.offload.activations == Home::nvme ? std::max(staged, staged_for_weights) : 0,
       .gradient_bytes = gradient,
       .sent_bytes = crossing,
       .scratch_bytes = scratch,
       .outputs = exchanges,
       .gradients = exchanges,
       .gathered = gathered_buffers(spec.prefetch_depth, training_.engine, blocks_.count()),
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
  const auto blocks = static_cast<std::size_t>(blocks_.count());
  table.seconds.resize(blocks + 1);
  table.state.resize(blocks + 1);
  table.saved.resize(blocks + 1);
  table.seconds.front() = Seconds(0.0);
  table.state.front() = table.saved.front() = 0;
  for (std::size_t run = 0, end = 0; run < blocks; run = end) {
    end = static_cast<std::size_t>(blocks_.run_end(static_cast<int>(run)));
    const std::size_t kind = blocks_.kind_of(static_cast<int>(run));
    const Seconds seconds = costs.forward_seconds[kind] + costs.backward_seconds[kind];
    const std::int64_t saved = on_device(spec, kind, shapes.kinds[kind].saved_bytes);
    for (std::size_t n = 1; n <= end - run; ++n) {
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
std::int64_t RankMemories::share_slots(const ParallelSpec& spec, std::span<const HeldStage> held) {
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
      const std::size_t kind = blocks_.kind_of(b);
      const LoweredBlock& lowered = costs_.shapes(stage.shapes.of_block(b)).kinds[kind];
      const bool input_apart = (inputs_lie_apart || stage.is_handed_its_input) && b > 0 && b == stage.blocks.first;
      (b >= stage.first_on_device || costs_.home_of_saved(spec, kind) == Home::device ? sizes_ : host_sizes_)
          .push_back(input_apart ? saved_bytes_without_input(lowered) : lowered.saved_bytes);
    }
    if (stage.blocks.last == blocks_.count()) {
      head = sizes_.back();
      sizes_.pop_back();
    }
    share(saved_, sizes_, Home::device);
    share(host_saved_, host_sizes_, spec.offload.activations);
  }
  saved_.insert(saved_.end(), host_saved_.begin(), host_saved_.end());
  return head;
}

// As make_buffers.cpp has it.
void RankMemories::share_slots_for_weights(const ParallelSpec& spec, std::span<const HeldStage> held) {
  for_weights_.clear();
  left_.clear();
  for (const Home home : all_homes) {
    const std::size_t begin = for_weights_.size();
    for (const HeldStage& stage : held) {
      sizes_for_weights_.clear();
      for (int b = stage.blocks.first; b < stage.blocks.last; ++b) {
        const std::size_t kind = blocks_.kind_of(b);
        const LoweredBlock& lowered = costs_.shapes(stage.shapes.of_block(b)).kinds[kind];
        if ((b < stage.first_on_device ? costs_.home_of_saved(spec, kind) : Home::device) == home)
          sizes_for_weights_.emplace_back(lowered.for_weights_bytes, lowered.left_bytes);
      }
      const auto both = [](const auto& block) { return block.first + block.second; };
      // Layers that are alike, as most are, need no sorting.
      if (!std::ranges::is_sorted(sizes_for_weights_, std::ranges::greater(), both))
        std::ranges::stable_sort(sizes_for_weights_, std::ranges::greater(), both);
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

SavedByStage RankMemories::saved_by(const ParallelSpec& spec, const HeldStage& stage) const {
  SavedByStage saved;
  for (int b = stage.blocks.first; b < stage.blocks.last; ++b) {
    const std::size_t kind = blocks_.kind_of(b);
    if (costs_.home_of_saved(spec, kind) == Home::device) continue;
    const LoweredBlock& lowered = costs_.shapes(stage.shapes.of_block(b)).kinds[kind];
    const bool input_apart =
        (spec.input_slots == InputSlots::one_more || stage.is_handed_its_input) && b > 0 && b == stage.blocks.first;
    const std::int64_t bytes = input_apart ? saved_bytes_without_input(lowered) : lowered.saved_bytes;
    if (b < stage.first_on_device) {
      saved.most_elsewhere = std::max(saved.most_elsewhere, bytes);
    } else {
      ++saved.on_device;
      saved.least_on_device = std::min(saved.least_on_device, bytes);
    }
  }
  return saved;
}

SlotsForWeights RankMemories::slots_of(const ScheduleForms& schedule, int rank, const PipelineShape& shape) {
  if (schedule.for_weights == nullptr) return {};
  const std::array<int, 4> numbers{shape.ranks, shape.stages, shape.micro_batches, shape.group};
  if (last_slots_.for_weights != schedule.for_weights || last_slots_.shape != numbers)
    last_slots_ = {.for_weights = schedule.for_weights,
                   .shape = numbers,
                   .of_rank = std::vector<std::optional<SlotsForWeights>>(static_cast<std::size_t>(shape.ranks))};
  std::optional<SlotsForWeights>& known = last_slots_.of_rank[static_cast<std::size_t>(rank)];
  if (!known) known = schedule.for_weights(rank, shape);
  return *known;
}

// Asked for one rank after the other.
const std::vector<int>& RankMemories::inputs_of_ranks(const ScheduleForms& schedule, const PipelineShape& shape,
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

MemoryUse RankMemories::of(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule,
                           int rank, std::span<const HeldStage> held) {
  buckets_.clear();
  frozen_.clear();
  saved_.clear();
  for_weights_.clear();
  left_.clear();
  std::int64_t scratch = step_scratch_;
  std::int64_t crossing = 0, gradient = 0;
  std::int64_t input = 0;
  std::int64_t staged = 0, staged_for_weights = 0, in_file = 0;
  int tied_uses = 0;
  const bool inputs_lie_apart = spec.input_slots == InputSlots::one_more;
  // Blocks [first, last) of a stage, all before its first on the device or none.
  const auto hold = [&](const HeldStage& stage, int first, int last) {
    if (first >= last) return;
    const int number = stage.shapes.of_block(first);
    const BlockShapes& shapes = costs_.shapes(number);
    for (std::size_t kind = 0; kind < shapes.kinds.size(); ++kind) {
      const int times = blocks_.of_kind(kind, {first, last});
      if (times == 0) continue;
      const LoweredBlock& block = shapes.kinds[kind];
      const Home home = first < stage.first_on_device ? costs_.home_of_saved(spec, kind) : Home::device;
      const bool first_apart = (inputs_lie_apart || stage.is_handed_its_input) && first > 0 &&
                               first == stage.blocks.first &&
                               blocks_.kind_of(first) == kind;
      saved_.push_back({.bytes = block.saved_bytes, .times = times - (first_apart ? 1 : 0), .home = home});
      for_weights_.push_back({.bytes = block.for_weights_bytes, .times = times, .home = home});
      left_.push_back({.bytes = block.left_bytes, .times = times});
      if (first_apart) {
        saved_.push_back({.bytes = saved_bytes_without_input(block), .times = 1, .home = home});
        input = std::max(input, block.input_bytes);
      }
      if (home != Home::device) staged_for_weights = std::max(staged_for_weights, block.for_weights_bytes);
      scratch = std::max(
          {scratch, scratch_of(block, costs_.also_runs_whole(number)), shapes.orthogonalization_scratch[kind]});
      crossing = std::max(crossing, crossing_bytes(block));
      gradient = std::max(gradient, block.gradient_bytes);
    }
  };
  int most_blocks = 0;  // of a stage
  for (const HeldStage& stage : held) {
    most_blocks = std::max(most_blocks, stage.blocks.size());
    const auto [first_change, second_change] = std::minmax(stage.shapes.first_kept, stage.first_on_device);
    hold(stage, stage.blocks.first, first_change);
    hold(stage, first_change, second_change);
    hold(stage, second_change, stage.blocks.last);
    if (spec.offload.activations != Home::device) {
      const SavedByStage saved = saved_by(spec, stage);
      if (!take_turns_with_others(saved)) staged = std::max(staged, saved.most_elsewhere);
      if (spec.offload.activations == Home::nvme)
        in_file = std::max({in_file, saved.most_elsewhere, staged_for_weights});
    }
    const BlockShapes& shapes = costs_.shapes(stage.shapes.shapes);
    for (std::size_t kind = 0; kind < shapes.kinds.size(); ++kind) {
      const int times = blocks_.of_kind(kind, stage.blocks);
      if (times == 0) continue;
      buckets_.push_back(own_bucket(shapes, kind, spec, placements, training_));
      buckets_.back().times = times;
      buckets_.back().of_layer = blocks_.is_layer_kind(kind);
      if (shapes.frozen_elements[kind].all > 0) {
        frozen_.push_back(frozen_bucket(shapes, kind, spec, placements, training_));
        frozen_.back().times = times;
      }
    }
    tied_uses += blocks_.tied_uses(stage.blocks);
  }
  const std::int64_t head = held.size() > 1 ? share_slots(spec, held) : 0;
  if (held.size() > 1) share_slots_for_weights(spec, held);
  if (tied_uses > 0)
    buckets_.push_back(tied_bucket(costs_.shapes(held.front().shapes.shapes), spec, placements, training_, tied_uses));
  buckets_.insert(buckets_.end(), frozen_.begin(), frozen_.end());
  const PipelineShape shape = shape_of(spec, micro_batches(spec, training_, views_.replica()));
  const bool holds_last = held.back().blocks.last == blocks_.count();
  const int in_flight = schedule.in_flight(rank, shape);
  const SlotsForWeights slots = slots_of(schedule, rank, shape);
  int heads = 0;
  if (held.size() > 1 && holds_last)
    heads = schedule.last_stage_in_flight != nullptr ? schedule.last_stage_in_flight(shape)
                                                     : most_in_flight_of_last_stage(schedule.actions(shape));
  int inputs = 0;
  if (input > 0)
    inputs = held.size() == 1 ? std::min(in_flight + 1, shape.micro_batches)
                              : inputs_of_ranks(schedule, shape, spec.input_slots)[static_cast<std::size_t>(rank)];
  // The rank's first stage, on the way down, may have no backward.
  const bool goes_back_down = held.front().blocks.last > graph_.first_trained;
  const ExchangeWays ways =
      exchange_ways(is_v_shaped(spec.schedule), rank, shape.ranks, goes_back_down ? 0 : shape.stages);
  std::int64_t freed = 0;
  if (shape.stages == 1) {
    const int last = held.front().blocks.last - 1;
    const std::size_t kind = blocks_.kind_of(last);
    if (last >= held.front().first_on_device || costs_.home_of_saved(spec, kind) == Home::device)
      freed = costs_.shapes(held.front().shapes.of_block(last)).kinds[kind].saved_bytes;
  }
  MemoryUse memory = rank_memory({.buckets = buckets_,
                                  .saved = saved_,
                                  .for_weights = for_weights_,
                                  .left = left_,
                                  .staged_bytes = staged,
                                  .staged_for_weights_bytes = staged_for_weights,
                                  .in_file_bytes = in_file,
                                  .gradient_bytes = gradient,
                                  .sent_bytes = holds_last && held.size() == 1 ? 0 : crossing,
                                  .scratch_bytes = scratch,
                                  .in_flight = in_flight,
                                  .head_bytes = head,
                                  .head_in_flight = heads,
                                  .last_saved_bytes = freed,
                                  .for_weights_in_flight = slots.saved,
                                  .left_in_flight = slots.left,
                                  .outputs = exchange_buffers(shape) * ways.outputs,
                                  .gradients = exchange_buffers(shape) * ways.gradients,
                                  .gathered = gathered_buffers(spec.prefetch_depth, training_.engine, most_blocks),
                                  .input_bytes = input,
                                  .inputs = inputs,
                                  .computes_loss = holds_last,
                                  .one_backward = shape.stages == 1 && shape.micro_batches == 1},
                                 training_);
  memory.overhead = overhead_of(spec);
  return memory;
}

}  // namespace parplan
