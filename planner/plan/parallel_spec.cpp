#include "planner/plan/parallel_spec.h"

#include <array>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

const char* name(ScheduleKind kind) {
  constexpr std::array<const char*, 6> names = {"gpipe",          "1f1b",          "interleaved",
                                                "zero_bubble_h1", "zero_bubble_v", "dualpipe_v"};
  const auto i = static_cast<std::size_t>(kind);
  PARPLAN_ASSERT(i < names.size(), fmt::format("schedule {}", i));
  return names[i];
}

const char* name(TiedGradients gradients) {
  return gradients == TiedGradients::together ? "together" : "apart";
}

const char* name(InputSlots slots) { return slots == InputSlots::in_flight ? "in_flight" : "in_flight+1"; }

const char* name(ContextMethod method) {
  constexpr std::array<const char*, std::size(context_methods)> names = {"all_gather", "ulysses", "ring"};
  const auto i = static_cast<std::size_t>(method);
  PARPLAN_ASSERT(i < names.size(), fmt::format("context method {}", i));
  return names[i];
}

const char* name(TensorOverlap overlap) { return overlap == TensorOverlap::none ? "none" : "ring"; }

const char* name(GatherUnit unit) {
  return unit == GatherUnit::block ? "block" : "parameter";
}

const char* name(DataMethod method) { return method == DataMethod::all_reduce ? "all_reduce" : "master"; }

int rank_of_stage(const ParallelSpec& spec, int stage) {
  return is_v_shaped(spec.schedule) ? v_rank(stage, spec.pp()) : stage % spec.pp();
}

std::vector<int> stages_of_rank(const ParallelSpec& spec, int rank) {
  std::vector<int> stages;
  for (int stage = 0; stage < spec.stages(); ++stage)
    if (rank_of_stage(spec, stage) == rank) stages.push_back(stage);
  return stages;
}

std::string stages_text(const ParallelSpec& spec) {
  if (spec.virtual_stages == 1) return fmt::format("pp is {}", spec.pp());
  return fmt::format("pp {} x virtual_stages {} is {}", spec.pp(), spec.virtual_stages, spec.stages());
}

bool gathers_parameters(const ParallelSpec& spec) {
  return spec.zero_stage == 3 && spec.replicas() > 1;
}

bool brings_parameters(const ParallelSpec& spec) {
  return gathers_parameters(spec) || spec.offload.parameters != Home::device;
}

namespace {

// A block depends on neither the stages and their schedule nor the place of its ranks in the mesh:
// the network that stands next to the key distinguishes what links cost.
ParallelSpec of_one_block(ParallelSpec spec) {
  const ParallelSpec one;
  spec.mesh.degree.pp = one.mesh.degree.pp;
  spec.mesh.order = one.mesh.order;
  spec.mesh.dp_shard = one.mesh.dp_shard;
  spec.replica_micro_batches.clear();
  spec.schedule = one.schedule;
  spec.recompute_layers = one.recompute_layers;
  spec.offload_layers = one.offload_layers;
  spec.stage_recompute.clear();
  spec.stage_blocks.clear();
  spec.virtual_stages = one.virtual_stages;
  spec.micro_batch_group = one.micro_batch_group;
  spec.tied_gradients = one.tied_gradients;
  spec.input_slots = one.input_slots;
  spec.prefetch_depth = one.prefetch_depth;
  spec.gather_unit = one.gather_unit;
  return spec;
}

}  // namespace

ParallelSpec placement_key(const ParallelSpec& spec) {
  const ParallelSpec one;
  ParallelSpec key = of_one_block(spec);
  // How many ranks share a shard does not move it: data_shards asks for their number.
  key.mesh.degree.dp = one.mesh.degree.dp;
  key.micro_batch = one.micro_batch;
  key.recompute = one.recompute;
  return key;
}

ParallelSpec block_key(const ParallelSpec& spec, Recompute recompute, const TrainingSpec& training) {
  const ParallelSpec one;
  ParallelSpec key = of_one_block(spec);
  // Data-parallel ranks do equal work on their own samples, but for a master, which computes the
  // loss of all; ZeRO works around blocks, not in them, but for who casts weights to fp8.
  if (spec.dp_method != DataMethod::master) key.mesh.degree.dp = one.mesh.degree.dp;
  const bool casts_gathered = training.fp8 && training.engine.casts_weights_apart && gathers_parameters(spec);
  key.zero_stage = casts_gathered ? spec.zero_stage : one.zero_stage;
  key.offload = one.offload;
  key.recompute = recompute;
  // What a block saves where, and what it does in its backward.
  if (runs_backward_in_parts(spec.schedule))
    key.schedule = also_runs_whole_backwards(spec.schedule) ? ScheduleKind::dualpipe_v : ScheduleKind::zero_bubble_h1;
  return key;
}

ParallelSpec bucket_key(const ParallelSpec& spec) {
  ParallelSpec key = placement_key(spec);
  key.mesh.degree.dp = spec.mesh.degree.dp;
  key.mesh.dp_shard = spec.mesh.dp_shard;
  key.tied_gradients = spec.tied_gradients;  // how many accumulators a rank has
  key.gather_unit = spec.gather_unit;
  return key;
}

Recompute recompute_of_every_layer(const ParallelSpec& spec) {
  return spec.recompute == Recompute::per_stage || spec.recompute_layers > 0 ? Recompute::none : spec.recompute;
}

ParallelSpec cut_key(const ParallelSpec& spec, const TrainingSpec& training) {
  ParallelSpec key = block_key(spec, recompute_of_every_layer(spec), training);
  key.mesh.degree.pp = spec.mesh.degree.pp;
  key.virtual_stages = spec.virtual_stages;
  return key;
}

ParallelSpec fitting_cut_key(const ParallelSpec& spec) {
  ParallelSpec key = spec;
  key.mesh.order = ParallelSpec().mesh.order;
  key.stage_recompute.clear();
  key.stage_blocks.clear();
  return key;
}

}  // namespace parplan
