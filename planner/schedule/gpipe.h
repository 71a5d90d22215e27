#pragma once

#include <span>

#include "planner/base/units.h"
#include "planner/plan/pipeline_time.h"
#include "planner/plan/schedule.h"

namespace parplan {

// GPipe (Huang et al. 2019, arXiv:1811.06965, section 2.3): all forwards, then all backwards. The
// backwards, too, run in ascending order of micro-batches, so that gradients accumulate in the
// order in which one rank would accumulate them.
Schedule gpipe_actions(const PipelineShape& shape);
Seconds gpipe_time(std::span<const Seconds> forward, std::span<const Seconds> backward,
                   std::span<const Seconds> transfer, const PipelineShape& shape);
Seconds gpipe_through_stage(const StagePath& path, const PipelineShape& shape);
Seconds gpipe_least_time(Seconds total, Seconds computing, Seconds slowest, const PipelineShape& shape);
Seconds least_gpipe_time(Seconds all, Seconds transfer, const PipelineShape& shape);
int gpipe_in_flight(int rank, const PipelineShape& shape);

}  // namespace parplan
