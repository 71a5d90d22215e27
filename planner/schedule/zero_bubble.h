#pragma once

#include "planner/base/units.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/schedule.h"

namespace parplan {

// ZB-H1 (Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.2), in the
// order of the authors' patch of Megatron-LM (sail-sg/zero-bubble-pipeline-parallelism): 1F1B with
// backwards in two parts, where stage s of p runs the weight gradients of a micro-batch s
// micro-batches after the gradients of its inputs. Every stage so holds p micro-batches at most,
// between the forward and the weight gradients, as many as the first stage of 1F1B. Nobody waits
// for gradients from the first stage, which runs whole backwards.
//
// Where f, b and w are the times of a stage's forward and of the two parts of its backward, equal
// stages without transfers and at least p micro-batches have a bubble of (p - 1)(f + max(b - w,
// 0)), instead of 1F1B's (p - 1)(f + b + w).
Schedule zero_bubble_h1_actions(const PipelineShape& shape);
Seconds zero_bubble_h1_least_time(Seconds total, Seconds computing, Seconds slowest, const PipelineShape& shape);
// The least time of the pipeline, however stages are cut; see schedules.h.
Seconds least_zero_bubble_h1_time(Seconds all, Seconds transfer, const PipelineShape& shape);
int zero_bubble_h1_in_flight(int rank, const PipelineShape& shape);
SlotsForWeights zero_bubble_h1_for_weights(int rank, const PipelineShape& shape);

}  // namespace parplan
