#include "planner/explain/find_reasons.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/cluster/mesh.h"
#include "planner/cluster/price_and_power.h"
#include "planner/explain/layout_families.h"
#include "planner/explain/neighbours.h"
#include "planner/explain/rules_of_thumb.h"
#include "planner/explain/sensitivity.h"
#include "planner/parallel/techniques.h"
#include "planner/search/candidates.h"
#include "planner/search/simulate_spec.h"

namespace parplan {
namespace {

bool promised(const StepResult& promise, const StepResult& result) {
  const double apart = std::abs(promise.time.total() / result.time.total() - 1.0);
  return apart < 1e-6 && promise.memory == result.memory && promise.memory_stage == result.memory_stage &&
         promise.memory_replica == result.memory_replica && promise.communication == result.communication;
}

// The best other layout that was simulated and fits. The plan in another order of axes with the
// same result does not count.
std::optional<RankedPlan> next_best(const ExplainedPlan& explained, const std::vector<RankedPlan>& found,
                                    const Reasons& reasons) {
  const Plan& plan = explained.plan;
  const Score own = explained.score_of({.spec = plan.spec, .result = plan.prediction});
  std::optional<RankedPlan> best;
  const auto offer = [&](const RankedPlan& one) {
    ParallelSpec same_order = one.spec;
    same_order.mesh.order = plan.spec.mesh.order;
    const Score score = explained.score_of(one);
    if (same_order == plan.spec && !better(score, own, noise) && !better(own, score, noise)) return;
    if (!best || better(score, explained.score_of(*best), noise)) best = one;
  };
  for (const RankedPlan& one : found) offer(one);
  for (const FamilyBest& family : reasons.families)
    if (family.best && family.best->fits()) offer(family.best->plan);
  for (const Neighbour& neighbour : reasons.neighbours)
    if (neighbour.rival.fits()) offer(neighbour.rival.plan);
  return best;
}

// The groups of each rank that unlike devices share; none for other ranks.
std::vector<std::vector<std::size_t>> unlike_groups(const Plan& plan, const StepDetails& details) {
  std::vector<std::vector<std::size_t>> of_ranks;
  for (const RankResult& rank : details.ranks) {
    const std::uint64_t groups = groups_of(plan, rank);
    std::vector<std::size_t>& found = of_ranks.emplace_back();
    bool alike = true;
    for (std::size_t g = 0; g < plan.cluster.groups.size(); ++g) {
      if ((groups >> g & 1u) == 0) continue;
      found.push_back(g);
      alike &= plan.cluster.groups[g].device == plan.cluster.groups[found.front()].device;
    }
    if (alike) found.clear();
  }
  return of_ranks;
}

std::vector<KernelsOnGroup> kernels_on_groups(const OpGraph& graph, const Plan& plan, const StepDetails& details) {
  const std::vector<std::vector<std::size_t>> groups = unlike_groups(plan, details);
  std::vector<KernelsOnGroup> found;
  for (std::size_t g = 0; g < plan.cluster.groups.size(); ++g) {
    const auto is_shared = [&](const auto& of_rank) { return std::ranges::find(of_rank, g) != of_rank.end(); };
    if (std::ranges::none_of(groups, is_shared)) continue;
    // By rates, as shared ranks are costed: those with as many devices at work as in the group's
    // own nodes.
    DeviceKind device = plan.cluster.groups[g].device;
    device.rates = {rates_at(device, std::min(plan.spec.mesh.size(), plan.cluster.groups[g].devices_per_node()))};
    device.measured.reset();
    Cluster alike = plan.cluster;
    for (NodeGroup& group : alike.groups) group.device = device;
    NetworkCache networks(alike, plan.training.engine);
    StepDetails on_group;
    simulate_soon(graph, networks, plan, &on_group);
    for (std::size_t i = 0; i < groups.size(); ++i)
      if (is_shared(groups[i]))
        found.push_back({.rank = static_cast<int>(i), .group = g, .kernels = on_group.ranks[i].kernels.total()});
  }
  return found;
}

}  // namespace

std::optional<StepResult> prediction_now(const OpGraph& graph, const Plan& plan) {
  NetworkCache networks(plan.cluster, plan.training.engine);
  // A promise that holds is kept, whatever its rounding.
  const StepResult result = simulate_soon(graph, networks, plan);
  if (promised(plan.prediction, result)) return std::nullopt;
  return result;
}

std::string edited_note(const StepResult& promise, const StepResult& now) {
  return fmt::format("the file promises a step of {} and {} of memory, and this plan takes {} and {}: it was edited, "
                     "or written by another version of parplan",
                     format_duration(promise.time.total()), format_bytes(promise.memory.peak()),
                     format_duration(now.time.total()), format_bytes(now.memory.peak()));
}

namespace {

std::string calibrated_note(const StepResult& promise, const StepResult& now) {
  return fmt::format("the file promises a step of {}, and with the calibration this plan takes {}",
                     format_duration(promise.time.total()), format_duration(now.time.total()));
}

}  // namespace

Plan simulated_anew(const OpGraph& graph, Plan plan, bool is_calibrated) {
  const std::optional<StepResult> now = prediction_now(graph, plan);
  if (!now) return plan;
  plan.notes.push_back(
      (is_calibrated ? calibrated_note : edited_note)(plan.prediction, *now) +
      ". All here is simulated anew; what the file says of its search and of alternatives is left out");
  plan.prediction = *now;
  plan.alternatives.clear();
  const Objective objective = plan.search.objective;
  plan.search = {};
  plan.search.objective = objective;
  return plan;
}

Reasons find_reasons(const OpGraph& graph, const Plan& plan, const ReasonsOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  const ExplainedPlan explained{graph, plan, options};
  NetworkCache networks(plan.cluster, plan.training.engine);
  Reasons reasons;
  explained.say("the plan, stage by stage");
  simulate_soon(graph, networks, plan, &reasons.details);
  for (const RankResult& rank : reasons.details.ranks)
    reasons.capacities.push_back(memory_capacity(plan.cluster, groups_of(plan, rank)));
  reasons.shared = kernels_on_groups(graph, plan, reasons.details);
  reasons.neighbours = find_neighbours(explained);
  CandidateMaker maker(graph, plan.cluster, plan.training, plan.search.objective, explained.shapes);
  const RankedPlan own{.spec = plan.spec, .result = plan.prediction};
  SearchResult now;
  if (!options.searches) {
    reasons.guide = find_guide(explained, maker, reasons.neighbours);
    reasons.binding = binding_constraint(plan, double_without_searches(explained), own);
  } else {
    Families families = find_families(explained);
    reasons.guide = find_guide(explained, maker, reasons.neighbours, families.across_nodes);
    reasons.families = std::move(families.best);
    explained.say("the whole space");
    // Where the file names the runner-up, the search has to find what is better alone.
    now = plan.alternatives.empty()
              ? explained.searched(plan.cluster, plan.training, 2)
              : explained.searched(plan.cluster, plan.training, 1, to_beat(explained, rival(plan.cluster, own)));
    Variation today = as_things_are(explained, now);
    const bool is_best_of_all = now.counts.certified && !today.changes;
    Variations variations = vary_resources(explained, is_best_of_all);
    reasons.twice = std::move(variations.twice);
    reasons.sensitivity = std::move(variations.sensitivity);
    // The best of all, whatever its cut, is also the best of its family.
    if (is_best_of_all && !now.counts.cut_gap)
      for (FamilyBest& family : reasons.families)
        family.certified |= family.best && family.best->plan.spec == plan.spec;
    reasons.binding = binding_constraint(plan, reasons.twice, today.best ? *today.best : own);
    if (today.changes) reasons.unrestricted = std::move(today);
  }
  if (plan.alternatives.empty()) reasons.runner_up = next_best(explained, now.plans, reasons);
  reasons.time = Seconds(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  return reasons;
}

}  // namespace parplan
