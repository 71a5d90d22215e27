#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "planner/base/units.h"
#include "planner/plan/step_result.h"

namespace parplan {

// A time split at the end of its last compute, since only the following work decides whether the
// rest was awaited.
struct SplitTime {
  Seconds computed;  // from the start to the end of the last compute
  StepTime parts;    // of that time
  StepTime tail;     // of the rest
  Seconds duration;  // of both
};

// The label of one piece of played work.
struct Work {
  // Several instructions played as one, or several such in a row; null for a single instruction.
  const SplitTime* split = nullptr;
  std::uint16_t in_a_row = 1;
  bool computes = false;
  Label label{};  // of a single instruction
};

// How far a piece of work has come while it is played. A posted send has no end until it is
// received.
enum class Progress : std::uint8_t { waiting, posted, done };

// A piece of work with its times on one rank.
struct Played {
  Seconds start = {};
  Seconds end = {};
  // The piece whose end made it ready (it may have started later, when its partners were).
  std::optional<int> cause = {};
  // A step has millions of pieces: `progress` lies in the padding of `work`.
  [[no_unique_address]] Work work = {};
  Progress progress = Progress::waiting;
  // Several instructions that were played as one, and took longer than alone: their kernels were
  // slowed.
  bool slowed = false;

  bool done() const { return progress == Progress::done; }
};

// Attributes the time of one rank from 0 to the end of `last`: each instant belongs to the running
// compute (of two at once, to the one that started first), else to the communication that the next
// compute awaits while that is in progress, else to the bubble. What the next compute awaits is
// found backwards along causes: the piece that made it ready, then the piece that made that one
// ready, and so on. The end of the step awaits `last`.
SplitTime attribute(std::span<const Played> pieces, std::optional<int> last);
// The same without own memory: `scratch` holds the indices of the pieces that computed.
SplitTime attribute(std::span<const Played> pieces, std::optional<int> last, std::vector<int>& scratch);
StepTime sum(const SplitTime& split);

// How many times as long as alone work that was played as one took; 1 where it was not slowed.
double times_as_long(const Played& piece);

}  // namespace parplan
