#pragma once

#include "planner/plan/schedule.h"

namespace parplan {

// ZB-V (Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 6, and Qi et
// al. 2024, Pipeline Parallelism with Controllable Memory, arXiv:2405.15362), in the order of
// PyTorch's ScheduleZBVZeroBubble (torch/distributed/pipelining/schedules.py). A stage on the way
// down and one on the way back take turns, each with a forward, the gradients of inputs and those
// of weights. Fewer than 2 p - 1 micro-batches run as the first of so many.
//
// Every rank holds the activations of at most p micro-batches of both its stages, as much as the
// first rank of 1F1B. Where f, b and w, the times of a forward and of the two parts of a backward,
// are equal, p ranks with equal stages, without transfers and with at least 2 p - 1 micro-batches
// wait for nothing but the first input: p - 1 forwards of a stage.
Schedule zero_bubble_v_actions(const PipelineShape& shape);
int zero_bubble_v_in_flight(int rank, const PipelineShape& shape);
int zero_bubble_v_last_stage_in_flight(const PipelineShape& shape);
SlotsForWeights zero_bubble_v_for_weights(int rank, const PipelineShape& shape);

}  // namespace parplan
