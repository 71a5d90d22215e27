#include "planner/explain/layout_families.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "planner/cluster/mesh.h"
#include "planner/cost/cost_model.h"
#include "planner/explain/find_reasons.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/search/simulate_spec.h"
#include "planner/search/space.h"
#include "planner/suggest.h"
#include "tests/planner/explain/small_requests.h"

namespace parplan {

using testing::cluster_of;
using testing::graph_of;
using testing::nodes_of;
using testing::request_of;
using testing::source;
using testing::step;

TEST_CASE("a layout is of one family, and every family has a name of its own") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  TrainingSpec training;
  training.global_batch = 16;
  training.sequence_length = 16;
  std::set<std::string_view> names;
  std::set<std::string_view> met;
  for (const LayoutFamily& family : layout_families()) CHECK(names.insert(family.name).second);
  // tiny-gpt2 has four heads: alone, tensor parallelism uses four devices.
  for (const auto& [devices, devices_per_node] : {std::pair{8, 2}, std::pair{8, 4}, std::pair{8, 8}, std::pair{4, 4}}) {
    const Cluster cluster = nodes_of(devices_per_node, devices / devices_per_node);
    NetworkCache networks(cluster);
    for (const ParallelSpec& spec : enumerate_specs(graph, training, devices, {})) {
      int families = 0;
      for (const LayoutFamily& family : layout_families())
        if (belongs(family, spec, networks)) {
          ++families;
          met.insert(family.name);
        }
      INFO(layout_text(spec) << " with nodes of " << devices_per_node);
      CHECK(families == 1);
    }
  }
  CHECK(met == names);
}

TEST_CASE("tensor parallelism is inside nodes where each of its groups is") {
  struct Case {
    int per_node, nodes;
    Degrees degree;
    AxisOrder order;
    std::string_view family;
  };
  const AxisOrder neighbours = {Axis::pp, Axis::dp, Axis::tp};
  const AxisOrder apart = {Axis::tp, Axis::pp, Axis::dp};
  for (const Case& one :
       {Case{8, 3, {.dp = 4, .tp = 6}, neighbours, "tensor parallel across nodes"},  // ranks 6 to 11 are on two nodes
        Case{8, 3, {.dp = 3, .tp = 8}, neighbours, "tensor parallel inside nodes x data parallel"},
        Case{8, 3, {.dp = 1, .tp = 6}, neighbours, "tensor parallel inside a node alone"},
        Case{8, 2, {.dp = 8, .tp = 2}, apart, "tensor parallel across nodes"},  // ranks 0 and 8
        Case{8, 2, {.dp = 4, .tp = 2}, apart, "tensor parallel inside nodes x data parallel"}}) {
    const Cluster cluster = nodes_of(one.per_node, one.nodes);
    NetworkCache networks(cluster);
    ParallelSpec spec;
    spec.mesh = {.degree = one.degree, .order = one.order};
    for (const LayoutFamily& family : layout_families()) {
      INFO(layout_text(spec) << " on " << one.nodes << " nodes of " << one.per_node << ": " << family.name);
      CHECK(belongs(family, spec, networks) == (family.name == one.family));
    }
  }
}

TEST_CASE("a family's best is certified where no longer search finds a better one") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  const SuggestResult found = suggest(request_of(graph, cluster_of("dgx-a100", 16), 16));
  REQUIRE(found.plan);
  const auto families_after = [&](std::int64_t simulated) {
    ReasonsOptions options;
    options.most_simulated = simulated;
    return find_reasons(graph, *found.plan, options).families;
  };
  const std::vector<FamilyBest> few = families_after(1);
  const std::vector<FamilyBest> all = families_after(1 << 20);
  REQUIRE(few.size() == all.size());
  int certified = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    INFO(all[i].family);
    CHECK(all[i].certified);
    REQUIRE(few[i].best.has_value() == all[i].best.has_value());
    if (!all[i].best) continue;
    const double best = step(all[i].best->plan.result);
    CHECK(best <= step(few[i].best->plan.result) * (1 + 1e-9));
    certified += few[i].certified ? 1 : 0;
    if (few[i].certified) CHECK(step(few[i].best->plan.result) == doctest::Approx(best).epsilon(1e-9));
  }
  CHECK(certified > 0);
  CHECK(certified < static_cast<int>(all.size()));
}

TEST_CASE("by memory, too, the best of families is certified, and none of their layouts takes less") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  SuggestRequest request = request_of(graph, cluster_of("dgx-a100", 4), 8);
  request.options.objective = Objective::memory;
  const SuggestResult found = suggest(request);
  REQUIRE(found.plan);
  NetworkCache networks(request.cluster);
  const int devices = found.plan->spec.mesh.size();
  int certified = 0;
  for (const FamilyBest& best : find_reasons(graph, *found.plan, {}).families) {
    if (!best.certified || !best.best) continue;
    ++certified;
    const LayoutFamily& family = *std::ranges::find(layout_families(), best.family, &LayoutFamily::name);
    LayoutRequest no_context;
    no_context[Choice::cp] = std::int64_t{1};
    for (ParallelSpec spec : enumerate_specs(graph, found.plan->training, devices, no_context)) {
      if (!belongs(family, spec, networks)) continue;
      for (const std::vector<int>& cut : testing::all_cuts(static_cast<int>(graph.blocks.size()), spec.stages())) {
        spec.stage_blocks = cut;
        const Placements placements = place(graph, spec);
        const StepResult with = simulate_soon(graph, request.cluster, found.plan->training, spec, placements,
                                              cost_models(networks, spec))
                                    .result;
        INFO(best.family << ": " << layout_text(best.best->plan.spec) << " against " << layout_text(spec));
        CHECK(with.memory.peak() >= best.best->plan.result.memory.peak());
      }
    }
  }
  CHECK(certified > 1);
}

TEST_CASE("where a family's best is certified, no other cut of it is better") {
  ModelSpec model = load_model(source + "/tests/data/models/tiny-llama.yaml", "").spec;
  model.layers = 11;  // too many for every cut into three stages or more to be a candidate
  int certified = 0, open = 0;
  for (const int vocabulary : {61, 5000, 50257})
    for (const int hidden : {32, 512}) {
      model.vocabulary = vocabulary;
      model.hidden = hidden;
      const OpGraph graph = build_graph(model, 128);
      const Cluster cluster = cluster_of("dgx-a100", 4);
      SuggestRequest request = request_of(graph, cluster, 12);
      // Interleaved pipelines have more cuts than bounds can tell from their best.
      request.training.engine.name = "a stage on each rank";
      request.training.engine.has_interleaved = false;
      const SuggestResult found = suggest(request);
      REQUIRE(found.plan);
      NetworkCache networks(cluster);
      for (const FamilyBest& family : find_reasons(graph, *found.plan, {}).families) {
        if (!family.best || family.best->plan.spec.pp() < 2) continue;
        ++(family.certified ? certified : open);
        if (!family.certified) continue;
        ParallelSpec other = family.best->plan.spec;
        for (const std::vector<int>& cut : testing::all_cuts(static_cast<int>(graph.blocks.size()), other.stages())) {
          other.stage_blocks = cut;
          const Placements placements = place(graph, other);
          const StepResult with = simulate_soon(graph, cluster, found.plan->training, other, placements,
                                                cost_models(networks, other))
                                      .result;
          if (with.memory.peak() > usable_memory(cluster, other.mesh, 0)) continue;
          INFO(family.family << ": " << layout_text(family.best->plan.spec) << " against " << layout_text(other));
          CHECK(step(with) >= (1 - 1e-9) * step(family.best->plan.result));
        }
      }
    }
  CHECK(certified > 0);
  CHECK(open > 0);
}

TEST_CASE("of layouts that differ in the order of axes alone and take as long, the plan is the best of its family") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  SuggestRequest request = request_of(graph, cluster_of(source + "/tests/data/clusters/cpu-8.yaml", 4), 16);
  request.layout[Choice::dp] = 2;
  request.layout[Choice::pp] = 2;
  for (const AxisOrder& order :
       {AxisOrder{Axis::pp, Axis::dp, Axis::tp}, AxisOrder{Axis::dp, Axis::pp, Axis::tp}}) {
    request.layout[Choice::mesh_order] = order;
    SuggestResult found = suggest(request);
    REQUIRE(found.plan);
    Plan& plan = *found.plan;
    plan.alternatives.clear();
    plan.prediction.time.compute *= 1.0 + 1e-12;  // sums of the same parts in another order
    const Reasons reasons = find_reasons(graph, plan, {});
    const auto own = std::ranges::find_if(reasons.families, &FamilyBest::of_the_plan);
    REQUIRE(own != reasons.families.end());
    CHECK(own->best->plan.spec == plan.spec);
    REQUIRE(reasons.runner_up);
    ParallelSpec same_order = reasons.runner_up->spec;
    same_order.mesh.order = order;
    CHECK(same_order != plan.spec);
  }
}

}  // namespace parplan
