#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "planner/plan/step.h"

namespace parplan {

// One pipeline stage in a step. Its time ends with its last work; for the rest of the step it waits
// for others.
struct StageResult {
  StepTime time;
  MemoryUse memory;
  CommunicationVolume communication;
  bool operator==(const StageResult&) const = default;
};

// Work on the critical path, of one stage, one Segment and one label. The path is what the end of
// the step waits for, followed backwards from the piece of work that ends last: to the piece whose
// end let it start, on whichever stage that is, until the beginning of the step. Each instant of
// the step is in exactly one piece of it.
struct CriticalWork {
  int stage = 0;
  std::string segment;    // "layers.forward", "data.reduce_scatter.gradients"
  Label label{};
  std::int64_t runs = 0;  // calls of the Segment on the path
  Seconds time;
  bool operator==(const CriticalWork&) const = default;
};

struct StepDetails {
  std::vector<StageResult> stages;
  std::vector<CriticalWork> critical_path;  // by stage, in the order of the stage's Segments; sums to the step
  bool operator==(const StepDetails&) const = default;
};

}  // namespace parplan
