#pragma once

#include <span>

#include "planner/base/units.h"
#include "planner/plan/schedule.h"

namespace parplan {

// Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2), in the order of
// Megatron-LM's forward_backward_pipelining_with_interleaving (get_pp_rank_microbatches and
// get_schedule_table in megatron/core/pipeline_parallel/schedules.py). Each rank holds several
// stages, its chunks of the model. It runs a group of micro-batches through one chunk, then the
// same group through the next; a last group may be smaller. Rank r of p with v chunks and groups of
// g micro-batches runs 2 (p - 1 - r) + (v - 1) g forwards to warm up, then alternates one forward
// and one backward, then runs the remaining backwards, which take the chunks from the last to the
// first.
Schedule interleaved_actions(const PipelineShape& shape);
Seconds interleaved_time(std::span<const Seconds> forward, std::span<const Seconds> backward,
                         std::span<const Seconds> transfer, const PipelineShape& shape);
Seconds interleaved_least_time(Seconds total, Seconds computing, Seconds slowest, const PipelineShape& shape);
// The least time of the pipeline, however stages are cut; see schedules.h.
Seconds least_interleaved_time(Seconds all, Seconds transfer, const PipelineShape& shape);
int interleaved_in_flight(int rank, const PipelineShape& shape);
int interleaved_last_stage_in_flight(const PipelineShape& shape);
int interleaved_period(const PipelineShape& shape);

}  // namespace parplan
