#include "planner/simulator/schedule_chart.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <string_view>
#include <tuple>

#include <fmt/format.h>

namespace parplan {
namespace {

bool is_drawn(const TimelineEvent& event) {
  return event.stream == Stream::compute || event.stream == Stream::tp || event.stream == Stream::cp ||
         event.stream == Stream::ep || event.stream == Stream::ring_receive;
}

// Facts of all spans that both drawings use.
struct Chart {
  int ranks = 0;
  bool has_several_stages = false;  // on a rank
  std::vector<std::string> names;   // of ranks: "stage 1", "rank 0", "replica 2 stage 1"
  Seconds end;
  Seconds forward;  // the shortest mean forward of a stage; of any span where there is no forward
};

Chart chart_of(const std::vector<ChartSpan>& spans) {
  Chart chart;
  std::map<int, int> stage_of_rank;
  std::map<int, std::optional<int>> replica_of_rank;
  struct Forwards {
    Seconds sum;
    int count = 0;
  };
  std::map<std::pair<int, int>, Forwards> forwards;  // by rank and stage
  Seconds shortest(std::numeric_limits<double>::infinity());
  for (const ChartSpan& span : spans) {
    chart.ranks = std::max(chart.ranks, span.rank + 1);
    chart.end = std::max(chart.end, span.end);
    replica_of_rank[span.rank] = span.replica;
    if (span.end > span.start) shortest = std::min(shortest, span.end - span.start);
    if (!span.action) continue;
    const int known = stage_of_rank.try_emplace(span.rank, span.action->stage).first->second;
    chart.has_several_stages = chart.has_several_stages || known != span.action->stage;
    if (span.action->phase != Phase::forward) continue;
    Forwards& of_stage = forwards[{span.rank, span.action->stage}];
    of_stage.sum += span.end - span.start;
    ++of_stage.count;
  }
  chart.forward = Seconds(std::numeric_limits<double>::infinity());
  for (const auto& [place, of_stage] : forwards)
    if (of_stage.sum > Seconds(0.0)) chart.forward = std::min(chart.forward, of_stage.sum / of_stage.count);
  chart.forward = std::min(chart.forward, forwards.empty() ? shortest : chart.forward);
  int of_replica = 0;  // ranks so far
  for (int rank = 0; rank < chart.ranks; ++rank) {
    const std::optional<int> replica = replica_of_rank[rank];
    of_replica = rank > 0 && replica == replica_of_rank[rank - 1] ? of_replica + 1 : 0;
    const char* const unit = chart.has_several_stages ? "rank" : "stage";
    chart.names.push_back(replica ? fmt::format("replica {} {} {}", *replica, unit, of_replica)
                                  : fmt::format("{} {}", unit, rank));
  }
  return chart;
}

// "F", "B", "W", "U".
const char* kind_of(const ChartSpan& span) {
  if (!span.action) return "U";
  if (span.action->phase == Phase::backward_weights) return "W";
  return span.action->phase == Phase::forward ? "F" : "B";
}

// "F0", "2F0" where ranks hold several stages, "U".
std::string text_of(const ChartSpan& span, const Chart& chart) {
  if (!span.action) return "U";
  const std::string action = fmt::format("{}{}", kind_of(span), span.action->micro_batch);
  return chart.has_several_stages ? fmt::format("{}{}", span.action->stage, action) : action;
}

bool has_weights(const std::vector<ChartSpan>& spans) {
  return std::ranges::any_of(spans, [](const ChartSpan& span) { return kind_of(span) == std::string_view("W"); });
}

}  // namespace

std::vector<ChartSpan> chart_spans(const Timeline& timeline) {
  using Key = std::tuple<int, bool, int, Phase, int>;
  std::map<Key, ChartSpan> spans;
  std::set<int> begun;  // ranks
  for (const TimelineEvent& event : timeline.events) {
    const bool is_action = event.stage && event.phase && event.micro_batch;
    // The update comes after the actions; what is cleared before them is no part of the schedule.
    if (is_action) begun.insert(event.rank);
    if (!is_drawn(event) || (!is_action && (event.label != Label::optimizer || !begun.contains(event.rank)))) continue;
    const Key key = is_action ? Key{event.rank, true, *event.stage, *event.phase, *event.micro_batch}
                              : Key{event.rank, false, 0, Phase::forward, 0};
    const auto [entry, inserted] = spans.try_emplace(key);
    ChartSpan& span = entry->second;
    if (inserted) {
      span = {.rank = event.rank, .action = {}, .start = event.start, .end = event.end, .replica = event.replica};
      if (is_action) span.action = Action{*event.stage, *event.phase, *event.micro_batch};
    }
    span.start = std::min(span.start, event.start);
    span.end = std::max(span.end, event.end);
  }
  std::vector<ChartSpan> all;
  for (const auto& [key, span] : spans) all.push_back(span);
  std::ranges::stable_sort(all, {}, [](const ChartSpan& span) { return std::pair(span.rank, span.start); });
  return all;
}

std::string draw_schedule(const std::vector<ChartSpan>& spans, int width) {
  const Chart chart = chart_of(spans);
  if (spans.empty() || !(chart.end > Seconds(0.0))) return "the schedule has no action\n";
  std::size_t cell = 1;
  for (const ChartSpan& span : spans) cell = std::max(cell, text_of(span, chart).size());
  std::size_t longest = 0;
  for (const std::string& name : chart.names) longest = std::max(longest, name.size());
  const auto columns = static_cast<std::int64_t>(std::ceil(chart.end / chart.forward - 1e-6));
  const std::string gap = "  ...";
  const std::int64_t room = std::max<std::int64_t>(
      (width - static_cast<std::int64_t>(longest + gap.size())) / static_cast<std::int64_t>(cell + 1), 2);
  const std::int64_t left = columns <= room ? columns : (room + 1) / 2, right = columns <= room ? 0 : room / 2;

  std::string text;
  std::vector<char> is_shown(spans.size(), 0);
  for (int rank = 0; rank < chart.ranks; ++rank) {
    std::string line = fmt::format("{:{}}", chart.names[static_cast<std::size_t>(rank)], longest);
    const auto begin = std::ranges::lower_bound(spans, rank, {}, &ChartSpan::rank);
    const auto end = std::ranges::upper_bound(spans, rank, {}, &ChartSpan::rank);
    auto span = begin;
    const ChartSpan* before = nullptr;
    const auto draw = [&](std::int64_t column) {
      const Seconds middle = (static_cast<double>(column) + 0.5) * chart.forward;
      while (span != end && span->end <= middle) ++span;
      const ChartSpan* const now = span != end && span->start <= middle ? &*span : nullptr;
      if (now != nullptr) is_shown[static_cast<std::size_t>(now - spans.data())] = 1;
      const std::string own = now == nullptr ? "." : now == before ? std::string(cell, '-') : text_of(*now, chart);
      line += fmt::format(" {:>{}}", own, cell);
      before = now;
    };
    for (std::int64_t column = 0; column < left; ++column) draw(column);
    if (right > 0) line += gap;
    before = nullptr;
    for (std::int64_t column = columns - right; column < columns; ++column) draw(column);
    text += line + "\n";
  }
  text += fmt::format("a column is {}: {}, U update, - goes on, . idle", format_duration(chart.forward),
                      fmt::format("{}{}",
                                  chart.has_several_stages ? "2F0 forward of micro-batch 0 on stage 2, 2B0 its backward"
                                                           : "F0 forward of micro-batch 0, B0 its backward",
                                  has_weights(spans) ? fmt::format(" without the weight gradients that follow as {}W0",
                                                                   chart.has_several_stages ? "2" : "")
                                                     : ""));
  const std::ptrdiff_t hidden = std::ranges::count(is_shown, 0);
  if (right > 0)
    text += fmt::format("; {} columns in the middle are left out", columns - left - right);
  else if (hidden > 0)
    text += fmt::format("; {} too short for a column do not show", hidden);
  return text + "\n";
}

std::string draw_schedule_svg(const std::vector<ChartSpan>& spans) {
  const Chart chart = chart_of(spans);
  constexpr double drawn = 1400.0, row = 26.0, bar = 22.0, head = 34.0;
  const double margin = !spans.empty() && spans.front().replica ? 136.0 : 64.0;  // for the names of ranks
  const double height = head + row * chart.ranks + 30.0;
  const double scale = chart.end > Seconds(0.0) ? drawn / chart.end.value : 0.0;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
      "font-family=\"sans-serif\" font-size=\"11\">\n"
      "<style>.F{{fill:#8ab4f8}}.B{{fill:#81c995}}{2}.U{{fill:#fdd663}}rect{{stroke:#fff;stroke-width:0.5}}</style>\n",
      margin + drawn + 16.0, height, has_weights(spans) ? ".W{fill:#c58af9}" : "");
  double at = margin;
  for (const auto& [kind, word] :
       {std::pair("F", "forward"), std::pair("B", "backward"), std::pair("W", "weights"), std::pair("U", "update")}) {
    if (kind == std::string_view("W") && !has_weights(spans)) continue;
    svg += fmt::format(
        "<rect class=\"{}\" x=\"{:.0f}\" y=\"8\" width=\"12\" height=\"12\"/>"
        "<text x=\"{:.0f}\" y=\"18\">{}</text>\n",
        kind, at, at + 17.0, word);
    at += 90.0;
  }
  for (int rank = 0; rank < chart.ranks; ++rank)
    svg += fmt::format("<text x=\"4\" y=\"{:.1f}\">{}</text>\n", head + row * rank + 15.0,
                       chart.names[static_cast<std::size_t>(rank)]);
  for (const ChartSpan& span : spans) {
    const std::string text = text_of(span, chart);
    const double x = margin + span.start.value * scale, wide = (span.end - span.start).value * scale;
    const char* const kind = kind_of(span);
    svg += fmt::format(
        "<rect class=\"{}\" x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.0f}\"><title>{} from {} to {}"
        "</title></rect>\n",
        kind, x, head + row * span.rank, wide, bar, text, format_duration(span.start), format_duration(span.end));
    if (wide >= 7.0 * static_cast<double>(text.size()))
      svg += fmt::format("<text x=\"{:.2f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>\n", x + wide / 2.0,
                         head + row * span.rank + 15.0, text);
  }
  const double axis = head + row * chart.ranks + 14.0;
  svg += fmt::format(
      "<text x=\"{:.0f}\" y=\"{:.1f}\">0</text>\n<text x=\"{:.0f}\" y=\"{:.1f}\" text-anchor=\"end\">{}"
      "</text>\n</svg>\n",
      margin, axis, margin + drawn, axis, format_duration(chart.end));
  return svg;
}

}  // namespace parplan
