#pragma once

#include <span>

#include "planner/cost/cost_model.h"
#include "planner/plan/step_details.h"
#include "planner/plan/step_result.h"
#include "planner/program/program.h"
#include "planner/simulator/timeline.h"

namespace parplan {

// Plays one training step in virtual time. programs[r] stands for all ranks at coordinate r of the
// pipeline axis, whichever stages they hold, and models[r] gives its costs: members of a tensor or
// data group do equal work and arrive together; what a rank sends to the next rank, or to the
// previous one, meets that rank's receives from it, in order; tied and pipeline collectives meet
// along the pipeline.
//
// Devices that overlap communication run their streams concurrently. A transfer starts when both
// ends are at the head of their stream with their waits met, and holds both until it is done
// (unbuffered rendezvous). Others (CPU ranks) do everything in launch order: collectives and
// receives hold the rank until all have arrived and the duration has passed, a send is posted and
// costs the receiver, and waiting for a send's event waits until it is received.
//
// Time: that of the rank whose forward and backward compute longest (ties: the one that finishes
// last, then the lowest), by the rule of attribution.h; it waits for the others until the last of
// them ends. Memory:
// that of the rank that fills its device most. Communication: that of the rank that sends most in
// total. `timeline`, if given, receives every instruction; `details` each rank's own result and the
// critical path. Throws InternalError, saying who waits for what, when the Programs block one
// another.
StepResult simulate(std::span<const Program> programs, std::span<const CostModel> models, Timeline* timeline = nullptr,
                    StepDetails* details = nullptr);
// The same for a step that is ready to be played; details want its calls apart, and its crossings
// noted.
struct Simulation;
StepResult play_step(Simulation& simulation, StepDetails* details = nullptr);

}  // namespace parplan
