#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/base/units.h"
#include "planner/plan/schedule.h"
#include "planner/plan/step_result.h"
#include "planner/program/program.h"

namespace parplan {

// One instruction with its times, virtual or real.
struct TimelineEvent {
  int rank = 0;                    // along the pipeline, of one unlike replica after the other
  std::optional<int> stage;        // of the action that it is part of
  Stream stream{};
  std::string name;                // "layers.forward: attention.qkv linear"
  Label label{};
  std::optional<int> micro_batch;  // of the action that it is part of
  Seconds start;
  Seconds end;
  std::optional<Phase> phase = {};  // of the action that it is part of
  std::optional<int> replica = {};  // its coordinate on the data axis, where replicas do unlike work
  bool operator==(const TimelineEvent&) const = default;
};

struct Timeline {
  std::vector<TimelineEvent> events;  // by rank, then in launch order
  bool operator==(const Timeline&) const = default;
};

// "layers.forward: attention.qkv linear".
std::string instruction_title(const Segment& segment, const Instruction& instruction);

// Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open: one process per
// rank of the pipeline, named by the stages that it holds, and one thread per stream.
std::string write_trace(const Timeline& timeline);

}  // namespace parplan
