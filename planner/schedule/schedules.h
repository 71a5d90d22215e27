#pragma once

#include <span>
#include <string_view>

#include "planner/plan/parallel_spec.h"
#include "planner/plan/played_time.h"
#include "planner/plan/schedule.h"

namespace parplan {

// One pipeline schedule. A new one is a file and a row here; a test loops over the rows.
struct ScheduleRow {
  ScheduleKind kind{};
  std::string_view name;
  // What every stage does in one step, expanded.
  Schedule (*actions)(int stages, int micro_batches) = nullptr;
  // Time of a step's pipeline from the time of one micro-batch's forward and backward on each
  // stage, and of the transfer (either way) between each stage and the next, one fewer: never above
  // what the schedule takes, and equal to it for equal stages with transfers that take no time. May
  // be left out: then `actions` are played, which takes longer than a formula.
  Seconds (*closed_form)(std::span<const Seconds> forward, std::span<const Seconds> backward,
                         std::span<const Seconds> transfer, int micro_batches) = nullptr;
  // Micro-batches whose activations `stage` holds at its worst.
  int (*in_flight)(int stage, int stages, int micro_batches) = nullptr;
};

std::span<const ScheduleRow> schedule_rows();
const ScheduleRow& row_of(ScheduleKind kind);
// What the estimate takes of a row.
ScheduleForms forms_of(const ScheduleRow& row);
// What every stage of a layout does in one step of a training: its schedule's actions for its
// stages and micro-batches.
Schedule schedule_of(const ParallelSpec& spec, const TrainingSpec& training);

}  // namespace parplan
