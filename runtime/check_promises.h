#pragma once

#include <span>
#include <vector>

#include "planner/plan/plan.h"
#include "planner/program/program.h"
#include "runtime/arena.h"

// A run that breaks a promise of its plan has found a bug of parplan: these throw InternalError
// with both numbers.
namespace parplan {

// One rank's step: the arena of each home was touched to its last byte, and the promised bytes were
// sent.
void check_promises(const Program& program, const Arena& arena, const CommunicationVolume& sent,
                    const CopiedBytes& copied);

// The ranks that a plan's prediction describes: those at data and tensor coordinate 0, one per
// stage, and with unlike replicas those of each (unlike_replicas). What is sent in a step is that
// of the one that sends most.
std::vector<int> predicted_ranks(const Plan& plan);

// What the Programs of all ranks promise against the plan's prediction, to the byte: before the
// first step.
void check_prediction(const Plan& plan, std::span<const Program> programs);

}  // namespace parplan
