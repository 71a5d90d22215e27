#pragma once

#include <optional>
#include <vector>

#include "planner/simulator/simulation_state.h"

namespace parplan {

// A step whose middle repeats itself on every rank, and with it the steps of more micro-batches: a
// long step is lowered with few.
struct RepeatingStep {
  Simulation shortest;         // not played
  int micro_batches = 0;       // of it
  int period = 0;              // micro-batches after which every rank's middle repeats itself
  std::vector<Repeat> middle;  // by rank
};

// With the least multiple of `period`, up to four times it, after which the middle of every rank's
// calls repeats itself; nothing where there is none.
std::optional<RepeatingStep> repeating_step(Simulation shortest, int micro_batches, int period);

// The step, not yet played, with `times` such periods more.
Simulation longer(const RepeatingStep& step, int times);
// Gives `playing`, which this step or a longer one of it became when it was played, the calls of
// the step with `times` periods more. What has been played lies before the ends of both middles.
void set_length(Simulation& playing, const RepeatingStep& step, int times);

}  // namespace parplan
