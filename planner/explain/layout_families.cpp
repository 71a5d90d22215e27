#include "planner/explain/layout_families.h"

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include "planner/base/parallel_for.h"
#include "planner/search/candidates.h"

namespace parplan {
namespace {

using enum Degree;
constexpr std::array family_table = {
    LayoutFamily{"data parallel, nothing sharded (ZeRO-0)", {.dp = several}, 0},
    LayoutFamily{"data parallel, ZeRO-1", {.dp = several}, 1},
    LayoutFamily{"data parallel, ZeRO-2", {.dp = several}, 2},
    LayoutFamily{"data parallel, ZeRO-3", {.dp = several}, 3},
    LayoutFamily{"pipeline alone", {.pp = several}},
    LayoutFamily{"tensor parallel inside a node alone", {.tp = inside_node}},
    LayoutFamily{"tensor parallel inside nodes x data parallel", {.dp = several, .tp = inside_node}},
    LayoutFamily{"pipeline x data parallel", {.pp = several, .dp = several}},
    LayoutFamily{"tensor parallel inside nodes x pipeline", {.pp = several, .tp = inside_node}},
    LayoutFamily{"tensor parallel inside nodes x pipeline x data parallel",
                 {.pp = several, .dp = several, .tp = inside_node}},
    LayoutFamily{"tensor parallel across nodes", {.pp = any, .dp = any, .tp = across_nodes}},
};

bool matches(Degree wanted, int degree, bool is_inside) {
  switch (wanted) {
    case one: return degree == 1;
    case several: return degree > 1;
    case inside_node: return degree > 1 && is_inside;
    case across_nodes: return degree > 1 && !is_inside;
    case any: return true;
  }
  return false;
}

// Whether so many devices can be laid out in this way at all, whatever the model says. Groups of
// adjacent devices are the most likely to lie inside nodes; one group of all devices lies across
// nodes if any group does.
bool is_possible(const LayoutFamily& family, int devices, NetworkCache& networks) {
  for (int tp = 1; tp <= devices; ++tp) {
    if (devices % tp != 0) continue;
    const bool is_inside = tensor_inside_nodes(adjacent_tensor_groups(devices, tp), networks);
    if (!matches(family.degree.tp, tp, is_inside)) continue;
    for (int pp = 1; pp <= devices / tp; ++pp)
      if (devices / tp % pp == 0 && matches(family.degree.pp, pp, false) &&
          matches(family.degree.dp, devices / tp / pp, false))
        return true;
  }
  return false;
}

}  // namespace

std::span<const LayoutFamily> layout_families() { return family_table; }

bool belongs(const LayoutFamily& family, const ParallelSpec& spec, NetworkCache& networks) {
  if (family.zero_stage && spec.zero_stage != *family.zero_stage) return false;
  return std::ranges::all_of(all_axes, [&](Axis axis) {
    const Degree wanted = family.degree[axis];
    const bool asks_where = wanted == inside_node || wanted == across_nodes;
    return matches(wanted, spec.mesh.degree_of(axis), asks_where && networks.group(spec.mesh, axis).nodes == 1);
  });
}

namespace {

// Whether some layout of these degrees belongs to it.
bool may_belong(const LayoutFamily& family, const ParallelSpec& spec) {
  return std::ranges::all_of(all_axes, [&](Axis axis) {
    const Degree wanted = family.degree[axis];
    return matches(wanted, spec.mesh.degree_of(axis), wanted == inside_node);
  });
}

}  // namespace

DeviceMesh adjacent_tensor_groups(int devices, int tp) {
  return {.degree = {.dp = devices / tp, .tp = tp}, .order = {Axis::pp, Axis::dp, Axis::tp}};
}

bool tensor_inside_nodes(const DeviceMesh& mesh, NetworkCache& networks) {
  return networks.group(mesh, Axis::tp).nodes == 1;
}

namespace {

// `across_nodes`: takes what was searched for, where that is the family.
FamilyBest best_of(const LayoutFamily& family, const ExplainedPlan& explained, CandidateMaker& maker,
                   LayoutFloors& floors, int devices, std::optional<BestAmong>& across_nodes) {
  const Plan& plan = explained.plan;
  NetworkCache& networks = maker.estimator().networks();
  explained.say(fmt::format("best plan of: {}", family.name));
  Among own{.devices = devices,
            .request = explained.request(),
            .of_degrees = [&](const ParallelSpec& spec) { return may_belong(family, spec); },
            .layout = [&](const ParallelSpec& spec) {
              return !family.zero_stage || spec.zero_stage == *family.zero_stage;
            },
            .in_order = [&](const ParallelSpec& spec) { return belongs(family, spec, networks); }};
  own.request[Choice::cp] = std::int64_t{1};  // in every family
  FamilyBest best{.family = family.name, .best = {}, .of_the_plan = belongs(family, plan.spec, networks)};
  // The results of the plan's own search count too, on any number of devices: that search simulated
  // more.
  std::vector<Rival> offered;
  const auto offer = [&](const RankedPlan& one) {
    if (Rival known = rival(plan.cluster, one); belongs(family, one.spec, networks) && known.fits())
      offered.push_back(std::move(known));
  };
  // Those on other groups of nodes are compared with nothing here.
  for (const RankedPlan& alternative : plan.alternatives)
    if (!alternative.on) offer(alternative);
  offer({.spec = plan.spec, .result = plan.prediction});  // last: it wins ties
  std::optional<Score> to_beat;
  for (const Rival& known : offered) {
    const Score score = explained.score_of(known.plan);
    to_beat = to_beat ? std::min(*to_beat, score) : score;
  }
  const bool is_across = family.degree.tp == Degree::across_nodes;
  BestAmong found = best_among(explained, maker, floors, own, is_across ? std::nullopt : to_beat);
  if (is_across) across_nodes = found;
  best.best = std::move(found.rival);
  best.certified = found.certified;
  for (Rival& known : offered)
    if (!best.best || !best.best->fits() ||
        !better(explained.score_of(best.best->plan), explained.score_of(known.plan), noise))
      best.best = std::move(known);
  return best;
}

}  // namespace

Families find_families(const ExplainedPlan& explained) {
  const Plan& plan = explained.plan;
  std::vector<std::unique_ptr<CandidateMaker>> makers;  // by thread
  for (int thread = 0; thread < explained.threads(); ++thread)
    makers.push_back(std::make_unique<CandidateMaker>(explained.graph, plan.cluster, plan.training,
                                                      plan.search.objective, explained.shapes));
  // One device has no families: the families are then those of all devices, which the plan leaves
  // idle.
  const int devices = plan.spec.mesh.size() > 1 ? plan.spec.mesh.size() : plan.cluster.devices();
  std::vector<const LayoutFamily*> possible;
  for (const LayoutFamily& family : layout_families())
    if (is_possible(family, devices, makers.front()->estimator().networks())) possible.push_back(&family);
  std::deque<LayoutFloors> floors;  // by thread
  for (const std::unique_ptr<CandidateMaker>& maker : makers) floors.push_back(floors_of(explained, *maker));
  Families families{.best = std::vector<FamilyBest>(possible.size()), .across_nodes = {}};
  parallel_for(explained.threads(), possible.size(), [&](int thread, std::size_t i) {
    families.best[i] = best_of(*possible[i], explained, *makers[static_cast<std::size_t>(thread)],
                               floors[static_cast<std::size_t>(thread)], devices, families.across_nodes);
  });
  return families;
}

}  // namespace parplan
