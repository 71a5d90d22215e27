// The search over plans with context parallelism.
#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"
#include "planner/search/device_count_bound.h"
#include "planner/search/search.h"
#include "planner/search/simulate_spec.h"
#include "planner/search/space.h"
#include "planner/simulator/estimate.h"
#include "tests/planner/search/random_settings.h"

namespace parplan {

using testing::cluster_of;
using testing::graph_of;
using testing::random_cluster;
using testing::random_cut;
using testing::random_graph;
using testing::training_of;

namespace {

std::string describe_context(const ParallelSpec& spec) {
  return fmt::format("{} cp {} by {} in groups of {}", testing::describe(spec), spec.cp(), name(spec.cp_method),
                     spec.mesh.cp_ulysses);
}

bool has_context(const OpGraph& graph, const TrainingSpec& training, const LayoutRequest& request) {
  return std::ranges::any_of(
      Space(graph, training, request, usual_width(graph, training.engine, request)).parts(4, Devices::at_most),
      [](const SpacePart& part) { return part.spec.cp() > 1; });
}

}  // namespace

TEST_CASE("with context parallelism an estimate has the memory that lowering plans and bounds below the step") {
  std::mt19937 random = testing::random_from(31);
  int hierarchical = 0;
  for (int setting = 0; setting < 80; ++setting) {
    const bool gpu = setting % 4 != 0;
    const OpGraph graph = random_graph(random, 16);
    const Cluster cluster = random_cluster(random, gpu, gpu && setting % 4 == 1);
    TrainingSpec training = training_of(16, gpu ? DataType::bf16 : DataType::fp32);
    training.clip_norm = setting % 2;
    Estimator estimator(graph, cluster, training);
    const DeviceCountBound floor(graph, cluster, training);
    LayoutRequest request;
    const int devices = std::min(8, cluster.devices()) / 2 * 2;
    request[Choice::cp] = setting % 5 == 4 && devices % 4 == 0 ? 4 : 2;
    const std::vector<ParallelSpec> specs = enumerate_specs(graph, training, devices, request);
    REQUIRE(!specs.empty());
    for (int trial = 0; trial < 30; ++trial) {
      ParallelSpec spec = testing::or_hierarchical(specs[random() % specs.size()], graph, training, random);
      hierarchical += spec.mesh.cp_ulysses > 1;
      spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.stages(), random);
      INFO("setting " << setting << " on " << cluster.name << ": " << describe_context(spec));
      const Placements placements = place(graph, spec);
      const Estimate estimate = estimator.estimate(spec, placements, forms_of(row_of(spec.schedule)));
      const StepResult simulated = simulate_spec(graph, estimator.networks(), training, spec, placements,
                                                 schedule_of(spec, training), nullptr);
      CHECK(estimate.memory == simulated.memory);
      CHECK(estimate.lower_bound <= simulated.time.total() * (1 + 1e-12));
      CHECK(floor.time(spec.mesh.size()) <= simulated.time.total() * (1 + 1e-12));
    }
  }
  CHECK(hierarchical > 50);
}

TEST_CASE("the search over context degrees and methods finds what simulating every layout and cut finds") {
  // Each of four ranks has chunks of the blocks that attention computes in.
  constexpr std::int64_t sequence = 1024;
  const OpGraph graph = graph_of("tiny-llama", sequence);
  const int blocks = static_cast<int>(graph.blocks.size());
  bool context_won = false;
  // On slow links; on fast ones; and where little memory is left, that of a fifth of all plans.
  for (const auto& [speed, tight] : {std::pair{1.0, false}, {1000.0, false}, {1000.0, true}}) {
    Cluster cluster = cluster_of("dgx-a100", 4);
    for (Link& link : cluster.groups.front().node.links) {
      link.bandwidth *= speed;
      link.latency *= 1.0 / speed;
    }
    if (speed > 1.0) {
      // A step that takes what its products do.
      cluster.groups.front().device.measured.reset();
      for (DeviceRates& rates : cluster.groups.front().device.rates)
        rates.matrix_half = rates.matrix_fp32 = FlopsPerSecond(1e9);
    }
    for (const bool given : {true, false}) {
      // A single sequence cannot be shared out by data parallelism.
      TrainingSpec training = training_of(given ? 2 : 1, DataType::bf16);
      training.sequence_length = sequence;
      LayoutRequest request;
      request[Choice::schedule] = ScheduleKind::one_f_one_b;
      request[Choice::recompute] = Recompute::none;
      request[Choice::input_slots] = InputSlots::in_flight;
      if (given) request[Choice::cp] = 2;
      else request[Choice::cp_method] = ContextMethod::all_gather;
      struct Tried {
        ParallelSpec spec;
        StepResult result;
      };
      std::vector<Tried> all;
      NetworkCache networks(cluster);
      for (const ParallelSpec& spec : enumerate_specs(graph, training, 4, request)) {
        std::vector<bool> cuts(static_cast<std::size_t>(blocks - 1));
        std::fill(cuts.end() - (spec.stages() - 1), cuts.end(), true);
        do {
          ParallelSpec one = spec;
          one.stage_blocks = {1};
          for (const bool is_cut : cuts)
            if (is_cut) one.stage_blocks.push_back(1);
            else ++one.stage_blocks.back();
          all.push_back({one, simulate_spec(graph, networks, training, one, place(graph, one),
                                            schedule_of(one, training), nullptr)});
        } while (std::next_permutation(cuts.begin(), cuts.end()));
      }
      std::ranges::sort(all, {}, [](const Tried& one) { return one.result.memory.peak(); });
      if (tight) cluster.groups.front().device.memory_capacity = all[all.size() / 5].result.memory.peak();
      SearchOptions options;
      options.fewer_devices = false;
      options.most_simulated = 1 << 20;
      for (const Objective objective : {Objective::time, Objective::memory}) {
        options.objective = objective;
        const SearchResult found = search(graph, cluster, training, request, options);
        REQUIRE(!found.plans.empty());
        const auto score_of = [&](const ParallelSpec& spec, const StepResult& result) {
          return score(objective, cluster, spec, result.time.total(), result.memory);
        };
        Score best = score_of(all.front().spec, all.front().result);
        for (const Tried& one : all)
          if (one.result.memory.peak() <= cluster.groups.front().device.memory_capacity)
            best = std::min(best, score_of(one.spec, one.result));
        Score least = score_of(found.plans.front().spec, found.plans.front().result);
        for (const RankedPlan& plan : found.plans) least = std::min(least, score_of(plan.spec, plan.result));
        INFO(describe_context(found.plans.front().spec));
        CHECK(least == best);
        CHECK(found.counts.certified);
        context_won = context_won || (!given && found.plans.front().spec.cp() > 1);
      }
    }
  }
  CHECK(context_won);
}

TEST_CASE("context parallelism is searched where each rank has 1,024 tokens, and where it is asked for") {
  const TrainingSpec training = training_of(4, DataType::fp32);
  const OpGraph graph = graph_of("tiny-llama", 16);
  CHECK(!has_context(graph, training, {}));
  CHECK(has_context(graph, training, {{Choice::cp, 2}}));
  CHECK(!has_context(graph, training, {{Choice::cp, 1}}));
  CHECK(has_context(graph, training, {{Choice::cp_method, ContextMethod::ulysses}}));
  const LayoutRequest degrees{{Choice::dp, 2}, {Choice::tp, 1}, {Choice::pp, 1}};
  const OpGraph of_long = graph_of("tiny-llama", long_sequence);
  CHECK(has_context(of_long, training, {}));
  CHECK(!has_context(of_long, training, degrees));
  // From the shortest sequence on, over as many ranks as have enough tokens each.
  CHECK(!has_context(graph_of("tiny-llama", shortest_shared_sequence - 2), training, {}));
  const OpGraph shared = graph_of("tiny-llama", shortest_shared_sequence);
  CHECK(has_context(shared, training, {}));
  CHECK(usual_width(shared, training.engine, {}).most_context_ranks == shortest_shared_sequence / least_shared_tokens);
  CHECK(usual_width(shared, training.engine, {{Choice::cp, 64}}).most_context_ranks == any_context_ranks);
  // In exchange for heads from a longer one on, or where the request asks for it.
  const auto exchanged_by = [&](std::int64_t sequence, const LayoutRequest& request) {
    return usual_width(graph_of("tiny-llama", sequence), training.engine, request).most_exchange_ranks;
  };
  CHECK(exchanged_by(shortest_shared_sequence, {}) == 1);
  CHECK(exchanged_by(shortest_shared_sequence, {{Choice::cp_method, ContextMethod::ulysses}}) == any_context_ranks);
  CHECK(exchanged_by(medium_sequence, {}) == any_context_ranks);
  // Deep models from that on alone.
  OpGraph deep = graph_of("tiny-llama", shortest_shared_sequence);
  deep.blocks.resize(deep_model + 1);
  CHECK(usual_width(deep, training.engine, {}).most_context_ranks == 1);
  deep.sequence = medium_sequence;
  CHECK(usual_width(deep, training.engine, {}).most_context_ranks == medium_sequence / least_shared_tokens);
  Engine without;
  without.has_context = false;
  CHECK(usual_width(shared, without, {}).most_context_ranks == 1);
}

}  // namespace parplan
