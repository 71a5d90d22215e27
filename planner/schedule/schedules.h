#pragma once

#include <span>
#include <string_view>

#include "planner/plan/parallel_spec.h"
#include "planner/plan/pipeline_time.h"
#include "planner/plan/schedule.h"

namespace parplan {

// One pipeline schedule. A new one is a file and a row here; a test loops over the rows.
struct ScheduleRow {
  ScheduleKind kind{};
  std::string_view name;
  // The actions of every rank in one step.
  Schedule (*actions)(const PipelineShape& shape) = nullptr;
  // A lower bound of the time of a step's pipeline, from the time of one micro-batch's forward and
  // backward on each stage, and of the transfer (in either direction) between each stage and the
  // next (one fewer). It is exact for equal stages with transfers that take no time. May be
  // omitted: then `actions` are played, which takes longer than a formula.
  Seconds (*closed_form)(std::span<const Seconds> forward, std::span<const Seconds> backward,
                         std::span<const Seconds> transfer, const PipelineShape& shape) = nullptr;
  // The two bounds of planner/plan/pipeline_time.h for stages that are not all known; they are no
  // larger than `closed_form`. May be omitted.
  Seconds (*through_stage)(const StagePath& path, const PipelineShape& shape) = nullptr;
  Seconds (*least_time)(Seconds total, Seconds computing, Seconds slowest, const PipelineShape& shape) = nullptr;
  // The least time of the pipeline, however stages are cut: where the blocks of a micro-batch take
  // `all` together and each transfer at least `transfer`.
  Seconds (*least)(Seconds all, Seconds transfer, const PipelineShape& shape) = nullptr;
  // The largest number of micro-batches (of each stage on the rank) whose activations a rank holds
  // at once.
  int (*in_flight)(int rank, const PipelineShape& shape) = nullptr;
  // Where ranks hold several stages: that of the micro-batches of the last stage.
  int (*last_stage_in_flight)(const PipelineShape& shape) = nullptr;
  // With backwards in two parts: the slots for weight gradients.
  SlotsForWeights (*for_weights)(int rank, const PipelineShape& shape) = nullptr;
  // After this number of micro-batches the middle of a long step repeats itself: a multiple of two,
  // since buffers between ranks take turns by two (planner/simulator/steady_state.h).
  int (*period)(const PipelineShape& shape) = nullptr;
};

std::span<const ScheduleRow> schedule_rows();
const ScheduleRow& row_of(ScheduleKind kind);
// The parts of a row that the estimate uses.
ScheduleForms forms_of(const ScheduleRow& row);
// The actions of every stage of a layout in one step of a training: its schedule's for its stages
// and micro-batches.
Schedule schedule_of(const ParallelSpec& spec, const TrainingSpec& training);

}  // namespace parplan
