#include "planner/simulator/timeline.h"

#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "planner/graph/op.h"

namespace parplan {

std::string instruction_title(const Segment& segment, const Instruction& instruction) {
  std::string title = segment.name;
  const char* what = instruction.kind == InstructionKind::kernel ? name(instruction.op) : name(instruction.kind);
  title += ": ";
  if (!instruction.name.empty()) {
    title += instruction.name;
    title += ' ';
  }
  return title + what;
}

std::string write_trace(const Timeline& timeline) {
  using nlohmann::ordered_json;
  ordered_json events = ordered_json::array();
  std::set<int> stages;
  std::set<std::pair<int, Stream>> streams;
  for (const TimelineEvent& event : timeline.events) {
    stages.insert(event.stage);
    streams.insert({event.stage, event.stream});
  }
  for (const int stage : stages)
    events.push_back({{"name", "process_name"}, {"ph", "M"}, {"pid", stage}, {"tid", 0},
                      {"args", {{"name", "stage " + std::to_string(stage)}}}});
  for (const auto& [stage, stream] : streams)
    events.push_back({{"name", "thread_name"}, {"ph", "M"}, {"pid", stage}, {"tid", static_cast<int>(stream)},
                      {"args", {{"name", name(stream)}}}});
  for (const TimelineEvent& event : timeline.events) {
    // Times are microseconds in this format.
    ordered_json row = {{"name", event.name},
                        {"cat", name(event.label)},
                        {"ph", "X"},
                        {"pid", event.stage},
                        {"tid", static_cast<int>(event.stream)},
                        {"ts", event.start.value * 1e6},
                        {"dur", (event.end - event.start).value * 1e6}};
    if (event.micro_batch >= 0) row["args"] = {{"micro_batch", event.micro_batch}};
    events.push_back(std::move(row));
  }
  const ordered_json trace = {{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}};
  return trace.dump();
}

}  // namespace parplan
