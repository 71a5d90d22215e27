#pragma once

#include <span>

#include "planner/base/units.h"
#include "planner/plan/schedule.h"

namespace parplan {

// When the last action of a schedule ends, if each action starts as soon as its rank is free and
// its input has arrived, and each transfer as soon as its link is free in that direction. Times are
// per micro-batch: one for each stage, and for transfers (in either direction) one between each
// stage and the next, so one fewer; stages on the same rank transfer nothing. Since nothing waits
// for an exchange buffer, and longer parts never make the whole shorter, the result is a lower
// bound where every part is one.
Seconds played_time(const Schedule& schedule, std::span<const Seconds> forward, std::span<const Seconds> backward,
                    std::span<const Seconds> transfer);

// A schedule as the estimate uses it: its row of planner/schedule, which the caller looked up.
struct ScheduleForms {
  // The closed form of the time; without one, the actions are played.
  Seconds (*closed_form)(std::span<const Seconds> forward, std::span<const Seconds> backward,
                         std::span<const Seconds> transfer, const PipelineShape& shape) = nullptr;
  int (*in_flight)(int rank, const PipelineShape& shape) = nullptr;
  Schedule (*actions)(const PipelineShape& shape) = nullptr;
};
// A lower bound of the time of a step's pipeline.
Seconds pipeline_time(const ScheduleForms& schedule, std::span<const Seconds> forward,
                      std::span<const Seconds> backward, std::span<const Seconds> transfer, const PipelineShape& shape);

}  // namespace parplan
