#pragma once

#include <span>

#include "planner/base/units.h"
#include "planner/plan/pipeline_time.h"
#include "planner/plan/schedule.h"

namespace parplan {

// 1F1B with a flush: PipeDream-Flush (Narayanan et al. 2021, arXiv:2006.09503), Megatron-LM's
// non-interleaved schedule (arXiv:2104.04473, section 2.2.1). Stage s of p runs min(p - 1 - s, M)
// forwards to warm up, then alternates one forward and one backward, then runs the remaining
// backwards.
Schedule one_f_one_b_actions(const PipelineShape& shape);
Seconds one_f_one_b_time(std::span<const Seconds> forward, std::span<const Seconds> backward,
                         std::span<const Seconds> transfer, const PipelineShape& shape);
Seconds one_f_one_b_through_stage(const StagePath& path, const PipelineShape& shape);
Seconds one_f_one_b_least_time(Seconds total, Seconds computing, Seconds slowest, const PipelineShape& shape);
Seconds least_one_f_one_b_time(Seconds all, Seconds transfer, const PipelineShape& shape);
int one_f_one_b_in_flight(int rank, const PipelineShape& shape);

}  // namespace parplan
