#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "planner/base/units.h"
#include "planner/plan/layout.h"
#include "planner/plan/pipeline_time.h"
#include "planner/plan/schedule.h"
#include "planner/plan/step_result.h"
#include "planner/simulator/stage_bound.h"

namespace parplan {

// The least times of a rank, over its stages.
struct RankBound {
  std::optional<Seconds> before;  // forwards and transfers of the stages before its first one
  Seconds busy;                   // with forwards and backwards, in a step
  Seconds behind;
  // Sums over the stages so far: reductions, and what the rank computes after the last
  // micro-batch's backward on the next of them ends.
  Seconds reduces, backwards;
  Seconds behind_all;  // the most by which reductions outlast the rest, over its stages
  Seconds norms, updates, regathers, returns, finish;
  bool later_norms_follow = true;
  Seconds drives;
  Seconds reads, writes, update_reads, update_writes;
  Seconds copied;
  Seconds data;
  Seconds out, back;  // copies to and from the host, in a step
};
// The least times of the slowest rank.
struct StepBound {
  // When all gradients are reduced, if only one rank mattered.
  Seconds synchronised;
  Seconds updated;  // when a rank has updated on its host, after copying its gradients there
  Seconds ended;    // when a rank has updated and gathered, where it awaits no norm
  // On the first stage's rank, where its backward is the last: gathers of updated parameters,
  // which follow its reductions, and all that follows the backward in any case.
  Seconds regathers, first_finish;
  Seconds finish;
  Seconds data;
  Seconds copies;  // when all copies to and from the host are done
  Seconds drives;  // when all reads and writes on NVMe are done, if a rank had nothing else to do
  StepTime parts;  // of a micro-batch on the first rank
};

// The stages of a step, as far as they are bounded. Vectors hold one value for each stage, in
// order; of transfers one for each stage but the last, between it and the next.
struct BoundedStages {
  PipelineShape shape{1, 1};
  std::vector<int> rank_of_stage;
  std::vector<BlockRange> ranges;
  std::vector<StageBound> bounds;
  std::vector<StageReductions> reductions;  // where they are known and actions are played; else empty
  std::vector<Seconds> before;              // forwards and transfers of the stages before it
  std::vector<Seconds> forward, backward, plain_forward, plain_backward, weights;  // of `bounds`
  std::vector<Seconds> transfer;
  std::vector<Seconds> on_nics;  // of transfers: what their bytes take on NICs
  std::vector<RankBound> ranks;  // by rank (bound_of_ranks)
  int first_back = 0;            // played_time
};

// `goes_back`: in the shape of a V; `on_host`: the host updates.
StepBound bound_of_ranks(BoundedStages& stages, bool goes_back, bool on_host);

// When all that ranks do before their gradients are known everywhere ends, from the step's first
// forward on: by playing the schedule's actions, and by its closed form. `norm`: ranks wait for a
// gradient norm, else they end with their updates. `follows_first`: what follows the first stage's
// last backward. `follows`: the same of any stage. `ends_first`: the end of the first stage's last
// backward.
Seconds end_of_ranks(const BoundedStages& stages, const Schedule& schedule, bool in_parts, bool norm,
                     Seconds follows_first);
Seconds end_of_stages(const BoundedStages& stages, const ScheduleForms& schedule, Seconds ends_first,
                      const std::function<Seconds(const StageBound&)>& follows);

}  // namespace parplan
