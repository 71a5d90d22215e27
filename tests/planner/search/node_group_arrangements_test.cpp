#include "planner/search/node_group_arrangements.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/base/error.h"
#include "planner/cluster/find_cluster.h"
#include "planner/cluster/price_and_power.h"
#include "planner/parallel/techniques.h"
#include "planner/plan/objective.h"
#include "planner/schedule/schedules.h"
#include "planner/suggest.h"

namespace parplan {
namespace {

const std::string source = PARPLAN_SOURCE_DIR;

Cluster named(const std::string& name, int nodes) {
  return find_cluster(name, {source + "/configs/devices", source + "/configs/clusters"},
                      {.device = {}, .network = {}, .devices = {}, .nodes = nodes});
}

// DGX-1 before DGX A100: the slow nodes come first.
Cluster slow_first(int slow, int fast) {
  Cluster cluster = named("dgx-1-v100", slow);
  cluster.name = "slow first";
  cluster.groups.push_back(named("dgx-a100", fast).groups.front());
  return cluster;
}

OpGraph tiny() { return build_graph(load_model(source + "/tests/data/models/tiny-gpt2.yaml", "").spec, 16); }

TrainingSpec training_of(std::int64_t batch) {
  TrainingSpec training;
  training.global_batch = batch;
  training.sequence_length = 16;
  training.precision = DataType::fp16;
  return training;
}

std::string kinds(const Cluster& cluster) {
  std::string text;
  for (const NodeGroup& group : cluster.groups) text += group.device.name.substr(0, 1);
  return text;
}

TEST_CASE("groups of unlike nodes are arranged in every choice and order, the cluster as it stands first") {
  const auto all = [](const Cluster& cluster) {
    std::vector<std::string> texts;
    for (const Cluster& one : arrangements(cluster)) texts.push_back(kinds(one));
    return texts;
  };
  Cluster cluster = slow_first(1, 1);
  CHECK(all(cluster) == std::vector<std::string>{"va", "v", "av", "a"});
  CHECK(all(named("dgx-a100", 4)) == std::vector<std::string>{"a"});

  cluster.groups.push_back(named("dgx-h100", 1).groups.front());
  std::vector<std::string> three = all(cluster);
  CHECK(three.front() == "vah");
  CHECK(three.size() == 15);
  std::ranges::sort(three);
  CHECK(std::ranges::adjacent_find(three) == three.end());

  cluster.groups.push_back(named("dgx-b200", 1).groups.front());
  CHECK(all(cluster) == std::vector<std::string>{"vahb", "vah", "va", "v", "a", "h", "b"});

  // Nodes that share a switch keep their order; one switch for all joins any.
  cluster = slow_first(2, 2);
  cluster.network.levels = {{.name = "leaf", .nodes = 2, .oversubscription = 1.0, .latency = Seconds(1e-6)},
                            {.name = "spine", .nodes = {}, .oversubscription = 2.0, .latency = Seconds(2e-6)}};
  CHECK(all(cluster) == std::vector<std::string>{"va"});
  cluster.network.levels.erase(cluster.network.levels.begin());
  CHECK(all(cluster).size() == 4);
}

TEST_CASE("of unlike nodes the plan is the best that any arrangement has") {
  const OpGraph graph = tiny();
  for (const Objective objective : {Objective::time, Objective::cost, Objective::memory})
    for (const int slow : {1, 2}) {
      Cluster cluster = slow_first(slow, 1);
      cluster.groups[0].price = Price{.per_device_hour = 3.0, .currency = "USD"};
      cluster.groups[1].price = Price{.per_device_hour = 2.0, .currency = "USD"};
      for (const std::int64_t batch : {16, 4096}) {
        if (batch > 16 && slow > 1 && objective != Objective::time) continue;  // the search takes seconds
        INFO(name(objective) << ", " << slow << " slow nodes, batch " << batch);
        const TrainingSpec training = training_of(batch);
        SearchOptions options;
        options.top = 5;
        options.objective = objective;
        options.most_simulated = 1 << 20;
        LayoutRequest request;
        // One slow node is enough for the least memory among all cuts and mixes of recompute.
        if (batch > 16 || (objective == Objective::memory && slow > 1)) request[Choice::recompute] = Recompute::none;
        const ArrangedResult arranged = search_arrangements(graph, cluster, training, request, options);
        REQUIRE(!arranged.found.plans.empty());
        const auto score_of = [&](const Cluster& on, const RankedPlan& plan) {
          return score(objective, on, plan.spec, plan.result.time.total(), plan.result.memory);
        };
        std::set<std::pair<ParallelSpec, std::string>> known;
        std::vector<Score> scores;
        std::int64_t candidates = 0;
        for (const Cluster& one : arrangements(cluster)) {
          const SearchResult found = search(graph, one, training, request, options);
          candidates += found.counts.candidates;
          // Arrangements that begin alike have plans in common.
          for (const RankedPlan& plan : found.plans) {
            const Score own = score_of(one, plan);
            const Cluster used = first_nodes(one, plan.spec.mesh.size());
            if (!known.emplace(plan.spec, describe_groups(used)).second) continue;
            scores.push_back(own);
          }
        }
        // Those behind the best are the best of all arrangements.
        std::ranges::sort(scores);
        const double least = scores.front().first;
        REQUIRE(arranged.found.plans.size() == std::min<std::size_t>(scores.size(), 5));
        for (std::size_t i = 0; i < arranged.found.plans.size(); ++i) {
          const RankedPlan& plan = arranged.found.plans[i];
          const Cluster& on = plan.on ? plan.on->cluster : arranged.cluster;
          CHECK(score_of(on, plan).first == doctest::Approx(scores[i].first).epsilon(2 * tied_plans));
          CHECK(first_nodes(on, plan.spec.mesh.size()).devices() >= plan.spec.mesh.size());
        }
        CHECK(score_of(arranged.cluster, arranged.found.plans.front()).first == doctest::Approx(least).epsilon(1e-9));
        // Fewer: what cannot beat the best plan of the arrangements before is not looked into.
        CHECK(arranged.found.counts.candidates <= candidates);
        CHECK(arranged.found.counts.certified);
        CHECK(arranged.as_stands.has_value() == (arranged.cluster != cluster));
        if (arranged.as_stands) CHECK(score_of(cluster, *arranged.as_stands).first > least);
      }
    }
}

// Eight slow devices and eight fast ones.
SuggestRequest slow_and_fast(const OpGraph& graph) {
  SuggestRequest request;
  request.graph = &graph;
  request.model_name = "tiny-gpt2";
  request.cluster = slow_first(1, 1);
  request.training = training_of(4096);
  return request;
}

TEST_CASE("as many devices as one group has go to the fast one, wherever it stands, and the plan says so") {
  const OpGraph graph = tiny();
  SuggestRequest request = slow_and_fast(graph);
  request.layout[Choice::dp] = 8;
  request.layout[Choice::tp] = request.layout[Choice::pp] = 1;
  const SuggestResult found = suggest(request);
  REQUIRE(found.plan);
  CHECK(found.plan->cluster.group_of(0).device.name == "a100-sxm4-80gb");
  REQUIRE(found.plan->notes.size() >= 1);
  CHECK(found.plan->notes.front().starts_with(
      "takes 1 node of 8 x a100-sxm4-80gb alone, of 1 node of 8 x v100-sxm2-32gb, 1 node of 8 x a100-sxm4-80gb: "
      "the best plan of the cluster as it stands, dp8 tp1 pp1"));
  // A requested simulation uses the cluster unchanged.
  request.layout[Choice::zero_stage] = 0;
  request.layout[Choice::micro_batch] = 1;
  CHECK(simulate_layout(request).cluster == request.cluster);
}

TEST_CASE("a plan that leaves slow nodes out trains in the precision of those that it takes") {
  const OpGraph graph = tiny();
  SuggestRequest request = slow_and_fast(graph);
  request.training.precision = DataType::fp16;
  request.precision_of = [](const Cluster& cluster) {
    return has_units(cluster, DataType::bf16) ? DataType::bf16 : DataType::fp16;
  };
  request.layout[Choice::dp] = 8;
  request.layout[Choice::tp] = request.layout[Choice::pp] = 1;
  const SuggestResult alone = suggest(request);
  REQUIRE(alone.plan);
  CHECK(alone.plan->training.precision == DataType::bf16);
  CHECK(alone.plan->notes.front().find(": they train in bf16, all devices together in fp16; the best plan of") !=
        std::string::npos);
  // The prediction is that of the plan as it is written.
  CHECK(simulate_plan(graph, *alone.plan).time.total() == alone.plan->prediction.time.total());
  // Given, it holds for all.
  request.precision_of = nullptr;
  CHECK(suggest(request).plan->training.precision == DataType::fp16);
  // On both kinds, it is what both have.
  request.layout[Choice::dp] = 16;
  request.precision_of = [](const Cluster& cluster) {
    return has_units(cluster, DataType::bf16) ? DataType::bf16 : DataType::fp16;
  };
  CHECK(suggest(request).plan->training.precision == DataType::fp16);
}

TEST_CASE("where nothing fits, what needs the least is known also of first nodes that train in their own precision") {
  const OpGraph graph = tiny();
  SuggestRequest request = slow_and_fast(graph);
  std::ranges::reverse(request.cluster.groups);  // all devices together have no bf16, the first eight do
  for (NodeGroup& group : request.cluster.groups)
    group.device.memory_capacity = group.device.memory_overhead + Bytes(10'000);
  request.training.precision = DataType::fp16;
  request.precision_of = [](const Cluster& cluster) {
    return has_units(cluster, DataType::bf16) ? DataType::bf16 : DataType::fp16;
  };
  request.layout[Choice::tp] = request.layout[Choice::pp] = 1;
  for (const int dp : {8, 16}) {
    request.layout[Choice::dp] = dp;
    const SuggestResult found = suggest(request);
    CHECK(!found.plan);
    REQUIRE(found.shortage);
    CHECK(found.shortage->home == Home::device);
    CHECK(std::ranges::any_of(found.remedies, [](const Remedy& one) { return one.of == "memory"; }));
  }
  // Without degrees, the cluster as it stands says it.
  request.layout = {};
  const ArrangedResult any = search_arrangements(graph, request.cluster, request.training, {}, request.options,
                                                 request.precision_of);
  REQUIRE(any.found.smallest);
  request.options.fewer_devices = false;
  const ArrangedResult whole = search_arrangements(graph, request.cluster, request.training, {}, request.options,
                                                   request.precision_of);
  REQUIRE(whole.found.smallest);
  CHECK(any.found.smallest->result.memory.peak() <= whole.found.smallest->result.memory.peak());
}

TEST_CASE("an offload asks for the host's rates of the nodes that a plan uses alone") {
  const OpGraph graph = tiny();
  SuggestRequest request = slow_and_fast(graph);
  request.training.global_batch = 64;
  request.layout[Choice::offload] = Offload{.optimizer = Home::host};
  request.layout[Choice::tp] = 1;
  for (const std::size_t without : {0u, 1u}) {
    INFO(without);
    SuggestRequest own = request;
    own.cluster.groups[1 - without].host = named("dgx-a100", 1).groups.front().host;
    own.cluster.groups[without].host.reset();
    // Without a host, no way over the node's PCIe counts either.
    const std::string with = own.cluster.groups[1 - without].device.name;
    for (const int degree : {1, 2}) {
      own.layout[Choice::pp] = degree;
      own.layout[Choice::dp] = 8 / degree;
      const SuggestResult found = suggest(own);
      REQUIRE(found.plan);
      CHECK(found.plan->cluster.groups.front().device.name == with);
      CHECK(found.plan->search.space.find("of those that state the rates of the offload's homes") !=
            std::string::npos);
      // A requested simulation uses the first devices.
      own.layout[Choice::micro_batch] = 1;
      own.layout[Choice::zero_stage] = 0;
      if (without == 1)
        CHECK(simulate_layout(own).prediction.time.optimizer.value > 0.0);
      else
        CHECK_THROWS_AS(simulate_layout(own), ConfigError);
    }
    own.layout = {};
    own.layout[Choice::offload] = Offload{.optimizer = Home::host};
    own.layout[Choice::recompute] = Recompute::none;
    const SuggestResult free = suggest(own);
    REQUIRE(free.plan);
    CHECK(free.plan->cluster.groups.front().device.name == with);
    CHECK(free.plan->spec.mesh.size() <= 8);
    // Changes that would help use devices that have a host, too.
    SuggestRequest full = own;
    full.layout[Choice::tp] = full.layout[Choice::pp] = 1;
    full.layout[Choice::dp] = 8;
    full.layout[Choice::zero_stage] = 0;
    for (NodeGroup& group : full.cluster.groups)
      group.device.memory_capacity = group.device.memory_overhead + Bytes(10'000);
    const SuggestResult none = suggest(full);
    CHECK(!none.plan);
    for (const Remedy& one : none.remedies) CHECK(one.plan.spec.mesh.size() <= 8);
    CHECK(std::ranges::any_of(none.remedies, [](const Remedy& one) { return one.of == "memory"; }) == (without == 1));
    CHECK(none.shortage.has_value() == (without == 1));
    // All devices are more than those that have one.
    own.layout[Choice::tp] = own.layout[Choice::pp] = 1;
    own.layout[Choice::dp] = 16;
    CHECK_THROWS_AS(suggest(own), ConfigError);
    CHECK_THROWS_AS(simulate_layout(own), ConfigError);
    own.layout[Choice::dp] = 8;
    for (NodeGroup& group : own.cluster.groups) group.host.reset();
    CHECK_THROWS_AS(suggest(own), ConfigError);
  }
}

TEST_CASE("plans behind the best say on which nodes they are, and in which precision, as their results do") {
  const OpGraph graph = tiny();
  SuggestRequest request = slow_and_fast(graph);
  request.training.global_batch = 64;
  request.precision_of = [](const Cluster& cluster) {
    return has_units(cluster, DataType::bf16) ? DataType::bf16 : DataType::fp16;
  };
  request.layout[Choice::tp] = std::int64_t{1};
  request.layout[Choice::recompute] = Recompute::none;
  // So many that some are of all devices.
  request.options.top = 40;
  request.options.top_each = 1;
  const SuggestResult found = suggest(request);
  REQUIRE(found.plan);
  int elsewhere = 0, in_other_precision = 0;
  for (const RankedPlan& other : found.plan->alternatives) {
    Plan alone = *found.plan;
    alone.cluster = cluster_of(alone, other);
    alone.training = training_of(alone, other);
    alone.spec = other.spec;
    alone.placements = place(graph, alone.spec);
    alone.schedule = schedule_of(alone.spec, alone.training);
    CHECK(simulate_plan(graph, alone).time.total() == other.result.time.total());
    CHECK(other.result.time.total() >= found.plan->prediction.time.total() * (1 - tied_plans));
    elsewhere += other.on.has_value();
    in_other_precision += other.on && other.on->training.precision != found.plan->training.precision;
    if (other.on) CHECK(other.on->cluster != found.plan->cluster);
  }
  CHECK(elsewhere > 0);
  CHECK(in_other_precision > 0);
}

TEST_CASE("what one arrangement's search leaves open is open, unless another's plan is below it") {
  const OpGraph graph = tiny();
  const Cluster cluster = slow_first(1, 1);
  SearchOptions options;
  options.top = 1;
  options.most_simulated = 1;
  const ArrangedResult one = search_arrangements(graph, cluster, training_of(4096), {}, options);
  options.most_simulated = 1 << 20;
  const ArrangedResult all = search_arrangements(graph, cluster, training_of(4096), {}, options);
  const double found = one.found.plans.front().result.time.total().value;
  const double best = all.found.plans.front().result.time.total().value;
  CHECK(found >= best);
  if (one.found.counts.certified) CHECK(found == doctest::Approx(best).epsilon(1e-9));
  if (one.found.counts.gap) CHECK(found / best - 1.0 <= *one.found.counts.gap + 1e-9);
}

}  // namespace
}  // namespace parplan
