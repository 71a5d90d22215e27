#include "planner/suggest.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"
#include "planner/base/text.h"
#include "planner/cluster/price_and_power.h"
#include "planner/cost/cost_model.h"
#include "planner/explain/remedies.h"
#include "planner/parallel/engine_layouts.h"
#include "planner/parallel/techniques.h"
#include "planner/plan/memory_verdict.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/schedule/schedules.h"
#include "planner/search/candidates.h"
#include "planner/search/node_group_arrangements.h"
#include "planner/search/search_with_headroom.h"
#include "planner/search/simulate_spec.h"
#include "planner/simulator/block_shapes.h"
#include "planner/simulator/simulate.h"

namespace parplan {
namespace {

ModelSummary summarise(const SuggestRequest& request) {
  return {.name = request.model_name,
          .parameters = parameter_count(*request.graph),
          .flops_per_sample = model_flops_per_sample(*request.graph)};
}

// The whole plan but its result.
Plan complete(const SuggestRequest& request, const ParallelSpec& spec) {
  Plan plan;
  plan.model_text = request.model_text;
  plan.model = summarise(request);
  plan.cluster = request.cluster;
  plan.training = request.training;
  plan.spec = spec;
  plan.placements = place(*request.graph, spec);
  plan.schedule = schedule_of(spec, request.training);
  return plan;
}

// The note on a plan that leaves devices idle, from what the search knows.
std::string devices_left_idle(const SuggestRequest& request, const Plan& plan) {
  const std::string used = fmt::format("uses {} of {} devices", plan.spec.mesh.size(), request.cluster.devices());
  const LayoutRequest& layout = request.layout;
  if (plan.search.candidates == 0 || gives_every_degree(layout)) return used + ", as the layout that was given does";
  if (count_specs(*request.graph, request.training, request.cluster.devices(),
                  with_implied(request.training.engine, layout)) == 0)
    return fmt::format("{}: no layout of all of them is legal{}", used,
                       layout == LayoutRequest{} ? "" : " with what was given");
  constexpr std::array better = {"is faster", "costs less", "needs less memory"};  // by Objective
  const std::string claim = better[index_of(plan.search.objective)];
  if (!plan.search.certified)
    return fmt::format("{}: the search found no plan on all of them that {}, and looked at a part of them only", used,
                       claim);
  return fmt::format("{}: no plan on all of them {}{}{}", used, layout == LayoutRequest{} ? "" : "with what was given ",
                     claim, plan.search.cut_gap ? " (with the stage cuts that were tried)" : "");
}

// The note on the groups of heterogeneous nodes that a plan uses, and their order, where that is
// not the cluster's.
std::string groups_taken(const SuggestRequest& request, const Plan& plan, const std::optional<RankedPlan>& as_stands) {
  const Cluster taken = first_nodes(plan.cluster, plan.spec.mesh.size());
  std::vector<std::string> why;
  if (plan.training.precision != request.training.precision)
    why.push_back(fmt::format("they train in {}, all devices together in {}", name(plan.training.precision),
                              name(request.training.precision)));
  if (as_stands)
    why.push_back(fmt::format("the best plan of the cluster as it stands, {}, takes {} and {} of memory",
                              layout_text(as_stands->spec), format_duration(as_stands->result.time.total()),
                              format_bytes(as_stands->result.memory.peak())));
  else if (taken.groups != first_nodes(request.cluster, taken.devices()).groups)
    why.emplace_back("no plan fits the cluster as it stands");
  return fmt::format("takes {}{}, of {}: {}", describe_groups(taken),
                     taken.groups.size() > 1 ? " in this order" : " alone", describe_groups(request.cluster),
                     join(why, "; "));
}

// The note on a plan that does not leave the headroom.
std::string tight_memory(const Plan& plan) {
  const double headroom = plan.cluster.memory_headroom;
  const Bytes capacity = memory_capacity(plan.cluster, plan.spec, plan.prediction);
  const MemoryUse& use = plan.prediction.memory;
  if (memory_verdict(use, capacity, headroom) == MemoryVerdict::fits) return "";
  if (use.peak() > capacity)
    return fmt::format("tight: takes {} of a device's {}, of which the engine's allocator has to give back {} that it "
                       "keeps; no plan of this space fits with it",
                       format_bytes(use.peak()), format_bytes(capacity), format_bytes(use.reserve));
  return fmt::format(
      "tight: takes {} of a device's {}; no plan of this space leaves {:.1f} % of memory free, as it should for "
      "what predictions miss (--memory-headroom)",
      format_bytes(use.peak()), format_bytes(capacity), 100.0 * headroom);
}

// Values that were given and that the plan's layout has no use for; not those that others imply.
void note_unused(const LayoutRequest& given, Plan& plan) {
  const auto is_implied = [&](const ChoiceRow& row) {
    return std::ranges::any_of(choice_rows(), [&](const ChoiceRow& other) {
      if (other.choice == row.choice || !other.implies || !given[other.choice]) return false;
      const ImpliedChoices implied = other.implies(*given[other.choice], LayoutRequest{});
      return std::ranges::find(implied, row.choice, &std::pair<Choice, ChoiceValue>::first) != implied.end();
    });
  };
  for (const ChoiceRow& row : choice_rows()) {
    const std::optional<ChoiceValue>& value = given[row.choice];
    if (!value || !row.applies || row.applies(plan.spec) || is_implied(row)) continue;
    ParallelSpec with = plan.spec;
    row.set(with, *value);
    if (row.get(with) == row.get(ParallelSpec{})) continue;
    const bool is_flag = std::holds_alternative<bool>(*value);
    plan.notes.push_back(fmt::format("{}{} does not apply to {}", row.option,
                                     is_flag ? "" : " " + write_value(*value), layout_text(plan.spec)));
  }
}

// The given layout as a spec; degrees that were not given follow from the others or are 1.
ParallelSpec fixed_spec(const SuggestRequest& request) {
  const int devices = request.cluster.devices();
  LayoutRequest layout = with_implied(request.training.engine, request.layout);
  // Other choices are of data-parallel ranks alone.
  if (!layout[Choice::dp])
    layout[Choice::dp] = std::int64_t{std::max(devices / with_given(layout, request.training).mesh.size(), 1)};
  ParallelSpec spec = with_given(layout, request.training);
  if (spec.mesh.size() > devices) {
    std::vector<std::string> degrees;
    for (const Axis axis : {Axis::dp, Axis::tp, Axis::cp, Axis::ep, Axis::pp})
      if (is_planned(axis) && (!may_be_unnamed(axis) || spec.mesh.degree_of(axis) > 1))
        degrees.push_back(fmt::format("{} {}", name(axis), spec.mesh.degree_of(axis)));
    throw ConfigError(fmt::format("the layout needs {} devices ({}); the cluster has {}", spec.mesh.size(),
                                  fmt::join(degrees, " x "), devices));
  }
  // What the nodes that it leaves out lack is none of its concern.
  const Cluster used = first_nodes(request.cluster, spec.mesh.size());
  if (const std::optional<std::string> reason = lacks_homes(used, spec.offload)) throw ConfigError(*reason);
  if (const std::optional<std::string> reason = illegal(*request.graph, request.training, spec))
    throw ConfigError(*reason);
  return spec;
}

}  // namespace

SuggestResult suggest(const SuggestRequest& request) {
  SearchOptions options = as_suggested(request.options, request.layout);
  options.bounds_left_out = true;
  const ArrangedResult arranged = search_with_headroom(*request.graph, request.cluster, request.training,
                                                       request.layout, options, request.precision_of);
  const SearchResult& found = arranged.found;
  SuggestResult result;
  result.counts = found.counts;
  result.counts.objective = request.options.objective;
  if (found.plans.empty()) {
    SuggestRequest whole = request;
    whole.options.shapes = std::make_shared<KnownBlockShapes>();  // for all remedies
    whole.headroom_of_remedies = std::exchange(whole.cluster.memory_headroom, 0.0);
    result.remedies = find_remedies(whole, found);
    if (found.smallest) result.shortage = shortage_of(whole.cluster, found.smallest->spec, found.smallest->result);
    return result;
  }
  result.plan = complete(request, found.plans.front().spec);
  result.plan->cluster = arranged.cluster;
  result.plan->training.precision = arranged.precision;
  result.plan->prediction = found.plans.front().result;
  result.plan->alternatives.assign(found.plans.begin() + 1, found.plans.end());
  result.plan->search = result.counts;
  if (arranged.cluster != request.cluster)
    result.plan->notes.push_back(groups_taken(request, *result.plan, arranged.as_stands));
  if (const std::string note = tight_memory(*result.plan); !note.empty()) result.plan->notes.push_back(note);
  if (result.plan->spec.mesh.size() < request.cluster.devices())
    result.plan->notes.push_back(devices_left_idle(request, *result.plan));
  note_unused(request.layout, *result.plan);
  return result;
}

Plan simulate_layout(const SuggestRequest& asked, Timeline* timeline) {
  ParallelSpec spec = fixed_spec(asked);
  SuggestRequest request = asked;
  // As in a search: what the nodes that it leaves out lack is none of its concern.
  if (request.precision_of)
    request.training.precision = request.precision_of(first_nodes(request.cluster, spec.mesh.size()));
  CandidateMaker maker(*request.graph, request.cluster, request.training);
  if (spec.stage_blocks.empty()) spec.stage_blocks = maker.cut_of(spec);
  const std::optional<ParallelSpec> balanced = request.options.balances_replicas ? maker.balanced(spec) : std::nullopt;
  if (balanced) spec = *balanced;
  Plan plan = complete(request, spec);
  if (request.options.balances_replicas && !balanced)
    plan.notes.push_back("replicas have equally many micro-batches: no other numbers are legal and better");
  plan.prediction = simulate_plan(*request.graph, plan, timeline);
  if (spec.mesh.size() < request.cluster.devices()) plan.notes.push_back(devices_left_idle(request, plan));
  note_unused(request.layout, plan);
  return plan;
}

StepResult simulate_plan(const OpGraph& graph, const Plan& plan, Timeline* timeline) {
  NetworkCache networks(plan.cluster, plan.training.engine);
  if (timeline != nullptr)
    simulate_spec(graph, networks, plan.training, plan.spec, plan.placements, plan.schedule, timeline);
  return simulate_soon(graph, networks, plan);
}

}  // namespace parplan
