#include "planner/search/search_with_headroom.h"

#include <algorithm>
#include <memory>

#include "planner/cost/cost_model.h"
#include "planner/graph/engine.h"
#include "planner/parallel/engine_layouts.h"
#include "planner/parallel/techniques.h"
#include "planner/search/simulate_spec.h"
#include "planner/simulator/block_shapes.h"

namespace parplan {

ArrangedResult search_with_headroom(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                    Objective objective,
                                    const std::function<ArrangedResult(const SearchRoom& room)>& search) {
  const bool keeps = keeps_memory(training.engine);
  const bool may_be_tight = keeps || cluster.memory_headroom > 0.0;
  ArrangedResult arranged = search({.cluster = cluster, .training = training, .is_last = !may_be_tight});
  if (!arranged.found.plans.empty() || !may_be_tight) return arranged;
  Cluster whole = cluster;
  whole.memory_headroom = 0.0;
  TrainingSpec without = training;
  without.engine = keeping_nothing(training.engine);
  arranged = search({.cluster = whole, .training = without});
  arranged.cluster.memory_headroom = cluster.memory_headroom;
  TrainingSpec with = training;
  with.precision = arranged.precision;
  for (RankedPlan& plan : arranged.found.plans) {
    TrainingSpec own = with;
    if (plan.on) {
      own.precision = plan.on->training.precision;
      plan.on->training = own;
      plan.on->cluster.memory_headroom = cluster.memory_headroom;
    }
    if (!keeps) continue;
    const Cluster& on = plan.on ? plan.on->cluster : arranged.cluster;
    NetworkCache networks(on, training.engine);
    plan.result =
        simulate_soon(graph, on, own, plan.spec, place(graph, plan.spec), cost_models(networks, plan.spec)).result;
  }
  // What an allocator keeps may put plans in another order of memory; the first is on the result's
  // cluster.
  const auto is_elsewhere = [](const RankedPlan& plan) { return plan.on.has_value(); };
  if (keeps && objective == Objective::memory && std::ranges::none_of(arranged.found.plans, is_elsewhere))
    std::ranges::stable_sort(arranged.found.plans, {},
                             [](const RankedPlan& plan) { return plan.result.memory.peak(); });
  return arranged;
}

ArrangedResult search_with_headroom(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                    const LayoutRequest& given, const SearchOptions& options,
                                    const PrecisionOf& precision_of) {
  const LayoutRequest layout = with_implied(training.engine, given);
  SearchOptions usual = options;
  if (!usual.shapes) usual.shapes = std::make_shared<KnownBlockShapes>();  // for both searches
  const auto search_in = [&](const SearchRoom& room) {
    usual.says_what_may_fit = room.is_last && options.says_what_may_fit;
    return search_arrangements(graph, room.cluster, room.training, layout, usual, precision_of);
  };
  if (options.to_beat) return search_in({.cluster = cluster, .training = training});
  return search_with_headroom(graph, cluster, training, options.objective, search_in);
}

}  // namespace parplan
