#include "planner/simulator/step_bound.h"

#include <algorithm>
#include <limits>

namespace parplan {

// A rank carries out its stages one after another: their work, their communication over the data
// axis, their norms, their updates and the gathers of these add up. Reductions follow the last
// backward of one of them. Those of the rank's first k stages also follow the beginning of the last
// micro-batch's backward on the k-th, after which the rank runs that backward, and the last group
// of micro-batches backward through the stages before the k-th. Schedules in the shape of a V have
// no such order.
StepBound bound_of_ranks(BoundedStages& stages, bool goes_back, bool on_host) {
  const PipelineShape& shape = stages.shape;
  stages.ranks.assign(static_cast<std::size_t>(shape.ranks), {});
  const int remainder = shape.micro_batches % shape.group;
  const int last_group = shape.stages == shape.ranks ? 1 : remainder > 0 ? remainder : shape.group;
  StepBound step;
  for (int s = 0; s < shape.stages; ++s) {
    const StageBound& bound = stages.bounds[s];
    RankBound& rank = stages.ranks[stages.rank_of_stage[s]];
    if (!rank.before) {
      rank.before = stages.before[s];
      rank.behind = bound.behind;
      rank.copied = bound.copied;
    }
    const Seconds both = std::max(bound.forward + bound.backward, bound.occupied);
    rank.busy += static_cast<double>(shape.micro_batches) * both;
    rank.behind = std::min(rank.behind, bound.behind);
    rank.copied = std::min(rank.copied, bound.copied);
    rank.reduces += bound.reduces;
    const Seconds last = bound.weights > Seconds(0.0) ? bound.weights : both - bound.forward;
    if (!goes_back) rank.behind_all = std::max(rank.behind_all, rank.reduces - rank.backwards - last);
    rank.backwards += last_group * (both - bound.forward);
    const bool is_first = s < shape.ranks || goes_back;
    if (is_first) rank.later_norms_follow = bound.later_norms_follow;
    if (is_first || rank.later_norms_follow) rank.norms += bound.norms;
    rank.updates += bound.updates;
    rank.regathers += bound.regathers;
    rank.returns += bound.returns;
    rank.data += bound.data;
    rank.out += static_cast<double>(shape.micro_batches) * bound.out + bound.other_out;
    rank.back += static_cast<double>(shape.micro_batches) * bound.back + bound.other_back;
    rank.finish = std::max(rank.finish, bound.finish);
    rank.drives = std::max(rank.drives, bound.drives);
    rank.reads += static_cast<double>(shape.micro_batches) * bound.reads;
    rank.writes += static_cast<double>(shape.micro_batches) * bound.writes;
    rank.update_reads += bound.update_reads;
    rank.update_writes += bound.update_writes;
    if (stages.rank_of_stage[s] == stages.rank_of_stage.front()) step.parts += bound.parts;
  }
  for (const RankBound& rank : stages.ranks) {
    step.synchronised =
        std::max(step.synchronised, *rank.before + rank.busy + std::max(rank.behind, rank.behind_all) + rank.norms);
    const Seconds finish = std::max({rank.finish, rank.updates, rank.regathers, rank.returns});
    step.finish = std::max(step.finish, finish);
    // The host may update while others compute.
    const Seconds follows = on_host ? rank.regathers : finish;
    step.ended = std::max(step.ended, *rank.before + rank.busy +
                                          std::max(std::max(rank.behind, rank.behind_all) + rank.regathers, follows));
    if (stages.first_back == 0 && &rank == &stages.ranks[stages.rank_of_stage.front()]) {
      step.regathers = rank.regathers;
      step.first_finish = follows;
    }
    step.updated = std::max(step.updated, *rank.before + rank.busy + rank.copied + finish);
    step.data = std::max(step.data, rank.data);
    // Each way one after another.
    step.drives =
        std::max({step.drives, rank.drives, rank.reads + rank.update_reads, rank.writes + rank.update_writes});
    step.copies = std::max(step.copies, *rank.before + std::max(rank.out, rank.back));
  }
  return step;
}

// The latest end of a rank's actions with the reductions that follow them, and the norm's own part
// (without a norm: its update).
Seconds end_of_ranks(const BoundedStages& stages, const Schedule& schedule, bool in_parts, bool norm,
                     Seconds follows_first) {
  const std::vector<PlayedEnd> ends =
      played_ends(schedule, stages.forward, stages.backward, stages.transfer, stages.weights, stages.first_back,
                  stages.reductions);
  Seconds latest;
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    // The last action is of one of the rank's stages: with backwards in two parts, of any.
    const int last = schedule.ranks[rank].back().stage;
    Seconds behind(std::numeric_limits<double>::infinity());
    const Seconds norms = stages.ranks[rank].norms;
    for (int s = 0; s < schedule.stages(); ++s) {
      if (stages.rank_of_stage[s] != static_cast<int>(rank)) continue;
      const StageBound& bound = stages.bounds[s];
      if (!in_parts && s != last) continue;
      behind = std::min(behind, norm ? bound.behind
                                     : std::max(bound.behind + stages.ranks[rank].regathers, bound.finish_behind));
    }
    // A backward that reductions slow hides as much more of them.
    Seconds follows = std::max(behind - ends[rank].slowed, Seconds(0.0)) + (norm ? norms : Seconds(0.0));
    if (!in_parts && last == 0) follows = std::max(follows, follows_first);
    latest = std::max(latest, ends[rank].time + follows);
  }
  return latest;
}

// The latest end of a stage's last backward, on the way through it, with what follows it. That of
// the first stage is the pipeline's end.
Seconds end_of_stages(const BoundedStages& stages, const ScheduleForms& schedule, Seconds ends_first,
                      const std::function<Seconds(const StageBound&)>& follows) {
  const PipelineShape& shape = stages.shape;
  Seconds latest = ends_first + follows(stages.bounds.front());
  if (schedule.through_stage == nullptr || shape.stages != shape.ranks) return latest;
  Seconds all, before, back;  // of the stages before: both ways, and back alone
  for (int s = 0; s < shape.stages; ++s) all += stages.forward[s] + stages.backward[s];
  for (const Seconds transfer : stages.transfer) all += 2.0 * transfer;
  for (int s = 1; s < shape.stages; ++s) {
    before += stages.forward[s - 1] + stages.backward[s - 1] + 2.0 * stages.transfer[s - 1];
    back += stages.backward[s - 1] + stages.transfer[s - 1];
    // The way through any stage is no longer than the pipeline. A slow transfer between stages
    // before this one delays the end of the step, but not this stage's last backward: none is
    // counted.
    if (ends_first - back + follows(stages.bounds[s]) <= latest) continue;
    const StagePath path{.stage = s,
                         .forward = stages.forward[s],
                         .backward = stages.backward[s],
                         .before = before,
                         .after = all - before - stages.forward[s] - stages.backward[s],
                         .round_trip = all - before,
                         .slowest_transfer = {}};
    latest = std::max(latest, time_through_stage(schedule, path, shape) - back + follows(stages.bounds[s]));
  }
  return latest;
}

}  // namespace parplan
