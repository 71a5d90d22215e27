#include "planner/parallel/zero.h"

#include <algorithm>

#include <fmt/format.h>

#include "planner/parallel/techniques.h"

namespace parplan {

namespace {

// Muon orthogonalizes whole matrices, in the place of their gradients, which have to be there.
constexpr int most_zero_of_muon = 1;

}  // namespace

std::vector<int> legal_zero_stages(const OpGraph& /*graph*/, const TrainingSpec& training, const ParallelSpec& spec,
                                   int most) {
  std::vector<int> stages = {0};
  const Engine& engine = training.engine;
  if (training.optimizer == Optimizer::muon) most = std::min(most, most_zero_of_muon);
  const int highest = spec.pp() > 1 ? std::min(engine.most_zero, engine.most_zero_in_pipelines) : engine.most_zero;
  for (int stage = 1; stage <= highest && stage <= most && spec.replicas() > 1; ++stage) stages.push_back(stage);
  return stages;
}

std::optional<std::string> illegal_zero(const OpGraph& /*graph*/, const TrainingSpec& training,
                                        const ParallelSpec& spec) {
  if (spec.zero_stage < 0 || spec.zero_stage > 3)
    return fmt::format("there is no ZeRO stage {}; legal stages: 0, 1, 2, 3", spec.zero_stage);
  if (spec.zero_stage > 0 && spec.replicas() == 1)
    return fmt::format("ZeRO stage {} shards over data-parallel ranks, and there is 1 (dp 1); legal stages: 0",
                       spec.zero_stage);
  if (spec.zero_stage > most_zero_of_muon && training.optimizer == Optimizer::muon)
    return fmt::format(
        "optimizer muon orthogonalizes whole matrices, of whose gradients ZeRO stage {} leaves a rank a "
        "shard; legal stages: 0, 1, or another optimizer",
        spec.zero_stage);
  if (spec.prefetch_depth < 0) return fmt::format("prefetch_depth is {}; it must be at least 0", spec.prefetch_depth);
  if (spec.prefetch_depth != ParallelSpec{}.prefetch_depth && !brings_parameters(spec))
    return fmt::format(
        "prefetch_depth {} says how many blocks ahead parameters are gathered, and none are; it goes with zero_stage 3 "
        "or an offload of parameters",
        spec.prefetch_depth);
  if (spec.gather_unit != ParallelSpec{}.gather_unit && !gathers_parameters(spec))
    return fmt::format(
        "gather_unit {} says which parameters one collective gathers, and none does; it goes with zero_stage 3",
        name(spec.gather_unit));
  if (spec.mesh.dp_shard == 0) return std::nullopt;
  if (spec.zero_stage == 0)
    return fmt::format("dp_shard {} says over how many ranks ZeRO shards, and zero_stage is 0: nothing is sharded",
                       spec.mesh.dp_shard);
  const int ranks = spec.mesh.dp_shard;
  if (ranks <= 1 || ranks >= spec.replicas() || spec.replicas() % ranks != 0) {
    std::vector<std::int64_t> legal = divisors(spec.replicas());
    std::erase_if(legal, [&](std::int64_t size) { return size == 1 || size == spec.replicas(); });
    return fmt::format("groups of {} ranks that shard (dp_shard) cannot divide {} data-parallel ranks; legal sizes: {}",
                       spec.mesh.dp_shard, spec.replicas(), list_degrees(legal));
  }
  return std::nullopt;
}

void place_zero(const OpGraph& /*graph*/, const ParallelSpec& spec, Placements& placements) {
  if (spec.zero_stage >= 1) placements.state.optimizer.dp = flat_shard();
  if (spec.zero_stage >= 2) placements.state.gradients.dp = flat_shard();
  if (spec.zero_stage >= 3) placements.state.parameters.dp = flat_shard();
}

}  // namespace parplan
