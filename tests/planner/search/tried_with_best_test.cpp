// What a search tries with the layouts of its plans, row by row.
#include "planner/search/tried_with_best.h"

#include <algorithm>
#include <string>

#include <doctest/doctest.h>

#include "planner/cluster/mesh.h"
#include "planner/cost/cost_model.h"
#include "planner/parallel/techniques.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/plan/recompute.h"
#include "planner/search/search.h"
#include "planner/search/simulate_spec.h"
#include "tests/planner/search/random_settings.h"

namespace parplan {

using testing::graph_of;
using testing::training_of;

namespace {

LayoutRequest with(LayoutRequest request, Choice choice, const ChoiceValue& value) {
  request[choice] = value;
  return request;
}

// A space in which every row applies.
struct WideSpace {
  OpGraph graph = graph_of("tiny-llama", 64);
  Cluster cluster = testing::cluster_of("dgx-a100", 8);
  TrainingSpec training = training_of(8, DataType::bf16);
  SearchedSpace space_of(const LayoutRequest& request, Objective objective = Objective::time) const {
    return {.graph = graph,
            .cluster = cluster,
            .training = training,
            .request = request,
            .width = with_context(usual_width(graph, training.engine, request)),
            .objective = objective};
  }
};

}  // namespace

TEST_CASE("what is tried with the best layouts is not where it is given, or memory is the objective") {
  const WideSpace wide;
  const Space::NamedValues named = {{Choice::zero_stage, {std::int64_t{0}, std::int64_t{3}}},
                                    {Choice::sequence_parallel, {false, true}}};
  const LayoutRequest none;
  for (const TriedRow& row : tried_rows()) {
    CAPTURE(row.words);
    CHECK(is_tried(row, wide.space_of(none)));
    CHECK(!is_tried(row, wide.space_of(none, Objective::memory)));
    const LayoutRequest given = with(none, row.choice, row_of(row.choice).get(ParallelSpec()));
    CHECK(!is_tried(row, wide.space_of(given)));
    const auto says = [&](const LayoutRequest& request, const Space::NamedValues& values) {
      return tried_in_words(wide.space_of(request), values).find(row.words) != std::string::npos;
    };
    CHECK(says(none, named));
    CHECK(!says(given, named));
    if (!row.needs) continue;
    // No layout has what it needs, by what is given or by what is legal.
    const auto& [choice, least] = *row.needs;
    CHECK(!says(with(none, choice, row_of(choice).get(ParallelSpec())), named));
    CHECK(!says(none, {{choice, {row_of(choice).get(ParallelSpec())}}}));
  }
}

TEST_CASE("each row makes layouts that have its choice, and differ in what it says alone") {
  const WideSpace wide;
  const LayoutRequest none;
  const SearchedSpace space = wide.space_of(none);
  NetworkCache networks(wide.cluster);
  StepTime time;
  time.compute = Seconds(1.0);
  time.exposed[Axis::tp] = Seconds(0.5);
  ParallelSpec layout;
  layout.zero_stage = 1;
  layout.micro_batch = 1;
  for (const TriedRow& row : tried_rows()) {
    CAPTURE(row.words);
    int legal = 0;
    for (const Degrees& degree : {Degrees{.dp = 8}, Degrees{.dp = 4, .tp = 2}, Degrees{.dp = 2, .cp = 4},
                                  Degrees{.pp = 2, .dp = 2}}) {
      layout.mesh.degree = degree;
      layout.schedule = degree.pp > 1 ? ScheduleKind::interleaved : ParallelSpec().schedule;
      layout.virtual_stages = degree.pp > 1 ? 2 : 1;
      for (ParallelSpec& spec :
           row.layouts({.space = space, .networks = networks, .layout = layout, .time = time, .behind = 1.0})) {
        if (!is_legal(wide.graph, wide.training, spec)) continue;
        CHECK(spec.mesh.degree == degree);
        CHECK((spec.micro_batch == layout.micro_batch || row.choice == Choice::micro_batch_group));
        CHECK(spec.zero_stage == layout.zero_stage);
        legal += row_of(row.choice).get(spec) != row_of(row.choice).get(layout) ? 1 : 0;
      }
    }
    CHECK(legal > 0);
  }
  // A plan that is as far behind as all that it waits for is not worth a ring.
  const TriedRow& rings = *std::ranges::find(tried_rows(), Choice::tp_overlap, &TriedRow::choice);
  layout.mesh.degree = {.dp = 4, .tp = 2};
  const BestLayout behind{.space = space, .networks = networks, .layout = layout, .time = time, .behind = 1.51};
  CHECK(rings.layouts(behind).empty());
}

TEST_CASE("plans behind the best one are tried with their products in slices, too") {
  const ModelSpec model = load_model(testing::source + "/models/llama2-7b.yaml", "").spec;
  const OpGraph graph = build_graph(model, 4096);
  const Cluster cluster = testing::cluster_of("l40s-8", 8);
  TrainingSpec training = training_of(64, DataType::bf16);
  training.sequence_length = 4096;
  const LayoutRequest none;
  SearchOptions options;
  options.top = 5;
  options.top_each = 1;
  options.tries_more_with_best = true;
  const SearchResult found = search(graph, cluster, training, none, options);
  REQUIRE(found.plans.size() > 1);
  const SearchedSpace space{.graph = graph,
                            .cluster = cluster,
                            .training = training,
                            .request = none,
                            .width = usual_width(graph, training.engine, none),
                            .objective = Objective::time};
  const TriedRow& rings = *std::ranges::find(tried_rows(), Choice::tp_overlap, &TriedRow::choice);
  REQUIRE(is_tried(rings, space));
  NetworkCache networks(cluster);
  const SearchCounts& counts = found.counts;
  CHECK(counts.infeasible_memory + counts.pruned_by_bound + counts.simulated <= counts.candidates);
  int tried = 0;
  for (const RankedPlan& plan : found.plans) {
    ParallelSpec layout = plan.spec;  // without what its stages recompute
    layout.stage_recompute.clear();
    if (layout.recompute == Recompute::per_stage) layout.recompute = Recompute::none;
    for (const ParallelSpec& spec : rings.layouts({.space = space,
                                                   .networks = networks,
                                                   .layout = layout,
                                                   .time = plan.result.time,
                                                   .behind = 1.0})) {
      if (!is_legal(graph, training, spec)) continue;
      const Placements placements = place(graph, spec);
      const StepResult with =
          simulate_soon(graph, cluster, training, spec, placements, cost_models(networks, spec)).result;
      if (with.memory.peak() > usable_memory(cluster, spec.mesh, 0)) continue;
      INFO(layout_text(plan.spec) << ", with slices " << layout_text(spec));
      CHECK(with.time.total() >= (1 - 1e-9) * plan.result.time.total());
      ++tried;
    }
  }
  CHECK(tried > 0);
}

TEST_CASE("pipelines in other groups of micro-batches choose anew what they recompute") {
  const ModelSpec model = load_model(testing::source + "/models/llama3-70b.yaml", "").spec;
  const OpGraph graph = build_graph(model, 8192);
  const Cluster cluster = testing::cluster_of("mi300x-8", 8);
  TrainingSpec training = training_of(7, DataType::bf16);  // no multiple of the pipeline's ranks
  training.sequence_length = 8192;
  const LayoutRequest ranks = with({}, Choice::pp, std::int64_t{4});
  SearchOptions options;
  options.tries_more_with_best = true;
  const SearchResult found = search(graph, cluster, training, ranks, options);
  REQUIRE(!found.plans.empty());
  CHECK(found.plans.front().spec.micro_batch_group > 0);
  // No other group is named where the schedule is.
  const SearchResult interleaved =
      search(graph, cluster, training, with(ranks, Choice::schedule, ScheduleKind::interleaved), options);
  REQUIRE(!interleaved.plans.empty());
  CHECK(interleaved.plans.front().result.time.total() <= (1 + 1e-9) * found.plans.front().result.time.total());
  for (const Recompute recompute : searched_recomputes(training.engine)) {
    const SearchResult with_it =
        search(graph, cluster, training, with(ranks, Choice::recompute, recompute), options);
    if (with_it.plans.empty()) continue;
    CAPTURE(layout_text(with_it.plans.front().spec));
    CHECK(found.plans.front().result.time.total() <= (1 + 1e-9) * with_it.plans.front().result.time.total());
  }
}

}  // namespace parplan
