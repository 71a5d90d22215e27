#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/base/units.h"
#include "planner/plan/schedule.h"
#include "planner/simulator/timeline.h"

namespace parplan {

// What a rank of the pipeline, of one replica, computes from `start` to `end`, with the collectives
// in between: an action of the schedule, or the update at the end of the step.
struct ChartSpan {
  int rank = 0;
  std::optional<Action> action;
  Seconds start;
  Seconds end;
  std::optional<int> replica = {};  // TimelineEvent
  bool operator==(const ChartSpan&) const = default;
};
// By rank, then by time. Transfers between stages and communication over the data axis have none.
std::vector<ChartSpan> chart_spans(const Timeline& timeline);

// The grid of ranks x time as text of at most `width` columns, with a line that explains it. A
// column of the grid takes as long as the shortest mean forward of a stage, and shows what the rank
// does in its middle; of a step that is too long, its beginning and its end are drawn.
std::string draw_schedule(const std::vector<ChartSpan>& spans, int width);
// The same to scale, all of it, as an SVG image.
std::string draw_schedule_svg(const std::vector<ChartSpan>& spans);

}  // namespace parplan
