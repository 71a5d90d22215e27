// Searches in which stages recompute in as few of their layers as memory demands.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "planner/parallel/recompute.h"
#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"
#include "planner/search/search.h"
#include "planner/search/simulate_spec.h"
#include "planner/search/space.h"
#include "tests/planner/search/random_settings.h"

namespace parplan {
namespace {

using testing::cluster_of;
using testing::describe;
using testing::graph_of;
using testing::training_of;

StepResult simulated(const OpGraph& graph, NetworkCache& networks, const TrainingSpec& training,
                     const ParallelSpec& spec) {
  return simulate_spec(graph, networks, training, spec, place(graph, spec), schedule_of(spec, training), nullptr);
}

// Calls `visit` with the layout in which each stage recomputes nothing, or any number of its layers
// by any rule that is searched.
void for_each_number(const ParallelSpec& cut, const Engine& engine,
                     const std::function<void(const ParallelSpec&)>& visit) {
  const std::vector<int> layers = layers_of_stages(cut);
  ParallelSpec spec = cut;
  spec.recompute = Recompute::per_stage;
  spec.stage_recompute.assign(layers.size(), Recompute::none);
  const std::function<void(std::size_t)> choose = [&](std::size_t stage) {
    if (stage == layers.size()) return visit(spec);
    for (const Recompute rule : searched_recomputes(engine))
      for (int number = 1; number <= (rule == Recompute::none ? 1 : layers[stage]); ++number) {
        spec.stage_recompute[stage] = {rule, rule == Recompute::none ? 0 : number};
        choose(stage + 1);
      }
  };
  choose(0);
}

std::vector<StageRecompute> of_stages(const ParallelSpec& spec) {
  std::vector<StageRecompute> stages;
  for (int stage = 0; stage < spec.stages(); ++stage) stages.push_back(spec.recompute_of(stage));
  return stages;
}

TEST_CASE("of all numbers of layers that stages may recompute, a search finds the fastest that fits") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  int fewer = 0, found_any = 0;
  for (const int pp : {1, 2}) {
    const Cluster whole = cluster_of("dgx-a100", pp);
    TrainingSpec training = training_of(8, DataType::bf16);
    const LayoutRequest request{{Choice::dp, std::int64_t{1}},
                                {Choice::tp, std::int64_t{1}},
                                {Choice::pp, std::int64_t{pp}},
                                {Choice::micro_batch, std::int64_t{2}},
                                {Choice::schedule, ScheduleKind::one_f_one_b},
                                {Choice::input_slots, InputSlots::in_flight}};
    NetworkCache networks(whole);
    // All layouts, with what they need.
    std::vector<RankedPlan> all;
    for (const ParallelSpec& spec : enumerate_specs(graph, training, pp, request)) {
      if (spec.recompute != Recompute::none) continue;
      const int blocks = static_cast<int>(graph.blocks.size());
      for (int first = 1; first < (pp == 1 ? 2 : blocks); ++first) {
        ParallelSpec cut = spec;
        cut.stage_blocks = pp == 1 ? std::vector{blocks} : std::vector{first, blocks - first};
        for_each_number(cut, training.engine, [&](const ParallelSpec& one) {
          all.push_back({one, simulated(graph, networks, training, one)});
        });
      }
    }
    REQUIRE(all.size() > 10);
    const auto peak = [](const RankedPlan& plan) { return plan.result.memory.peak(); };
    const Bytes least = peak(*std::ranges::min_element(all, {}, peak)),
                most = peak(*std::ranges::max_element(all, {}, peak));
    for (int step = 0; step <= 12; ++step) {
      Cluster limited = whole;
      limited.groups.front().device.memory_capacity = least + Bytes((most - least).count * step / 12);
      INFO("pp " << pp << ", " << limited.groups.front().device.memory_capacity.count << " bytes");
      SearchOptions options;
      options.threads = 1;
      const SearchResult without = search(graph, limited, training, request, options);
      options.recomputes_fewest_layers = true;
      const SearchResult with = search(graph, limited, training, request, options);
      REQUIRE(!with.plans.empty());
      CHECK(with.counts.certified);
      const RankedPlan& best = with.plans.front();
      INFO(describe(best.spec));
      CHECK(best.result.memory.peak() <= limited.groups.front().device.memory_capacity);
      CHECK(!illegal(graph, training, best.spec));
      Seconds fastest(std::numeric_limits<double>::infinity());
      for (const RankedPlan& one : all)
        if (peak(one) <= limited.groups.front().device.memory_capacity)
          fastest = std::min(fastest, one.result.time.total());
      // A search takes the fewest layers by the rule that computes least; others may overlap more.
      CHECK(best.result.time.total() >= fastest * (1 - 1e-12));
      CHECK(best.result.time.total() <= fastest * 1.003);
      if (!without.plans.empty())
        CHECK(best.result.time.total() <= without.plans.front().result.time.total() * (1 + 1e-12));
      fewer +=
          without.plans.empty() || best.result.time.total() < without.plans.front().result.time.total() * (1 - 1e-9);
      if (!recomputes_some_layers(best.spec)) continue;
      ++found_any;
      // One layer less on any stage does not fit.
      for (int stage = 0; stage < best.spec.stages(); ++stage) {
        ParallelSpec one_less = best.spec;
        std::vector<StageRecompute> stages = of_stages(best.spec);
        const int layers = layers_of_stages(best.spec)[static_cast<std::size_t>(stage)];
        StageRecompute& own = stages[static_cast<std::size_t>(stage)];
        if (own.rule == Recompute::none || layers == 0) continue;
        const int number = own.layers == 0 ? layers : own.layers;
        own = number == 1 ? StageRecompute(Recompute::none) : StageRecompute(own.rule, number - 1);
        one_less.recompute = Recompute::per_stage;
        one_less.recompute_layers = 0;
        one_less.stage_recompute = stages;
        CHECK(simulated(graph, networks, training, one_less).memory.peak() >
              limited.groups.front().device.memory_capacity);
      }
    }
  }
  CHECK(fewer > 3);
  CHECK(found_any > 3);
}

}  // namespace
}  // namespace parplan
