#pragma once

#include <array>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "planner/cost/contention.h"
#include "planner/cost/cost_model.h"
#include "planner/program/program.h"
#include "planner/plan/attribution.h"

namespace parplan {

// An instruction with its cost, ready to be played many times.
struct CostedInstruction {
  Seconds duration;
  Seconds submitted;        // by the host, from the call's start on; nothing ends earlier than `duration` after it
  std::size_t stream = 0;   // Execution::stream_of
  EventIds waits;           // the instructions of the segment that it waits for
  Work work;
  Contention takes = {};    // from work beside it
  BoundTimes bound = {};    // its duration by what bounds it: what collectives beside it slow
};

// A Segment costed once. Pieces of it count from 0 at the call's start and have causes within the
// Segment.
struct CostedSegment {
  std::size_t stream = 0;
  unsigned streams = 0;     // all that it uses, as bits
  bool computes = false;    // holds a kernel
  std::vector<CostedInstruction> instructions;
  BoundTimes bound;         // work on its own stream by what bounds it
  // Played without waiting for partners:
  std::vector<Played> alone;
  std::optional<int> last;  // the instruction that ends last
  Seconds duration;
  StepTime parts;   // sums to `duration`; a communication at the end counts, since the stream joins it
  SplitTime split;  // the same, apart at the end of the last kernel
};
// Kernels beside collectives of the Segment are slowed (contention.h) by those that were launched
// before them, and take no less where the Segment is not alone.
CostedSegment cost_segment(const Segment& segment, const CostModel& model);
// The same with durations of another source, and without contention.
CostedSegment cost_segment(const Segment& segment, Execution execution, Seconds host_per_op,
                           const std::function<Seconds(const Instruction&)>& duration_of);

// Work that a collective is in flight beside.
struct InFlight {
  Seconds start, end;
  Contention takes;
  int call = 0;
};
// When work that takes `duration` alone, and is bound by what collectives take for `bound`, ends
// beside those that are in flight: between two of their ends it goes on evenly.
Seconds end_beside(std::span<const InFlight> in_flight, Seconds start, Seconds duration, const BoundTimes& bound);

}  // namespace parplan
