#include "planner/plan/layout.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

DataShards data_shards(const BlockLayout& layout) {
  return data_shards(layout.placements, layout.degree.dp * layout.degree.cp);
}

const TensorLayout& Layout::entering(int block) const {
  return of_block(std::max(block - 1, 0)).placements.residual;
}

int Layout::stage_of_block(int block) const {
  const auto stage = std::ranges::upper_bound(stages, block, {}, &BlockRange::last);
  PARPLAN_ASSERT(stage != stages.end(), fmt::format("block {} lies on no stage", block));
  return static_cast<int>(stage - stages.begin());
}

GatherUnit gather_unit(const Layout& layout, int block, GatherUnit wanted) {
  const DataShards shards = data_shards(layout.of_block(block));
  return shards.parameters && shards.gradients && shards.optimizer ? wanted : GatherUnit::block;
}

StateHomes state_homes(const ParallelSpec& spec) {
  return state_homes(spec.offload);
}

BlockLayout block_layout(const ParallelSpec& spec, const Placements& placements, Recompute recompute) {
  BlockLayout layout{.placements = placements,
                     .degree = spec.mesh.degree,
                     .micro_batch = spec.micro_batch,
                     .recompute = recompute,
                     .cp_method = spec.cp_method,
                     .cp_ulysses = spec.mesh.cp_ulysses,
                     .dp_method = spec.dp_method,
                     .tp_overlap = spec.tp_overlap,
                     .saved = spec.offload.activations};
  layout.degree.pp = 1;
  return layout;
}

namespace {

// The end of a stage's first `number` layers; of the stage, where that are all.
int end_of_layers(BlockRange stage, int number, int blocks) {
  const int first_layer = std::max(stage.first, 1), layers = std::min(stage.last, blocks - 1) - first_layer;
  return number == 0 || number >= layers ? stage.last : first_layer + number;
}

}  // namespace

int first_kept_block(BlockRange stage, const StageRecompute& recompute, int blocks) {
  return end_of_layers(stage, recompute.layers, blocks);
}

int first_block_on_device(BlockRange stage, const ParallelSpec& spec, int blocks) {
  return end_of_layers(stage, spec.offload_layers, blocks);
}

Layout lay_out(const ParallelSpec& spec, const Placements& placements) {
  Layout layout{.mesh = spec.mesh,
                .stages = {},
                .layouts = {},
                .layout_of_block = {},
                .tied_gradients = spec.tied_gradients,
                .input_slots = spec.input_slots,
                .replica_micro_batches = spec.replica_micro_batches,
                .prefetch_depth = spec.prefetch_depth,
                .gather_unit = spec.gather_unit};
  const auto lay_out_until = [&](int end, Recompute recompute, Home saved) {
    if (static_cast<std::size_t>(end) <= layout.layout_of_block.size()) return;
    BlockLayout block = block_layout(spec, placements, recompute);
    block.saved = saved;
    auto known = std::ranges::find(layout.layouts, block);
    if (known == layout.layouts.end()) known = layout.layouts.insert(known, block);
    layout.layout_of_block.resize(static_cast<std::size_t>(end), static_cast<int>(known - layout.layouts.begin()));
  };
  const int blocks = std::accumulate(spec.stage_blocks.begin(), spec.stage_blocks.end(), 0);
  int first = 0;
  for (std::size_t stage = 0; stage < spec.stage_blocks.size(); ++stage) {
    layout.stages.push_back({first, first + spec.stage_blocks[stage]});
    first = layout.stages.back().last;
    const StageRecompute recompute = spec.recompute_of(static_cast<int>(stage));
    const int kept = first_kept_block(layout.stages.back(), recompute, blocks);
    const int on_device = first_block_on_device(layout.stages.back(), spec, blocks);
    lay_out_until(std::min(kept, on_device), recompute.rule, spec.offload.activations);
    lay_out_until(kept, recompute.rule, Home::device);
    lay_out_until(on_device, Recompute::none, spec.offload.activations);
    lay_out_until(first, Recompute::none, Home::device);
  }
  return layout;
}

std::int64_t micro_batches(const Layout& layout, const TrainingSpec& training, int replica) {
  if (!layout.replica_micro_batches.empty()) return layout.replica_micro_batches[replica];
  return training.global_batch / (layout.mesh.batch_ranks() * layout.layouts.front().micro_batch);
}

std::int64_t micro_batches(const Layout& layout, const TrainingSpec& training) {
  if (!layout.replica_micro_batches.empty()) return std::ranges::max(layout.replica_micro_batches);
  return micro_batches(layout, training, 0);
}

std::int64_t first_sample(const Layout& layout, const TrainingSpec& training, int replica) {
  const std::int64_t micro_batch = layout.layouts.front().micro_batch;
  if (layout.replica_micro_batches.empty()) return replica * micro_batch * micro_batches(layout, training, replica);
  const auto first = layout.replica_micro_batches.begin();
  return micro_batch * std::accumulate(first, first + replica, std::int64_t{0});
}

}  // namespace parplan
