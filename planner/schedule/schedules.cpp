#include "planner/schedule/schedules.h"

#include <array>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/schedule/dualpipe_v.h"
#include "planner/schedule/gpipe.h"
#include "planner/schedule/interleaved.h"
#include "planner/schedule/one_f_one_b.h"
#include "planner/schedule/v_shaped.h"
#include "planner/schedule/zero_bubble.h"
#include "planner/schedule/zero_bubble_v.h"

namespace parplan {
namespace {

int every_second(const PipelineShape&) { return 2; }

constexpr std::array rows = {
    ScheduleRow{.kind = ScheduleKind::gpipe,
                .name = "gpipe",
                .actions = gpipe_actions,
                .closed_form = gpipe_time,
                .through_stage = gpipe_through_stage,
                .least_time = gpipe_least_time,
                .least = least_gpipe_time,
                .in_flight = gpipe_in_flight,
                .last_stage_in_flight = nullptr,
                .for_weights = nullptr,
                .period = every_second},
    ScheduleRow{.kind = ScheduleKind::one_f_one_b,
                .name = "1f1b",
                .actions = one_f_one_b_actions,
                .closed_form = one_f_one_b_time,
                .through_stage = one_f_one_b_through_stage,
                .least_time = one_f_one_b_least_time,
                .least = least_one_f_one_b_time,
                .in_flight = one_f_one_b_in_flight,
                .last_stage_in_flight = nullptr,
                .for_weights = nullptr,
                .period = every_second},
    // What one of a rank's stages does says little of the rank.
    ScheduleRow{.kind = ScheduleKind::interleaved,
                .name = "interleaved",
                .actions = interleaved_actions,
                .closed_form = interleaved_time,
                .through_stage = nullptr,
                .least_time = interleaved_least_time,
                .least = least_interleaved_time,
                .in_flight = interleaved_in_flight,
                .last_stage_in_flight = interleaved_last_stage_in_flight,
                .for_weights = nullptr,
                .period = interleaved_period},
    ScheduleRow{.kind = ScheduleKind::zero_bubble_h1,
                .name = "zero_bubble_h1",
                .actions = zero_bubble_h1_actions,
                .closed_form = nullptr,
                .through_stage = nullptr,
                .least_time = zero_bubble_h1_least_time,
                .least = least_zero_bubble_h1_time,
                .in_flight = zero_bubble_h1_in_flight,
                .last_stage_in_flight = nullptr,
                .for_weights = zero_bubble_h1_for_weights,
                .period = every_second},
    ScheduleRow{.kind = ScheduleKind::zero_bubble_v,
                .name = "zero_bubble_v",
                .actions = zero_bubble_v_actions,
                .closed_form = nullptr,
                .through_stage = nullptr,
                .least_time = v_shaped_least_time,
                .least = least_v_shaped_time,
                .in_flight = zero_bubble_v_in_flight,
                .last_stage_in_flight = zero_bubble_v_last_stage_in_flight,
                .for_weights = zero_bubble_v_for_weights,
                .period = every_second},
    ScheduleRow{.kind = ScheduleKind::dualpipe_v,
                .name = "dualpipe_v",
                .actions = dualpipe_v_actions,
                .closed_form = nullptr,
                .through_stage = nullptr,
                .least_time = v_shaped_least_time,
                .least = least_v_shaped_time,
                .in_flight = dualpipe_v_in_flight,
                .last_stage_in_flight = dualpipe_v_last_stage_in_flight,
                .for_weights = dualpipe_v_for_weights,
                .period = every_second},
};

}  // namespace

std::span<const ScheduleRow> schedule_rows() { return rows; }

const ScheduleRow& row_of(ScheduleKind kind) {
  for (const ScheduleRow& row : rows)
    if (row.kind == kind) return row;
  assertion_failed("every schedule has a row", __FILE__, __LINE__, fmt::format("schedule {}", static_cast<int>(kind)));
}

ScheduleForms forms_of(const ScheduleRow& row) {
  return {.closed_form = row.closed_form,
          .through_stage = row.through_stage,
          .least_time = row.least_time,
          .in_flight = row.in_flight,
          .last_stage_in_flight = row.last_stage_in_flight,
          .for_weights = row.for_weights,
          .actions = row.actions};
}

Schedule schedule_of(const ParallelSpec& spec, const TrainingSpec& training) {
  return row_of(spec.schedule).actions(shape_of(spec, training));
}

}  // namespace parplan
