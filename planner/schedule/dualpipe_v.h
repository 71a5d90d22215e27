#pragma once

#include "planner/plan/schedule.h"

namespace parplan {

// DualPipeV, in the order of DeepSeek's dualpipe/dualpipev.py (github.com/deepseek-ai/DualPipe),
// which is DualPipe (DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.2.1) cut in half:
// between the forwards that fill the pipeline and the backwards that empty it, each rank pairs a
// forward of one stage with a backward of its other one. Backwards are whole there, and have two
// parts where the pipeline fills and empties. DeepSeek runs the kernels of a pair interleaved, so
// that the communication between experts of one hides behind the other; here one follows the other.
// At least 2 p micro-batches.
//
// Every rank holds the activations of 2 p + 1 micro-batches of one of its stages. Where f, b and w,
// the times of a forward and of the two parts of a backward, are equal, p ranks with equal stages
// and without transfers wait for p - 1 forwards of a stage.
Schedule dualpipe_v_actions(const PipelineShape& shape);
int dualpipe_v_in_flight(int rank, const PipelineShape& shape);
int dualpipe_v_last_stage_in_flight(const PipelineShape& shape);
SlotsForWeights dualpipe_v_for_weights(int rank, const PipelineShape& shape);

}  // namespace parplan
