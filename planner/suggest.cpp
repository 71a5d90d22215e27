#include "planner/suggest.h"

#include <algorithm>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/parallel/techniques.h"
#include "planner/remedies.h"
#include "planner/schedule/schedules.h"
#include "planner/search/candidate.h"
#include "planner/search/candidates.h"
#include "planner/simulator/simulate.h"

namespace parplan {
namespace {

ModelSummary summarise(const SuggestRequest& request) {
  return {.name = request.model_name, .parameters = parameter_count(*request.graph),
          .flops_per_sample = model_flops_per_sample(*request.graph)};
}

Schedule schedule_of(const ParallelSpec& spec, const TrainingSpec& training) {
  return row_of(spec.schedule).actions(spec.pp(), static_cast<int>(micro_batches(spec, training)));
}

// Everything of a plan but its result.
Plan complete(const SuggestRequest& request, const ParallelSpec& spec) {
  Plan plan;
  plan.model_text = request.model_text;
  plan.model = summarise(request);
  plan.cluster = request.cluster;
  plan.training = request.training;
  plan.spec = spec;
  plan.placements = place(*request.graph, spec);
  plan.schedule = schedule_of(spec, request.training);
  if (spec.mesh.size() < request.cluster.devices())
    plan.notes.push_back(fmt::format("uses {} of {} devices: no plan on all of them is faster", spec.mesh.size(), request.cluster.devices()));
  return plan;
}

// The given layout as a spec; degrees that were not given follow from the others or are 1.
ParallelSpec fixed_spec(const SuggestRequest& request) {
  const LayoutRequest& layout = request.layout;
  const int devices = request.cluster.devices();
  ParallelSpec spec;
  const int tp = layout.tp.value_or(1);
  const int pp = layout.pp.value_or(1);
  const int dp = layout.dp.value_or(std::max(devices / (tp * pp), 1));
  if (dp * tp * pp > devices)
    throw ConfigError(fmt::format("the layout needs {} devices (dp {} x tp {} x pp {}); the cluster has {}", dp * tp * pp, dp, tp, pp, devices));
  spec.mesh.degree = {pp, dp, tp};
  if (layout.order) spec.mesh.order = *layout.order;
  spec.sequence_parallel = layout.sequence_parallel.value_or(false);
  spec.zero_stage = layout.zero_stage.value_or(0);
  spec.micro_batch = layout.micro_batch.value_or(1);
  spec.schedule = layout.schedule.value_or(ScheduleKind::one_f_one_b);
  spec.recompute = layout.recompute.value_or(Recompute::none);
  if (layout.stage_blocks) spec.stage_blocks = *layout.stage_blocks;
  if (const std::optional<std::string> reason = illegal(*request.graph, request.training, spec)) throw ConfigError(*reason);
  return spec;
}

}  // namespace

SuggestResult suggest(const SuggestRequest& request) {
  const SearchResult found = search(*request.graph, request.cluster, request.training, request.layout, request.options);
  SuggestResult result;
  result.counts = found.counts;
  if (found.plans.empty()) {
    result.remedies = find_remedies(request, found);
    for (const Remedy& remedy : result.remedies) result.changes.push_back(describe(remedy));
    return result;
  }
  result.plan = complete(request, found.plans.front().spec);
  result.plan->prediction = found.plans.front().result;
  result.plan->alternatives.assign(found.plans.begin() + 1, found.plans.end());
  result.plan->search = found.counts;
  return result;
}

Plan simulate_layout(const SuggestRequest& request, std::string* trace) {
  ParallelSpec spec = fixed_spec(request);
  if (spec.stage_blocks.empty())
    spec.stage_blocks = CandidateMaker(*request.graph, request.cluster, request.training).cut_of(spec);
  Plan plan = complete(request, spec);
  plan.prediction = simulate_plan(*request.graph, plan, trace);
  return plan;
}

StepResult simulate_plan(const OpGraph& graph, const Plan& plan, std::string* trace) {
  NetworkCache networks(plan.cluster);
  Timeline timeline;
  const StepResult result = simulate_spec(graph, networks, plan.training, plan.spec, plan.placements, plan.schedule, trace ? &timeline : nullptr);
  if (trace) *trace = write_trace(timeline);
  return result;
}

}  // namespace parplan
