#pragma once

#include "planner/plan/plan.h"
#include "runtime/launch/rendezvous.h"
#include "runtime/world.h"

namespace parplan {

struct WorldOptions {
  // Several ranks as threads on one GPU, if there are fewer GPUs than ranks: to try a plan out, not
  // to time it.
  bool share_gpu = false;
  GpuBackendOptions gpu;
};

// The world in which the plan's ranks run here. ConfigError says what is missing if this build or
// machine cannot run the plan.
MakeWorld choose_world(const Plan& plan, const WorldOptions& options, Rendezvous& rendezvous);

}  // namespace parplan
