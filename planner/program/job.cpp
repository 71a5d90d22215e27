#include "planner/program/job.h"

#include <utility>

#include "planner/cluster/cluster.h"
#include "planner/cluster/communicators.h"
#include "planner/cluster/mesh.h"
#include "planner/plan/ring_axes.h"
#include "planner/program/bucket_work.h"

namespace parplan {

Job job_of(const OpGraph& graph, const Cluster& cluster, TrainingSpec training, const ParallelSpec& spec,
           const Placements& placements, Schedule schedule) {
  return {.graph = &graph,
          .training = std::move(training),
          .layout = lay_out(spec, placements),
          .schedule = std::move(schedule),
          .backend = cluster.backend(),
          .overhead = memory_overhead(cluster, training.engine, spec.mesh, ring_axes(spec))};
}

BlockContext block_context(const BlockLayout& layout, const TensorLayout& entering, const Coordinates& at,
                           const TrainingSpec& training, BackendKind backend, bool fuse) {
  Coordinates in_block;
  for (const Axis axis : block_axes) in_block[axis] = at[axis];
  // All replicas of a master are alike.
  if (layout.dp_method == DataMethod::master) in_block.dp = at.dp > 0 ? 1 : 0;
  // Weights are cast apart as their shards are gathered.
  const bool casts_gathered = training.engine.casts_weights_apart && data_shards(layout).parameters;
  return {
      .layout = layout,
      .entering = entering,
      .at = in_block,
      .precision = training.precision,
      .fp8 = !training.fp8                    ? Fp8Casts::none
             : training.engine.fp8_casts_once ? (training.engine.transposes_weights ? Fp8Casts::once_transposed
                                                                                     : Fp8Casts::once)
             : casts_gathered                 ? Fp8Casts::but_weights
                                              : Fp8Casts::each_product,
      .slices_share_casts = !is_own(training.engine),
      .backend = backend,
      .loss_weight = 1.0 / (static_cast<double>(training.global_batch) * static_cast<double>(training.sequence_length)),
      .fusions = {.norms = fuse && training.engine.fused_norm, .activations = fuse && training.engine.fused_activation},
      .bucket_alignment = bucket_alignment(training),
      .orthogonalizes = training.optimizer == Optimizer::muon,
      .leaves_half = leaves_half_gradients(training),
      .sums_half = is_half(gradient_type(training)),
      .repeats_all = training.engine.repeats_layers,
      .keeps_unread = training.engine.keeps_unread_products,
      .master_computes_loss = training.engine.master_computes_loss,
      .attends_in_steps = training.engine.attends_in_steps,
      .steps_wait = training.engine.attends_in_steps && !training.engine.overlaps_tensor,
      .copies_rows = training.engine.copies_rows && !training.fp8};
}

GatherUnit gather_unit(const Job& job, int block) {
  const bool by_parameter = job.training.engine.lists_shards;
  return gather_unit(job.layout, block, by_parameter ? GatherUnit::parameter : job.layout.gather_unit);
}

BlockContext block_context(const Job& job, int block, const Coordinates& at) {
  BlockContext context =
      block_context(job.layout.of_block(block), job.layout.entering(block), at, job.training, job.backend, job.fuse);
  context.loss_weight =
      1.0 / (static_cast<double>(job.training.global_batch) * static_cast<double>(targets_of_sample(*job.graph)));
  // Each parameter is shared out by itself.
  if (gather_unit(job, block) == GatherUnit::parameter)
    context.bucket_alignment *= job.layout.mesh.shard_ranks();
  return context;
}

}  // namespace parplan
