#pragma once

#include <span>
#include <vector>

#include "planner/base/units.h"
#include "planner/plan/schedule.h"

namespace parplan {

// What slows a backward of a stage beside reductions of its rank's stages, which these begin in
// their last backward. All forwards of the rank are over by then.
struct Slowing {
  Seconds throughout;  // how much longer it takes where they are in flight all the while
  // Where they are so for x of the time, at least `share` (x - `kept`) is lost; `kept` is the time
  // without kernels.
  Seconds kept;
  double share = 0.0;
  // At least so much longer where they are in flight for `beside` of its `duration`.
  Seconds of(Seconds beside, Seconds duration) const;
  bool operator==(const Slowing&) const = default;
};
struct StageReductions {
  Seconds all;      // so long are its reductions in flight
  Seconds left;     // of these, what is left at least when its last backward ends
  Seconds own;      // what its last backward takes longer beside the first of them
  Slowing backward;
  Seconds sends_back;  // how much longer a transfer to the stage before takes beside them throughout
  bool operator==(const StageReductions&) const = default;
};

// When the last action of a schedule ends, if each action starts as soon as its rank is free and
// its input has arrived, and each transfer as soon as its link is free in that direction. Times are
// per micro-batch: one for each stage, and for transfers (in either direction) one between each
// stage and the next, so one fewer; stages on the same rank transfer nothing. `weights`: the part
// of a stage's backward that backward_weights is, where stages run it apart. Since nothing waits
// for an exchange buffer, and longer parts never make the whole shorter, the result is a lower
// bound where every part is one, and what reductions make a part take longer is no more than they
// do. Stages before `first_back` have no backward, and wait for none.
// `reductions`: by stage, with backwards that are whole; none slow anything where it is empty.
Seconds played_time(const Schedule& schedule, std::span<const Seconds> forward, std::span<const Seconds> backward,
                    std::span<const Seconds> transfer, std::span<const Seconds> weights = {}, int first_back = 0,
                    std::span<const StageReductions> reductions = {});
// The same for each rank.
struct PlayedEnd {
  Seconds time;    // when its own last action ends
  Seconds slowed;  // what reductions make that action take longer
  bool operator==(const PlayedEnd&) const = default;
};
std::vector<PlayedEnd> played_ends(const Schedule& schedule, std::span<const Seconds> forward,
                                 std::span<const Seconds> backward, std::span<const Seconds> transfer,
                                 std::span<const Seconds> weights, int first_back = 0,
                                 std::span<const StageReductions> reductions = {});

// One stage of a pipeline and the way to it, in times of one micro-batch.
struct StagePath {
  int stage = 0;
  Seconds forward, backward;
  // The forwards, backwards and transfers in both directions of the stages before it, of those
  // after it, and of the latter with the stage itself.
  Seconds before, after, round_trip;
  Seconds slowest_transfer;  // of the pipeline
};

// A schedule as the estimate uses it: its row of planner/schedule, which the caller looked up.
struct ScheduleForms {
  // The closed form of the time; without one, the actions are played.
  Seconds (*closed_form)(std::span<const Seconds> forward, std::span<const Seconds> backward,
                         std::span<const Seconds> transfer, const PipelineShape& shape) = nullptr;
  // The time that one stage alone makes a step's pipeline take, at least; it never falls when a
  // part of the path takes longer, or when work moves from other stages to this one. May be
  // omitted.
  Seconds (*through_stage)(const StagePath& path, const PipelineShape& shape) = nullptr;
  // The least time of a pipeline whose stages and transfers take `total` for a micro-batch, stages
  // alone `computing`, and the slowest stage at least `slowest`. May be omitted.
  Seconds (*least_time)(Seconds total, Seconds computing, Seconds slowest, const PipelineShape& shape) = nullptr;
  int (*in_flight)(int rank, const PipelineShape& shape) = nullptr;
  // The same for the last stage alone, where its rank holds others.
  int (*last_stage_in_flight)(const PipelineShape& shape) = nullptr;
  // With backwards in two parts: the slots for weight gradients.
  SlotsForWeights (*for_weights)(int rank, const PipelineShape& shape) = nullptr;
  Schedule (*actions)(const PipelineShape& shape) = nullptr;
};
// The same without its closed form: a bound plays the schedule's actions.
inline ScheduleForms as_played(ScheduleForms forms) {
  forms.closed_form = nullptr;
  return forms;
}
// A lower bound of the time of a step's pipeline.
Seconds pipeline_time(const ScheduleForms& schedule, std::span<const Seconds> forward,
                      std::span<const Seconds> backward, std::span<const Seconds> transfer, const PipelineShape& shape);

// Lower bounds of the same where a stage or less is known; without a form, the stage's own work.
Seconds time_through_stage(const ScheduleForms& schedule, const StagePath& path, const PipelineShape& shape);
Seconds least_pipeline_time(const ScheduleForms& schedule, Seconds total, Seconds computing, Seconds slowest,
                            const PipelineShape& shape);

}  // namespace parplan
