#include "planner/search/layout_floors.h"

#include <algorithm>
#include <map>
#include <utility>

#include "planner/plan/unlike_replicas.h"
#include "planner/schedule/schedules.h"
#include "planner/search/replica_shares.h"

// How fast layouts are at most whose replicas have unlike numbers of micro-batches.

namespace parplan {

// As CandidateMaker::balanced.
bool LayoutFloors::may_be_unlike(const ParallelSpec& spec) const {
  if (may_be_unlike()) return true;
  return balances_ && spec.dp() > 1 && (spec.zero_stage <= 1 || spec.mesh.dp_shard > 0) && !is_v_shaped(spec.schedule);
}

bool LayoutFloors::may_be_unlike_in_order(const ParallelSpec& spec) {
  return may_be_unlike() || (may_be_unlike(spec) && replica_kinds(spec.mesh).size() > 1);
}

const std::vector<LayoutFloors::ReplicaKind>& LayoutFloors::replica_kinds(const DeviceMesh& mesh) {
  const auto [entry, inserted] = replica_kinds_.try_emplace(mesh);
  std::vector<ReplicaKind>& kinds = entry->second;
  if (!inserted) return kinds;
  std::map<int, std::size_t> places;  // by the first replica of each kind
  const std::vector<int> firsts = kinds_of_replicas(cluster_, mesh);
  for (const int first : firsts) {
    const auto [place, is_new] = places.try_emplace(first, kinds.size());
    if (is_new) {
      ReplicaKind& kind = kinds.emplace_back();
      kind.first = first;
      for (int stage = 0; stage < mesh.degree_of(Axis::pp); ++stage) {
        const NetworkCache::StageDevice* const device = &maker_.estimator().networks().device(mesh, stage, first);
        const auto same = std::ranges::find_if(kind.stages, [&](const auto& one) { return one.device == device; });
        if (same == kind.stages.end())
          kind.stages.push_back({.device = device, .first = stage});
        else
          ++same->count;
      }
    }
    ++kinds[place->second].replicas;
  }
  return kinds;
}

std::vector<Seconds> LayoutFloors::least_on(const ParallelSpec& spec, const ReplicaKind& kind,
                                            const ReplicaKind::StagesOn& stages, std::span<const Recompute> choices) {
  if (choices.empty()) return least_seconds(spec, *stages.device);
  const Placements& placements = maker_.placements_of(spec);
  std::vector<Seconds> least(blocks_.size(), infinite);
  const auto take = [&](Recompute recompute) {
    take_least(maker_.estimator().kind_seconds(spec, placements, stages.first, recompute, kind.first), least);
  };
  for (const Recompute recompute : choices) take(recompute);
  if (spec.recompute_layers > 0) take(Recompute::none);
  return least;
}

// A replica of kind k with n_k micro-batches takes at least t_k(n_k), the least time of a pipeline
// whose blocks take what they take on the fastest of its devices, and whose slowest rank takes no
// less than all ranks together would, each with the blocks that suit it. The step takes as long as
// the slowest replica, at least what that is with the best numbers.
Seconds LayoutFloors::time_of_unlike(const ParallelSpec& spec, std::span<const Recompute> choices) {
  const bool has_schedule = !choices.empty();
  const std::vector<ReplicaKind>& kinds = replica_kinds(spec.mesh);
  const PipelineShape shape = shape_of(spec, training_);
  std::vector<LeastWork> works;
  double speed = 0.0;  // micro-batches a second, of all replicas
  for (const ReplicaKind& kind : kinds) {
    std::vector<std::vector<Seconds>> stages;
    for (const ReplicaKind::StagesOn& on : kind.stages)
      stages.insert(stages.end(), static_cast<std::size_t>(on.count), least_on(spec, kind, on, choices));
    auto [work, speeds, transfer] = least_of(stages, shape.ranks);
    work.slowest = std::max(work.slowest, work.all / speeds);
    works.push_back(work);
    speed += kind.replicas / work.slowest.value;
  }
  const int unit = has_schedule && spec.schedule == ScheduleKind::interleaved ? shape.group : 1;
  const int alike = shape.micro_batches;
  const Seconds at_full_speed(static_cast<double>(spec.dp()) * alike / speed * (1 - 1e-9));
  if (!has_schedule || shape.ranks == 1 || alike % unit != 0) return at_full_speed;
  std::vector<int> of_replicas;  // their kinds
  for (std::size_t kind = 0; kind < kinds.size(); ++kind)
    of_replicas.insert(of_replicas.end(), static_cast<std::size_t>(kinds[kind].replicas), static_cast<int>(kind));
  const ScheduleForms forms = forms_of(row_of(spec.schedule));
  const auto time = [&](int kind, int units) {
    PipelineShape own = shape;
    own.micro_batches = unit * units;
    const LeastWork& work = works[static_cast<std::size_t>(kind)];
    return least_pipeline_time(forms, work.all, work.all, work.slowest, own);
  };
  const std::vector<int> shares = balanced_shares(of_replicas, spec.dp() * (alike / unit), time);
  Seconds longest;
  for (std::size_t replica = 0; replica < shares.size(); ++replica)
    longest = std::max(longest, time(of_replicas[replica], shares[replica]));
  return std::max(at_full_speed, longest * (1 - 1e-9));
}

}  // namespace parplan
