#pragma once

#include <span>

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

// What the Programs of all ranks promise against the plan's prediction, to the byte: before the
// first step.
void check_prediction(const Plan& plan, std::span<const Program> programs);

}  // namespace parplan
