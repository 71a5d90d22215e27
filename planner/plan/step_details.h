#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "planner/cluster/origin.h"
#include "planner/plan/step_result.h"

namespace parplan {

// One rank of the pipeline in a step, of one replica. Its time ends with its last work; for the
// rest of the step it waits for others.
struct RankResult {
  int pipeline_rank = 0;
  int replica = 0;  // its coordinate on the data axis
  StepTime time;
  MemoryUse memory;
  CommunicationVolume communication;
  TimeByOrigin kernels;                   // of all its kernels, each alone
  TimeByCommunicationOrigin collectives;  // of all its communication, each alone
  bool operator==(const RankResult&) const = default;
};

// Work on the critical path, of one rank, one Segment and one label. The path is
// what the end of the step waits for, followed backwards from the piece of work that ends last: to
// the piece whose end let it start, on whichever rank that is, until the beginning of the step.
// Each instant of the step is in exactly one piece of it.
struct CriticalWork {
  int rank = 0;           // its place in StepDetails::ranks
  std::string segment;    // "layers.forward", "data.reduce_scatter.gradients"
  Label label{};
  std::int64_t runs = 0;  // calls of the Segment on the path
  Seconds time;
  bool operator==(const CriticalWork&) const = default;
};

struct StepDetails {
  std::vector<RankResult> ranks;            // along the pipeline, of one unlike replica after the other
  std::vector<CriticalWork> critical_path;  // by rank, in the order of the rank's Segments; sums to the step
  bool operator==(const StepDetails&) const = default;
};

}  // namespace parplan
