#include "planner/explain/explained_plan.h"

#include <utility>
#include <vector>

#include "planner/parallel/engine_layouts.h"
#include "planner/parallel/recompute.h"
#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"
#include "planner/search/simulate_spec.h"

namespace parplan {

void ExplainedPlan::say(const std::string& doing) const {
  if (!options.progress) return;
  const std::scoped_lock lock(*speaks);
  options.progress(doing);
}

RankedPlan ExplainedPlan::simulated(NetworkCache& networks, const TrainingSpec& training,
                                    const ParallelSpec& spec) const {
  const Placements placements = place(graph, spec);
  const std::vector<CostModel> models = cost_models(networks, spec);
  const bool same_tasks = spec.pp() == plan.spec.pp() && spec.stages() == plan.spec.stages() &&
                          spec.schedule == plan.spec.schedule &&
                          micro_batches(spec, training) == micro_batches(plan.spec, plan.training);
  const bool same_group = shape_of(spec, training).group == shape_of(plan.spec, plan.training).group;
  if (same_tasks && (same_group ? has_own_order : plan.schedule != schedule_of(spec, training)))
    return {.spec = spec,
            .result =
                simulate_spec(graph, networks.cluster(), training, spec, placements, plan.schedule, models, nullptr)};
  return {.spec = spec,
          .result = steps->simulate(graph, networks.cluster(), training, spec, placements, models).result};
}

LayoutRequest ExplainedPlan::request() const {
  LayoutRequest request;
  if (plan.spec.mesh.dp_shard == 0) request[Choice::dp_shard] = std::int64_t{0};
  if (plan.spec.cp() == 1 && graph.sequence < long_sequence) request[Choice::cp] = std::int64_t{1};
  return with_implied(plan.training.engine, std::move(request));
}

SearchResult ExplainedPlan::searched(const Cluster& cluster, const TrainingSpec& training, int top,
                                     std::optional<Score> to_beat) const {
  SearchOptions search_options;
  search_options.top = top;
  search_options.objective = objective();
  search_options.most_simulated = options.most_simulated;
  search_options.threads = 1;
  search_options.together = 1;
  search_options.to_beat = to_beat;
  search_options.counts_layouts = false;
  search_options.steps = steps.get();
  search_options.shapes = shapes;
  search_options.recomputes_fewest_layers = recomputes_some_layers(plan.spec);
  LayoutRequest own = request();
  if (plan.spec.cp() > 1 && graph.sequence < long_sequence) {
    own[Choice::cp] = std::int64_t{plan.spec.cp()};
    own[Choice::cp_method] = plan.spec.cp_method;
  }
  return search(graph, cluster, training, own, search_options);
}

Score ExplainedPlan::score_of(const RankedPlan& of) const {
  return score(objective(), plan.cluster, of.spec, of.result.time.total(), of.result.memory);
}

}  // namespace parplan
