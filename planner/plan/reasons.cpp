#include "planner/plan/reasons.h"

#include <algorithm>
#include <array>

namespace parplan {

const char* name(Constraint constraint) {
  constexpr std::array names = {"compute", "communication", "bubble", "memory"};
  return names[static_cast<std::size_t>(constraint)];
}

const char* name(Resource resource) {
  constexpr std::array names = {"compute", "links inside nodes", "network", "memory", "global batch"};
  static_assert(names.size() == static_cast<std::size_t>(Resource::count_));
  return names[static_cast<std::size_t>(resource)];
}

double memory_share(const Plan& plan) {
  const Bytes capacity = memory_capacity(plan.cluster, plan.spec.mesh, plan.prediction.memory_stage);
  return static_cast<double>(plan.prediction.memory.peak().count) / static_cast<double>(capacity.count);
}

Seconds exposed_communication(const StepTime& time) { return time.tensor_exposed + time.data_exposed + time.pipeline_exposed; }

Constraint binding_constraint(const Plan& plan) {
  const StepTime& time = plan.prediction.time;
  if (memory_share(plan) >= full_share) return Constraint::memory;
  const Seconds compute = time.compute + time.optimizer;
  const Seconds communication = exposed_communication(time);
  const Seconds most = std::max({compute, communication, time.bubble, time.recompute});
  // Nothing recomputes for any other reason than room.
  if (time.recompute == most || (time.recompute > communication && time.recompute > time.bubble)) return Constraint::memory;
  if (compute == most) return Constraint::compute;
  return communication == most ? Constraint::communication : Constraint::bubble;
}

}  // namespace parplan
