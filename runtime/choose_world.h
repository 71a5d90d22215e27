#pragma once

#include "planner/plan/plan.h"
#include "runtime/launch/rendezvous.h"
#include "runtime/world.h"

namespace parplan {

struct WorldOptions {
  // Several ranks as threads on one GPU, where there are fewer GPUs than ranks: to try a plan out,
  // not to time it.
  bool share_gpu = false;
  GpuBackendOptions gpu;
};

// What the plan's ranks run on here. ConfigError when this build or machine cannot run the plan: it
// says what is missing.
MakeWorld choose_world(const Plan& plan, const WorldOptions& options, Rendezvous& rendezvous);

}  // namespace parplan
