#include "planner/simulator/timeline.h"

#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "planner/graph/op_kind.h"

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

namespace {

// "stage 1"; "rank 0: stages 0, 2" where the rank holds several; "rank 0" where no event says; with
// unlike replicas "replica 2, stage 1".
std::string process_name(int rank, const std::set<int>& stages, std::optional<int> replica) {
  if (replica) return fmt::format("replica {}, {}", *replica, process_name(rank, stages, {}));
  if (stages.empty()) return fmt::format("rank {}", rank);
  if (stages.size() == 1) return fmt::format("stage {}", *stages.begin());
  return fmt::format("rank {}: stages {}", rank, fmt::join(stages, ", "));
}

}  // namespace

std::string write_trace(const Timeline& timeline) {
  using nlohmann::ordered_json;
  ordered_json events = ordered_json::array();
  std::map<int, std::set<int>> stages;  // by rank
  std::map<int, std::optional<int>> replicas;  // likewise
  std::set<std::pair<int, Stream>> streams;
  for (const TimelineEvent& event : timeline.events) {
    std::set<int>& held = stages[event.rank];
    if (event.stage) held.insert(*event.stage);
    replicas[event.rank] = event.replica;
    streams.insert({event.rank, event.stream});
  }
  for (const auto& [rank, held] : stages)
    events.push_back({{"name", "process_name"},
                      {"ph", "M"},
                      {"pid", rank},
                      {"tid", 0},
                      {"args", {{"name", process_name(rank, held, replicas[rank])}}}});
  for (const auto& [rank, stream] : streams)
    events.push_back({{"name", "thread_name"}, {"ph", "M"}, {"pid", rank}, {"tid", static_cast<int>(stream)},
                      {"args", {{"name", name(stream)}}}});
  for (const TimelineEvent& event : timeline.events) {
    // Times are microseconds in this format.
    ordered_json row = {{"name", event.name},
                        {"cat", name(event.label)},
                        {"ph", "X"},
                        {"pid", event.rank},
                        {"tid", static_cast<int>(event.stream)},
                        {"ts", event.start.value * 1e6},
                        {"dur", (event.end - event.start).value * 1e6}};
    if (event.micro_batch) row["args"] = {{"micro_batch", *event.micro_batch}};
    if (event.stage && stages[event.rank].size() > 1) row["args"]["stage"] = *event.stage;
    events.push_back(std::move(row));
  }
  const ordered_json trace = {{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}};
  return trace.dump();
}

}  // namespace parplan
