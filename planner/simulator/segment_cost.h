#pragma once

#include <array>
#include <functional>
#include <optional>
#include <vector>

#include "planner/cost/cost_model.h"
#include "planner/program/program.h"
#include "planner/plan/attribution.h"

namespace parplan {

// How a rank executes its streams.
enum class Execution {
  concurrent,  // streams run concurrently; both ends of a transfer block their stream until it is done
  sequential,  // one core does everything in launch order; sends are posted, the receiver copies (CPU ranks)
};
inline Execution execution_of(const CostModel& model) {
  return model.device->overlaps_communication ? Execution::concurrent : Execution::sequential;
}

// An instruction with its cost, ready to be played many times.
struct CostedInstruction {
  Seconds duration;
  std::size_t stream = 0;   // 0 for all when sequential
  std::vector<int> waits;   // instructions of the segment
  Work work;
};

// A Segment costed once. Pieces of it count from 0 at the call's start and have causes within the
// Segment.
struct CostedSegment {
  std::size_t stream = 0;
  unsigned streams = 0;     // all that it uses, as bits
  bool computes = false;    // holds a kernel
  std::vector<CostedInstruction> instructions;
  // Played without waiting for partners:
  std::vector<Played> alone;
  std::optional<int> last;  // the instruction that ends last
  Seconds duration;
  StepTime parts;   // sums to `duration`; a communication at the end counts, since the stream joins it
  SplitTime split;  // the same, apart at the end of the last kernel
};
CostedSegment cost_segment(const Segment& segment, const CostModel& model);
// The same with durations of another source.
CostedSegment cost_segment(const Segment& segment, Execution execution,
                           const std::function<Seconds(const Instruction&)>& duration_of);

}  // namespace parplan
