#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "planner/cost/cost_model.h"
#include "planner/plan/step.h"
#include "planner/plan/step_details.h"
#include "planner/program/program.h"
#include "planner/simulator/timeline.h"

namespace parplan {

// The end times of everything that the calls of a Program submitted.
struct CallEnds {
  std::vector<std::size_t> first;  // per call, into `seconds`; one more than calls
  std::vector<double> seconds;
  bool operator==(const CallEnds&) const = default;
};

// Plays one training step in virtual time. programs[s] stands for all ranks of pipeline stage s,
// and models[s] gives its costs: members of a tensor or data group do equal work and arrive
// together; a send meets the neighbouring stage's receive of the same direction, in order; tied and
// pipeline collectives meet across stages.
//
// Devices that overlap communication run their streams concurrently. A transfer starts when both
// ends are at the head of their stream with their waits met, and holds both until it is done
// (unbuffered rendezvous). Others (CPU ranks) do everything in launch order: collectives and
// receives hold the rank until all have arrived and the duration has passed, a send is posted and
// costs the receiver, and waiting for a send's event waits until it is received.
//
// Time: that of the stage that finishes last (ties: lowest), by the rule of attribution.h. Memory:
// that of the stage with the highest peak. Communication: that of the stage that sends most in
// total. `timeline`, if given, receives every instruction; `details` each stage's own result and
// the critical path. Throws InternalError, saying who waits for what, when the Programs block one
// another. `ends` gets one element per stage.
StepResult simulate(std::span<const Program> programs, std::span<const CostModel> models, Timeline* timeline = nullptr,
                    StepDetails* details = nullptr,
                    std::vector<CallEnds>* ends = nullptr);

}  // namespace parplan
