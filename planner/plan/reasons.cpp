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

Rival rival(const Cluster& cluster, RankedPlan plan) {
  const Bytes capacity = memory_capacity(cluster, plan.spec.mesh, plan.result.memory_stage);
  return {.plan = std::move(plan), .capacity = capacity};
}

Seconds exposed_communication(const StepTime& time) { return time.tensor_exposed + time.data_exposed + time.pipeline_exposed; }

namespace {

// The largest decides; ties go to the first.
Constraint largest(double compute, double communication, double bubble, double memory) {
  const std::array gains = {compute, communication, bubble, memory};  // by Constraint
  return static_cast<Constraint>(std::ranges::max_element(gains) - gains.begin());
}

Seconds computing(const StepTime& time) { return time.compute + time.recompute + time.optimizer; }

}  // namespace

Constraint binding_constraint(const Plan& plan) {
  if (memory_share(plan) > 1.0) return Constraint::memory;
  const StepTime& time = plan.prediction.time;
  Seconds memory;
  // (A plan of least memory does without.)
  if (plan.search.objective != Objective::memory) memory += time.recompute;
  if (plan.spec.zero_stage >= 2 && plan.spec.dp() > 1 && memory_share(plan) >= full_share) memory += time.data_exposed;
  return largest(computing(time).value / 2, exposed_communication(time).value / 2, time.bubble.value / 2, memory.value);
}

Constraint binding_constraint(const Plan& plan, std::span<const Variation> twice, const RankedPlan& now) {
  if (memory_share(plan) > 1.0) return Constraint::memory;
  const StepTime& time = plan.prediction.time;
  const Objective objective = plan.search.objective;
  std::array<double, static_cast<std::size_t>(Resource::count_)> gains{};
  const auto counted = [&](const RankedPlan& p) { return score(objective, plan.cluster, p.spec, p.result.time.total(), p.result.memory).first; };
  for (const Variation& variation : twice) {
    double& gain = gains[static_cast<std::size_t>(variation.resource)];
    const RankedPlan& own = variation.plan.plan;
    const double batches = static_cast<double>(variation.global_batch) / static_cast<double>(plan.training.global_batch);
    // A plan does not change by itself where there is more memory, and may not fit with a larger batch.
    if (variation.resource == Resource::memory || !variation.plan.fits()) {
      if (variation.best) gain = 1.0 - counted(*variation.best) / counted(now) / batches;
    } else {
      gain = 1.0 - own.result.time.total() / time.total() / batches;
    }
  }
  const auto of = [&](Resource resource) { return gains[static_cast<std::size_t>(resource)]; };
  return largest(std::min(of(Resource::compute), 0.5 * (computing(time) / time.total())), of(Resource::node_links) + of(Resource::network),
                 std::min(of(Resource::global_batch), 0.5 * (time.bubble / time.total())), of(Resource::memory));
}

double excess(const Plan& plan, const ParallelSpec& spec, const StepResult& result) { return excess(plan, plan.cluster, spec, result); }

double excess(const Plan& plan, const Cluster& cluster, const ParallelSpec& spec, const StepResult& result) {
  const auto of = [&](const Cluster& c, const ParallelSpec& s, const StepResult& r) { return score(plan.search.objective, c, s, r.time.total(), r.memory).first; };
  return of(cluster, spec, result) / of(plan.cluster, plan.spec, plan.prediction) - 1.0;
}

const Variation* relaxed(const Reasons& reasons) {
  const auto of = [&](Resource resource) -> const Variation* {
    const auto found = std::ranges::find(reasons.twice, resource, &Variation::resource);
    return found == reasons.twice.end() ? nullptr : &*found;
  };
  switch (reasons.binding) {
    case Constraint::compute: return of(Resource::compute);
    case Constraint::bubble: return of(Resource::global_batch);
    case Constraint::memory: return of(Resource::memory);
    case Constraint::communication: break;
  }
  // Of the two kinds of links those that shorten the plan's step more.
  const Variation* inside = of(Resource::node_links);
  const Variation* network = of(Resource::network);
  return inside && network && network->plan.plan.result.time.total() < inside->plan.plan.result.time.total() ? network : inside;
}

}  // namespace parplan
