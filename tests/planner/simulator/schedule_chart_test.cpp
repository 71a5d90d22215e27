#include "planner/simulator/schedule_chart.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "planner/schedule/schedules.h"

namespace parplan {
namespace {

// Equal stages whose forwards take a second and backwards two, or each part of one a second, as
// soon as they can run.
std::vector<ChartSpan> played(ScheduleKind kind, const PipelineShape& shape) {
  const Schedule schedule = row_of(kind).actions(shape);
  std::vector<std::size_t> next(schedule.ranks.size(), 0);
  std::vector<Seconds> free(schedule.ranks.size());
  std::vector<ChartSpan> spans;
  for (bool moved = true; std::exchange(moved, false);)
    for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      if (next[rank] == schedule.ranks[rank].size()) continue;
      const Action action = schedule.ranks[rank][next[rank]];
      const std::optional<Action> input = input_of(action, shape.stages);
      const auto before = std::ranges::find_if(spans, [&](const ChartSpan& span) {
        return input && span.action->stage == input->stage && span.action->micro_batch == input->micro_batch &&
               flow_of(span.action->phase) == flow_of(input->phase);
      });
      if (input && before == spans.end()) continue;
      const Seconds start = input ? std::max(free[rank], before->end) : free[rank];
      free[rank] = start + Seconds(action.phase == Phase::backward ? 2.0 : 1.0);
      spans.push_back({.rank = static_cast<int>(rank), .action = action, .start = start, .end = free[rank]});
      ++next[rank];
      moved = true;
    }
  std::ranges::stable_sort(spans, {}, [](const ChartSpan& span) { return std::pair(span.rank, span.start); });
  return spans;
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST_CASE("a schedule is drawn as a grid of ranks and time") {
  CHECK(draw_schedule(played(ScheduleKind::one_f_one_b, {2, 2}), 80) ==
        "stage 0 F0 F1  .  . B0 --  . B1 --\n"
        "stage 1  . F0 B0 -- F1 B1 --  .  .\n"
        "a column is 1.00 s: F0 forward of micro-batch 0, B0 its backward, U update, - goes on, . idle\n");
  CHECK(draw_schedule(played(ScheduleKind::interleaved, {2, 4, 2}), 80) ==
        "rank 0 0F0 0F1 2F0 2F1   .   . 2B0 ---   . 2B1 --- 0B0 --- 0B1 ---\n"
        "rank 1   . 1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1B0 --- 1B1 ---   .   .\n"
        "a column is 1.00 s: 2F0 forward of micro-batch 0 on stage 2, 2B0 its backward, U update, - goes on, . idle\n");
  // The bubble is p - 1 forwards.
  CHECK(draw_schedule(played(ScheduleKind::zero_bubble_h1, {3, 3}), 80) ==
        "stage 0 F0 F1 F2  .  . B0 -- B1 -- B2 --\n"
        "stage 1  . F0 F1  . B0 F2 B1 W0 B2 W1 W2\n"
        "stage 2  .  . F0 B0 F1 B1 F2 B2 W0 W1 W2\n"
        "a column is 1.00 s: F0 forward of micro-batch 0, B0 its backward without the weight gradients that follow as "
        "W0, U update, - goes on, . idle\n");
  // The first input is all that rank 1 waits for.
  CHECK(draw_schedule(played(ScheduleKind::zero_bubble_v, {2, 4, 3}), 90) ==
        "rank 0 0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 --- 3F2 3B2 3W2 0B1 --- 0B2 ---   .\n"
        "rank 1   . 1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1B1 2B2 1B2 1W1 2W2 1W2\n"
        "a column is 1.00 s: 2F0 forward of micro-batch 0 on stage 2, 2B0 its backward without the weight gradients "
        "that follow as 2W0, U update, - goes on, . idle\n");
  // A step that is too long for the line: its beginning and its end.
  CHECK(draw_schedule(played(ScheduleKind::gpipe, {2, 9}), 40) ==
        "stage 0 F0 F1 F2 F3 F4  ... B7 -- B8 --\n"
        "stage 1  . F0 F1 F2 F3  ... B8 --  .  .\n"
        "a column is 1.00 s: F0 forward of micro-batch 0, B0 its backward, U update, - goes on, . idle; "
        "21 columns in the middle are left out\n");
  CHECK(draw_schedule({}, 80) == "the schedule has no action\n");
}

TEST_CASE("a drawing to scale has a bar for each span, with its name and its times") {
  std::vector<ChartSpan> spans = played(ScheduleKind::one_f_one_b, {2, 2});
  spans.push_back({.rank = 1, .action = {}, .start = Seconds(8), .end = Seconds(9)});
  const std::string svg = draw_schedule_svg(spans);
  CHECK(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""));
  CHECK(svg.ends_with("</svg>\n"));
  CHECK(count(svg, "<title>") == spans.size());
  CHECK(count(svg, "<rect class=\"F\"") == 4 + 1);  // and the legend's
  CHECK(count(svg, "<rect class=\"B\"") == 4 + 1);
  CHECK(count(svg, "<rect class=\"U\"") == 1 + 1);
  CHECK(svg.find("<title>B1 from 7.00 s to 9.00 s</title>") != std::string::npos);
  CHECK(count(svg, "class=\"W\"") == 0);
  const std::string in_parts = draw_schedule_svg(played(ScheduleKind::zero_bubble_h1, {2, 2}));
  CHECK(count(in_parts, "<rect class=\"W\"") == 2 + 1);
  CHECK(in_parts.find(".W{fill:") != std::string::npos);
}

}  // namespace
}  // namespace parplan
