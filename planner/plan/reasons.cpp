#include "planner/plan/reasons.h"

#include <algorithm>
#include <array>

#include "planner/base/enum_index.h"
#include "planner/cluster/mesh.h"
#include "planner/cluster/price_and_power.h"
#include "planner/plan/memory_verdict.h"

namespace parplan {

const char* name(Constraint constraint) {
  constexpr std::array names = {"compute", "communication", "bubble", "memory", "host", "nvme"};
  return names[index_of(constraint)];
}

const char* name(Resource resource) {
  constexpr std::array names = {"compute",    "links inside nodes", "network", "all links",
                               "host rates", "NVMe rates",         "memory",  "global batch"};
  static_assert(names.size() == static_cast<std::size_t>(Resource::count_));
  return names[index_of(resource)];
}

double memory_share(const Plan& plan) {
  const Bytes capacity = memory_capacity(plan.cluster, plan.spec, plan.prediction);
  return static_cast<double>(plan.prediction.memory.peak().count) / static_cast<double>(capacity.count);
}

std::uint64_t groups_of(const Plan& plan, const RankResult& rank) {
  return plan.spec.replica_micro_batches.empty()
             ? groups_of_stage(plan.cluster, plan.spec.mesh, rank.pipeline_rank)
             : groups_of_stage(plan.cluster, plan.spec.mesh, rank.pipeline_rank, rank.replica);
}

Rival rival(const Cluster& cluster, RankedPlan plan) {
  const Bytes capacity = memory_capacity(cluster, plan.spec, plan.result);
  const std::optional<Shortage> shortage = shortage_of(cluster, plan.spec, plan.result);
  return {.plan = std::move(plan), .capacity = capacity, .shortage = shortage};
}

namespace {

// The largest gain decides; ties go to the first.
Constraint largest(double compute, double communication, double bubble, double memory, double host, double nvme) {
  const std::array gains = {compute, communication, bubble, memory, host, nvme};  // by Constraint
  return static_cast<Constraint>(std::ranges::max_element(gains) - gains.begin());
}

// Includes waiting for what other stages communicate, however many micro-batches there are.
Seconds communicating(const Plan& plan) { return plan.prediction.time.exposed_in_all() + waiting(plan).others; }

// Whether twice the memory would hold what the plan keeps off its devices, and today's would not:
// what there is room for is elsewhere for another reason.
bool twice_is_needed(const Plan& plan) {
  const MemoryUse& memory = plan.prediction.memory;
  const Bytes all = memory.peak() + memory.host + memory.nvme;
  const Bytes capacity = memory_capacity(plan.cluster, plan.spec, plan.prediction);
  return all > usable_memory(capacity, plan.cluster.memory_headroom) && all <= capacity * 2;
}

// The time that a lack of memory costs, as far as twice of it would spare that.
Seconds for_want_of_memory(const Plan& plan) {
  const StepTime& time = plan.prediction.time;
  Seconds memory;
  // A plan of the least memory is not meant to be fast.
  if (plan.search.objective != Objective::memory) {
    memory += time.recompute;
    if (twice_is_needed(plan)) memory += time.offload + updates_on_host(plan);
  }
  if (plan.spec.zero_stage >= 2 && plan.spec.dp() > 1 && memory_share(plan) >= full_share) memory += time.exposed.dp;
  return memory;
}

}  // namespace

Seconds updates_on_host(const Plan& plan) {
  // Cores are their own host.
  const bool on_host =
      is_accelerator(plan.cluster.backend()) && state_homes(plan.spec.offload).optimizer != Home::device;
  return on_host ? plan.prediction.time.optimizer : Seconds();
}

Seconds computing(const Plan& plan) {
  const StepTime& time = plan.prediction.time;
  return time.compute + time.recompute + time.optimizer - updates_on_host(plan);
}

double closed_form_bubble(const Plan& plan) {
  const double others = plan.spec.pp() - 1;
  return others / (static_cast<double>(bubble_divisor(plan.spec) * micro_batches(plan.spec, plan.training)) + others);
}

int bubble_divisor(const ParallelSpec& spec) {
  return (runs_backward_in_parts(spec.schedule) ? 3 : 1) * spec.virtual_stages;
}

Waiting waiting(const Plan& plan) {
  const StepTime& time = plan.prediction.time;
  const Seconds filling = std::min(time.bubble, closed_form_bubble(plan) * time.total());
  return {.filling = filling, .others = time.bubble - filling};
}

namespace {

// In any home.
bool lacks_room(const Plan& plan) {
  return shortage_of(plan.cluster, plan.spec, plan.prediction).has_value();
}

}  // namespace

Constraint binding_constraint(const Plan& plan) {
  if (lacks_room(plan)) return Constraint::memory;
  const Seconds copying = plan.prediction.time.offload;
  const bool has_files = uses(plan.spec.offload, Home::nvme);
  return largest(computing(plan).value / 2, communicating(plan).value / 2,
                 waiting(plan).filling.value / 2, for_want_of_memory(plan).value,
                 (has_files ? 0.0 : copying.value / 2) + updates_on_host(plan).value / 2,
                 has_files ? copying.value / 2 : 0.0);
}

Constraint binding_constraint(const Plan& plan, std::span<const Variation> twice, const RankedPlan& now) {
  if (lacks_room(plan)) return Constraint::memory;
  const StepTime& time = plan.prediction.time;
  const Objective objective = plan.search.objective;
  std::array<double, static_cast<std::size_t>(Resource::count_)> gains{};
  gains[index_of(Resource::memory)] = for_want_of_memory(plan) / time.total();
  const auto counted = [&](const RankedPlan& p) {
    return score(objective, plan.cluster, p.spec, p.result.time.total(), p.result.memory).first;
  };
  for (const Variation& variation : twice) {
    double& gain = gains[index_of(variation.resource)];
    const RankedPlan& own = variation.plan.plan;
    const double batches =
        static_cast<double>(variation.global_batch) / static_cast<double>(plan.training.global_batch);
    // A plan does not change by itself where there is more memory, and may not fit with a larger
    // batch.
    if (variation.resource == Resource::memory || !variation.plan.fits()) {
      gain = variation.best ? 1.0 - counted(*variation.best) / counted(now) / batches : 0.0;
    } else {
      gain = 1.0 - own.result.time.total() / time.total() / batches;
    }
  }
  const auto of = [&](Resource resource) { return gains[index_of(resource)]; };
  return largest(std::min(of(Resource::compute), 0.5 * (computing(plan) / time.total())),
                 std::max(of(Resource::node_links), of(Resource::links)),
                 std::min(of(Resource::global_batch), 0.5 * (waiting(plan).filling / time.total())),
                 of(Resource::memory), of(Resource::host), of(Resource::nvme));
}

double excess(const Plan& plan, const ParallelSpec& spec, const StepResult& result) {
  return excess(plan, plan.cluster, spec, result);
}

double excess(const Plan& plan, const Cluster& cluster, const ParallelSpec& spec, const StepResult& result) {
  return excess(plan.search.objective, {cluster, spec, result}, {plan.cluster, plan.spec, plan.prediction});
}

double excess(Objective objective, const OnCluster& of, const OnCluster& over) {
  if (objective != Objective::cost) {
    const auto value = [&](const OnCluster& one) {
      return score(objective, one.cluster, one.spec, one.result.time.total(), one.result.memory).first;
    };
    return value(of) / value(over) - 1.0;
  }
  struct PaidPerHour {
    std::optional<double> per_hour;
    std::optional<std::string> currency;
  };
  const auto price = [](const OnCluster& one) {
    const int devices = one.spec.mesh.size();
    const Cluster used = first_nodes(one.cluster, devices);
    return PaidPerHour{.per_hour = hourly_price(used, devices), .currency = currency(used)};
  };
  const PaidPerHour a = price(of), b = price(over);
  const bool priced = a.per_hour && b.per_hour && *b.per_hour > 0.0 && a.currency == b.currency;
  const double per_second = priced ? *a.per_hour / *b.per_hour
                                   : static_cast<double>(of.spec.mesh.size()) / over.spec.mesh.size();
  return per_second * (of.result.time.total() / over.result.time.total()) - 1.0;
}

std::span<const RankedPlan> ranked_behind(const Plan& plan, const Reasons& reasons) {
  if (reasons.runner_up && plan.alternatives.empty()) return {&*reasons.runner_up, 1};
  return plan.alternatives;
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
    case Constraint::host: return of(Resource::host);
    case Constraint::nvme: return of(Resource::nvme);
    case Constraint::communication: break;
  }
  const Variation* links = of(Resource::links);
  return links != nullptr ? links : of(Resource::node_links);  // the only links of one node
}

}  // namespace parplan
