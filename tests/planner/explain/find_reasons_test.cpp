#include "planner/explain/find_reasons.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "planner/base/text.h"
#include "planner/explain/layout_families.h"
#include "planner/explain/sensitivity.h"
#include "planner/parallel/techniques.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/report/error_band.h"
#include "planner/report/explain.h"
#include "planner/report/explain_json.h"
#include "planner/report/explain_words.h"
#include "planner/schedule/schedules.h"
#include "planner/suggest.h"
#include "tests/planner/explain/small_requests.h"

namespace parplan {

using testing::cluster_of;
using testing::describe;
using testing::graph_of;
using testing::nodes_of;
using testing::request_of;
using testing::source;
using testing::step;

TEST_CASE("the quick and the searched answer to what binds agree") {
  struct Case {
    const char* model;
    const char* cluster;
    int nodes;
    std::int64_t batch;
    LayoutRequest layout;
    Constraint binding;
    bool parts_tell;
  };
  LayoutRequest long_pipeline;
  long_pipeline[Choice::dp] = long_pipeline[Choice::tp] = 1;
  long_pipeline[Choice::pp] = 8;
  long_pipeline[Choice::micro_batch] = 1;
  long_pipeline[Choice::schedule] = ScheduleKind::one_f_one_b;
  LayoutRequest mixed;
  mixed[Choice::dp] = mixed[Choice::tp] = 4;
  mixed[Choice::pp] = 2;
  mixed[Choice::zero_stage] = 1;
  mixed[Choice::micro_batch] = 1;
  mixed[Choice::schedule] = ScheduleKind::gpipe;
  mixed[Choice::sequence_parallel] = true;
  LayoutRequest data;
  data[Choice::dp] = 32;
  data[Choice::zero_stage] = 1;
  data[Choice::micro_batch] = 1;
  for (const Case& one : {Case{"gpt2", "dgx-a100", 1, 1024, long_pipeline, Constraint::compute,
                               true},  // the head takes longer than any other stage
                          Case{"gpt2", "azure-ndv2", 4, 16, mixed, Constraint::communication, true},  // one NIC a node
                          // GPUs reach the network by PCIe and a NIC of the same rate each. More is
                          // communicated than is waited for: computation hides it.
                          Case{"gpt2-xl", "dgx-b200", 4, 32, data, Constraint::communication, false}}) {
    INFO(std::string(one.model) << " on " << std::string(one.cluster));
    const OpGraph graph = build_graph(load_model(source + "/models/" + one.model + ".yaml", "").spec, 1024);
    SuggestRequest request = request_of(graph, cluster_of(one.cluster), one.batch);
    request.cluster.groups.front().nodes = one.nodes;
    if (!has_units(request.cluster, DataType::bf16)) request.training.precision = DataType::fp16;
    request.layout = one.layout;
    const Plan plan = simulate_layout(request);
    ReasonsOptions options;
    options.most_simulated = 1;
    const Reasons searched = find_reasons(graph, plan, options);
    CHECK(std::string(name(searched.binding)) == std::string(name(one.binding)));
    REQUIRE(relaxed(searched));
    if (one.nodes > 1) CHECK(relaxed(searched)->resource == Resource::links);
    for (const Variation& variation : searched.twice)
      if (variation.resource == Resource::network)
        CHECK(step(variation.plan.plan.result) < 0.99 * step(plan.prediction));
    options.searches = false;
    CHECK(std::string(name(find_reasons(graph, plan, options).binding)) == name(one.binding));
    if (one.parts_tell) CHECK(std::string(name(binding_constraint(plan))) == name(one.binding));
  }
}

TEST_CASE("the reasons of a certified plan agree with it") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  for (Cluster cluster : {cluster_of(source + "/tests/data/clusters/cpu-8.yaml", 4), cluster_of("dgx-a100", 16)}) {
    SuggestRequest request = request_of(graph, cluster, 16);
    const SuggestResult found = suggest(request);
    REQUIRE(found.plan);
    const Plan& plan = *found.plan;
    REQUIRE(plan.search.certified);
    INFO(cluster.name << ": " << layout_text(plan.spec));
    std::set<std::string> done;
    ReasonsOptions options;
    options.most_simulated = 1 << 20;
    options.progress = [&](const std::string& doing) { done.insert(doing); };
    const Reasons reasons = find_reasons(graph, plan, options);
    CHECK(done.size() > 10);
    const double own = step(plan.prediction);

    // Stage by stage and along the critical path the times sum to the predicted step.
    REQUIRE(static_cast<int>(reasons.details.ranks.size()) == plan.spec.pp());
    double path = 0.0;
    for (const CriticalWork& work : reasons.details.critical_path) path += work.time.value;
    CHECK(path == doctest::Approx(own).epsilon(1e-9));
    CHECK(std::ranges::max(reasons.details.ranks, {}, [](const RankResult& s) { return s.time.total(); })
              .time.total()
              .value == doctest::Approx(own).epsilon(1e-9));

    // No plan of another family, and none one choice away, is faster.
    int of_the_plan = 0;
    for (const FamilyBest& family : reasons.families) {
      INFO(family.family);
      if (family.best && family.best->fits()) CHECK(step(family.best->plan.result) >= own * (1 - 1e-9));
      CHECK(family.certified);
      if (!family.of_the_plan) continue;
      ++of_the_plan;
      CHECK(family.best->plan.spec == plan.spec);
    }
    REQUIRE(plan.spec.mesh.size() > 1);
    CHECK(of_the_plan == 1);
    CHECK(reasons.families.size() >= 4);
    for (const Neighbour& neighbour : reasons.neighbours) {
      INFO(neighbour.change);
      if (neighbour.rival.fits()) CHECK(step(neighbour.rival.plan.result) >= own * (1 - 1e-9));
      CHECK(neighbour.rival.plan.spec != plan.spec);
    }
    CHECK(!reasons.unrestricted);

    // More of any resource does not make the best plan slower, less does not make it faster; a plan
    // that is no longer the best has a faster one beside it.
    REQUIRE(relaxed(reasons));
    CHECK(reasons.twice.size() == (cluster.nodes() > 1 ? 6 : 4));
    for (const Variation& variation : reasons.sensitivity) {
      INFO(name(variation.resource) << " x " << variation.factor);
      REQUIRE(variation.best);
      const double then = step(variation.plan.plan.result);
      const double best = step(variation.best->result);
      if (variation.plan.fits()) CHECK(best <= then);
      CHECK((variation.best->spec != variation.plan.plan.spec) == variation.changes);
      if (variation.resource == Resource::global_batch) {
        CHECK(variation.global_batch % (plan.spec.dp() * variation.plan.plan.spec.micro_batch) == 0);
        CHECK(variation.factor != 1.0);
        CHECK((variation.factor > 1.0) == (variation.global_batch > plan.training.global_batch));
        continue;
      }
      if (variation.resource == Resource::memory) CHECK(then == doctest::Approx(own));
      if (variation.factor > 1.0) CHECK(best <= own * (1 + 1e-9));
      if (variation.factor < 1.0) CHECK(best >= own * (1 - 1e-9));
    }
    const std::size_t resources = cluster.nodes() > 1 ? 5 : 4;
    CHECK(reasons.sensitivity.size() == 2 * resources);
  }
}

TEST_CASE("a plan on all devices is told that fewer are faster, as things are and as they might be") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  SuggestRequest request = request_of(graph, cluster_of("dgx-a100", 16), 16);
  request.options.fewer_devices = false;
  const SuggestResult all = suggest(request);
  request.options.fewer_devices = true;
  const SuggestResult free = suggest(request);
  REQUIRE(all.plan);
  REQUIRE(free.plan);
  REQUIRE(free.plan->search.certified);
  REQUIRE(free.plan->spec.mesh.size() < 16);
  ReasonsOptions options;
  options.most_simulated = 1 << 20;
  const Reasons reasons = find_reasons(graph, *all.plan, options);
  REQUIRE(reasons.unrestricted);
  CHECK(step(reasons.unrestricted->best->result) == doctest::Approx(step(free.plan->prediction)).epsilon(1e-9));
  const auto more = std::ranges::find_if(
      reasons.sensitivity, [](const Variation& v) { return v.resource == Resource::global_batch && v.factor > 1.0; });
  REQUIRE(more != reasons.sensitivity.end());
  REQUIRE(more->best);
  request.training.global_batch = more->global_batch;
  CHECK(step(more->best->result) <= step(suggest(request).plan->prediction) * (1 + 5e-4));
}

TEST_CASE("a plan whose file promises something else is simulated anew, and its search forgotten") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  SuggestRequest request = request_of(graph, cluster_of(source + "/tests/data/clusters/cpu-8.yaml", 4), 16);
  request.layout[Choice::pp] = 2;
  const SuggestResult found = suggest(request);
  REQUIRE(found.plan);
  const Plan& plan = *found.plan;
  REQUIRE(!plan.alternatives.empty());
  const Plan same = simulated_anew(graph, plan);
  CHECK(same.prediction == plan.prediction);
  CHECK(same.alternatives == plan.alternatives);
  CHECK(same.search == plan.search);
  CHECK(same.notes == plan.notes);

  const int blocks = static_cast<int>(graph.blocks.size());
  Plan edited = plan;
  edited.spec.stage_blocks = {1, blocks - 1};
  REQUIRE(edited.spec.stage_blocks != plan.spec.stage_blocks);
  Plan of_another_version = plan;
  of_another_version.prediction.time.compute *= 1.001;
  Plan of_other_memory = plan;
  of_other_memory.prediction.memory.buffers += Bytes(1);
  for (const Plan& one : {edited, of_another_version, of_other_memory}) {
    const Plan anew = simulated_anew(graph, one);
    CHECK(!(anew.prediction == one.prediction));
    CHECK((anew.prediction == plan.prediction) == (one.spec == plan.spec));
    CHECK(anew.alternatives.empty());
    CHECK(anew.search == SearchCounts{});
    REQUIRE(anew.notes.size() == plan.notes.size() + 1);
    CHECK(anew.notes.back().starts_with("the file promises a step of " + format_duration(one.prediction.time.total()) +
                                        " and "));
    CHECK(simulated_anew(graph, anew).notes == anew.notes);
    // The parts equal those of the whole.
    ReasonsOptions options;
    options.searches = false;
    double path = 0.0;
    for (const CriticalWork& work : find_reasons(graph, anew, options).details.critical_path) path += work.time.value;
    CHECK(path == doctest::Approx(step(anew.prediction)).epsilon(1e-9));
  }
}

TEST_CASE("the reasons do not depend on how many threads look for them") {
  const OpGraph graph = graph_of("tiny-llama", 16);
  const SuggestResult found = suggest(request_of(graph, cluster_of("dgx-a100"), 64));
  REQUIRE(found.plan);
  const auto plan_of = [](const RankedPlan& one) {
    return fmt::format("{} cut {} in {}", describe(one.spec), fmt::join(one.spec.stage_blocks, ","),
                       one.result.time.total().value);
  };
  const auto found_by = [&](int threads) {
    ReasonsOptions options;
    options.threads = threads;
    const Reasons reasons = find_reasons(graph, *found.plan, options);
    std::vector<std::string> all;
    for (const FamilyBest& family : reasons.families)
      all.push_back(
          fmt::format("{}: {} {}", family.family, family.best ? plan_of(family.best->plan) : "none", family.certified));
    for (const Neighbour& neighbour : reasons.neighbours)
      all.push_back(neighbour.change + ": " + plan_of(neighbour.rival.plan));
    for (const std::vector<Variation>* variations : {&reasons.twice, &reasons.sensitivity})
      for (const Variation& one : *variations)
        all.push_back(fmt::format("{} x {}: {}, best {} {}", name(one.resource), one.factor, plan_of(one.plan.plan),
                                  one.best ? plan_of(*one.best) : "none", one.certified));
    return all;
  };
  const std::vector<std::string> alone = found_by(1);
  CHECK(alone.size() > 20);
  for (const int threads : {2, 5}) CHECK(found_by(threads) == alone);
}

TEST_CASE("without searches there are the plan's own numbers and those of its neighbours") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  const SuggestResult found = suggest(request_of(graph, cluster_of(source + "/tests/data/clusters/cpu-8.yaml", 4), 16));
  REQUIRE(found.plan);
  ReasonsOptions options;
  options.searches = false;
  const Reasons reasons = find_reasons(graph, *found.plan, options);
  CHECK(!reasons.details.critical_path.empty());
  CHECK(!reasons.neighbours.empty());
  CHECK(reasons.families.empty());
  CHECK(reasons.sensitivity.empty());
  CHECK(reasons.twice.empty());
  CHECK(relaxed(reasons) == nullptr);
  CHECK(!reasons.guide.one_device);
}

TEST_CASE("what is said of a plan's devices does not depend on nodes that it leaves out") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  ReasonsOptions options;
  options.searches = false;
  SuggestRequest request = request_of(graph, nodes_of(2, 1), 16);
  request.layout[Choice::dp] = 2;
  request.layout[Choice::zero_stage] = 3;
  DeviceKind& own = request.cluster.groups.front().device;
  own.memory_capacity = own.memory_overhead + Bytes(60'000);
  const Bytes capacity = own.memory_capacity;
  NodeGroup other = request.cluster.groups.front();
  other.device.name = "other";
  other.device.memory_capacity = capacity * 1000;
  const Plan without = simulate_layout(request);
  const Reasons alone = find_reasons(graph, without, options);
  request.cluster.groups.push_back(other);
  const Plan plan = simulate_layout(request);
  REQUIRE(plan.spec.mesh.size() == 2);
  const Reasons beside = find_reasons(graph, plan, options);
  REQUIRE(step_band(without)->spans.size() == 2);  // of the device, and of all
  CHECK(words_of(*step_band(plan)) == words_of(*step_band(without)));
  REQUIRE(alone.guide.largest_block);
  REQUIRE(beside.guide.largest_block);
  CHECK(beside.guide.largest_block->capacity == capacity);
  const auto doubled = [&](const Plan& of) {
    std::vector<Resource> resources;
    for (const Variation& one : double_without_searches({graph, of, options})) resources.push_back(one.resource);
    return resources;
  };
  const std::vector<Resource> of_one = doubled(plan);
  CHECK(std::ranges::find(of_one, Resource::network) == of_one.end());
  request.layout[Choice::dp] = 4;
  const Plan across = simulate_layout(request);
  const Reasons of_both = find_reasons(graph, across, options);
  CHECK(step_band(across)->spans.size() == 1);
  CHECK(!of_both.guide.largest_block);
  const std::vector<Resource> resources = doubled(across);
  CHECK(std::ranges::find(resources, Resource::network) != resources.end());
}

TEST_CASE("where unlike devices share stages, the slower kind decides, and the faster one waits for it") {
  const OpGraph graph = graph_of("tiny-llama", 16);
  const Cluster cluster = cluster_of(source + "/tests/data/clusters/cpu-two-kinds.yaml");
  const auto layout = [](int dp, int tp, int pp) {
    LayoutRequest request;
    request[Choice::dp] = dp;
    request[Choice::tp] = tp;
    request[Choice::pp] = pp;
    request[Choice::micro_batch] = 1;
    return request;
  };
  std::vector<LayoutRequest> layouts(5, layout(8, 1, 1));
  layouts[1][Choice::zero_stage] = 3;
  layouts[2][Choice::dp_method] = DataMethod::master;
  layouts[3] = layout(2, 4, 1);
  layouts[3][Choice::mesh_order] = parse_order("tp-pp-dp");
  layouts[4] = layout(2, 1, 4);
  layouts[4][Choice::mesh_order] = parse_order("dp-pp-tp");
  ReasonsOptions options;
  options.searches = false;
  for (const LayoutRequest& one : layouts) {
    SuggestRequest request = request_of(graph, cluster, 16);
    request.layout = one;
    const Plan plan = simulate_layout(request);
    INFO(describe(plan.spec));
    const Reasons reasons = find_reasons(graph, plan, options);
    const std::vector<RankResult>& ranks = reasons.details.ranks;
    REQUIRE(reasons.shared.size() == 2 * ranks.size());
    double least = 1e9, most = 0.0;  // what the fast cores wait for longer than the slow ones
    for (const KernelsOnGroup& on : reasons.shared) {
      // The slow cores are slower in everything, and three times as slow.
      const double shared = ranks[static_cast<std::size_t>(on.rank)].kernels.total().value;
      const double alone = on.kernels.value;
      REQUIRE(shared > 0.0);
      if (on.group == 1) {
        CHECK(alone / shared == doctest::Approx(1.0).epsilon(1e-9));
        continue;
      }
      CHECK(alone / shared == doctest::Approx(1.0 / 3.0).epsilon(0.01));
      least = std::min(least, shared - alone);
      most = std::max(most, shared - alone);
    }
    const ReportInputs inputs{
        .version = "", .model = plan.model, .cluster = cluster, .training = plan.training, .defaults = {}};
    const Json kinds = explain_json(inputs, plan, reasons).at("deciding_devices");
    REQUIRE(kinds.size() == 2);
    CHECK(kinds[0].at("device") == "One slow core");
    CHECK(kinds[0].at("critical_path_share") == 1.0);
    CHECK(kinds[1].at("device") == "One fast core");
    CHECK(kinds[1].at("critical_path_share") == 0.0);
    REQUIRE(kinds[1].at("ranks").size() == ranks.size());
    for (const Json& rank : kinds[1].at("ranks")) CHECK(rank.at("waits_for") == "One slow core");
    for (const Json& rank : kinds[0].at("ranks")) CHECK(!rank.contains("waits_for"));
    const auto of = [&](int kind, const char* key) { return kinds[kind].at(key).get<double>(); };
    CHECK(of(1, "least_waiting_s") >= (of(0, "least_waiting_s") + least) * (1 - 1e-9));
    CHECK(of(1, "most_waiting_s") <= (of(0, "most_waiting_s") + most) * (1 + 1e-9));
    CHECK(of(1, "most_waiting_s") < step(plan.prediction));
    const std::string text = explain(plan, reasons);
    CHECK(text.find("\nwhich device decides: One slow core, with 100.0 % of the computation on the critical path:\n") !=
          std::string::npos);
    CHECK(text.find(fmt::format("\n  One fast core waits for One slow core, with which it shares {}\n",
                                ranks.size() == 1 ? "stage 0" : "stages 0-3")) != std::string::npos);
  }
  // Nothing is shared where each stage is on one kind.
  SuggestRequest apart = request_of(graph, cluster, 16);
  apart.layout = layout(4, 1, 2);
  const Reasons reasons = find_reasons(graph, simulate_layout(apart), options);
  CHECK(reasons.shared.empty());
}

TEST_CASE("neighbours of a plan for another engine run under that engine") {
  OpGraph graph = graph_of("tiny-gpt2", 16);
  Engine engine;
  engine.name = "slow";
  engine.overlaps_data = engine.overlaps_tensor = engine.overlaps_pipeline = false;
  engine.host_per_op = Seconds(1e-4);
  SuggestRequest request = request_of(graph, nodes_of(4, 1), 16);
  request.training.engine = engine;
  const SuggestResult found = suggest(request);
  REQUIRE(found.plan);
  ReasonsOptions options;
  options.searches = false;
  const Reasons reasons = find_reasons(graph, *found.plan, options);
  REQUIRE(reasons.neighbours.size() > 3);
  for (const Neighbour& neighbour : reasons.neighbours) {
    INFO(neighbour.change << ": " << describe(neighbour.rival.plan.spec));
    Plan other = *found.plan;
    other.spec = neighbour.rival.plan.spec;
    other.placements = place(graph, other.spec);
    other.schedule = schedule_of(other.spec, other.training);
    CHECK(step(neighbour.rival.plan.result) == doctest::Approx(step(simulate_plan(graph, other))).epsilon(1e-9));
    // parplan's own runtime takes less.
    other.training.engine = {};
    CHECK(step(neighbour.rival.plan.result) > step(simulate_plan(graph, other)) * (1 + 1e-6));
  }
}

TEST_CASE("a plan of a given layout is told what a free search finds") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  SuggestRequest request = request_of(graph, cluster_of(source + "/tests/data/clusters/cpu-8.yaml", 4), 16);
  const SuggestResult free = suggest(request);
  request.layout[Choice::pp] = 4;
  request.layout[Choice::micro_batch] = 1;
  request.layout[Choice::schedule] = ScheduleKind::gpipe;
  request.layout[Choice::recompute] = Recompute::full;
  const SuggestResult fixed = suggest(request);
  REQUIRE(free.plan);
  REQUIRE(fixed.plan);
  REQUIRE(step(fixed.plan->prediction) > step(free.plan->prediction));
  const Reasons reasons = find_reasons(graph, *fixed.plan, {});
  REQUIRE(reasons.unrestricted);
  CHECK(step(reasons.unrestricted->best->result) < step(fixed.plan->prediction));
}

TEST_CASE("the reasons of a plan with another objective count by it") {
  const OpGraph graph = graph_of("tiny-gpt2", 32);
  Cluster cluster = cluster_of("dgx-a100", 8);
  cluster.groups.front().price = Price{.per_device_hour = 3.0, .currency = "USD"};
  for (const Objective objective : {Objective::cost, Objective::memory}) {
    INFO(name(objective));
    SuggestRequest request = request_of(graph, cluster, 16);
    request.options.objective = objective;
    request.options.most_simulated = 1 << 20;
    const SuggestResult found = suggest(request);
    REQUIRE(found.plan);
    const Plan& plan = *found.plan;
    CHECK(plan.search.objective == objective);
    ReasonsOptions options;
    options.most_simulated = 1 << 20;
    const Reasons reasons = find_reasons(graph, plan, options);
    // No plan has less of it: not among the alternatives, not in a family, not when the whole space
    // is searched.
    CHECK(!reasons.unrestricted);
    for (const Neighbour& neighbour : reasons.neighbours)
      if (neighbour.rival.fits()) CHECK(excess(plan, neighbour.rival.plan.spec, neighbour.rival.plan.result) >= -1e-9);
    CHECK(!reasons.families.empty());
    NetworkCache networks(cluster);
    for (const FamilyBest& family : reasons.families) {
      INFO(family.family);
      if (family.best && family.best->fits())
        CHECK(excess(plan, family.best->plan.spec, family.best->plan.result) >= -1e-9);
      // An alternative on fewer devices is not better than the best of its family.
      const auto own = std::ranges::find(layout_families(), family.family, &LayoutFamily::name);
      for (const RankedPlan& alternative : plan.alternatives) {
        if (!belongs(*own, alternative.spec, networks)) continue;
        REQUIRE(family.best);
        CHECK(excess(plan, family.best->plan.spec, family.best->plan.result) <=
              excess(plan, alternative.spec, alternative.result) + 1e-9);
      }
    }
    for (const Variation& variation : reasons.sensitivity) {
      const auto of = [&](const RankedPlan& p) {
        return score(objective, plan.cluster, p.spec, p.result.time.total(), p.result.memory);
      };
      REQUIRE(variation.best);
      CHECK(!better(of(variation.plan.plan), of(*variation.best), 1e-9));
    }
  }
}

TEST_CASE("a plan alone gets a runner-up") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  SuggestRequest request = request_of(graph, cluster_of(source + "/tests/data/clusters/cpu-8.yaml", 4), 16);
  const SuggestResult ranked = suggest(request);
  request.options.top = 1;
  const SuggestResult alone = suggest(request);
  REQUIRE(ranked.plan);
  REQUIRE(alone.plan);
  REQUIRE(alone.plan->alternatives.empty());
  CHECK(!find_reasons(graph, *ranked.plan, {}).runner_up);
  const Reasons reasons = find_reasons(graph, *alone.plan, {});
  REQUIRE(reasons.runner_up);
  CHECK(reasons.runner_up->spec != alone.plan->spec);
  CHECK(step(reasons.runner_up->result) <= step(ranked.plan->alternatives.front().result) * (1 + 1e-9));
  CHECK(step(reasons.runner_up->result) >= step(alone.plan->prediction) * (1 - 1e-9));
}

TEST_CASE("why devices are left idle is said as far as it is known") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  Cluster cluster = cluster_of("dgx-h100", 8);
  cluster.groups.front().price = Price{.per_device_hour = 3.0, .currency = "USD"};
  struct Case {
    Objective objective;
    std::optional<int> dp, tp, pp;
    std::int64_t most_simulated;
    std::string note;
  };
  for (const Case& one :
       {Case{Objective::time, {}, {}, {}, 1 << 20, ": no plan on all of them is faster"},
        Case{Objective::time, {}, 1, 1, 1 << 20, ": no plan on all of them with what was given is faster"},
        Case{Objective::time, 1, 1, 1, 1 << 20, ", as the layout that was given does"},
        Case{Objective::cost, {}, {}, {}, 1 << 20, ": no plan on all of them costs less"}}) {
    SuggestRequest request = request_of(graph, cluster, 8);
    request.options.objective = one.objective;
    request.options.most_simulated = one.most_simulated;
    request.layout[Choice::dp] = one.dp;
    request.layout[Choice::tp] = one.tp;
    request.layout[Choice::pp] = one.pp;
    const SuggestResult found = suggest(request);
    REQUIRE(found.plan);
    REQUIRE(found.plan->spec.mesh.size() < 8);
    CHECK(join(found.plan->notes) == fmt::format("uses {} of 8 devices{}", found.plan->spec.mesh.size(), one.note));
  }
  SuggestRequest request = request_of(graph, cluster, 8);
  request.layout[Choice::dp] = 2;
  CHECK(join(simulate_layout(request).notes) == "uses 2 of 8 devices, as the layout that was given does");
  request.options.most_simulated = 1;
  request.layout[Choice::dp].reset();
  const SuggestResult cut = suggest(request);
  REQUIRE(!cut.plan->search.certified);
  REQUIRE(cut.plan->spec.mesh.size() < 8);
  CHECK(cut.plan->notes.front().ends_with(
      " of 8 devices: the search found no plan on all of them that is faster, and looked at a part of them only"));
}

TEST_CASE("a neighbour that its host has no room for does not fit, and its loss says so") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  SuggestRequest request = request_of(graph, cluster_of("dgx-a100", 8), 16);
  // Room for the optimizer's state where ranks share it out, not where each has all of it.
  request.cluster.groups.front().host->memory = Bytes(4 << 20);
  request.layout = {{Choice::dp, 8}, {Choice::tp, 1}, {Choice::pp, 1}, {Choice::zero_stage, 1},
                    {Choice::micro_batch, 1}, {Choice::offload, Offload{.optimizer = Home::host}}};
  const Plan plan = simulate_layout(request);
  REQUIRE(!shortage_of(plan.cluster, plan.spec, plan.prediction));
  ReasonsOptions options;
  options.searches = false;
  const Reasons reasons = find_reasons(graph, plan, options);
  int homeless = 0;
  for (const Neighbour& neighbour : reasons.neighbours) {
    const Rival& rival = neighbour.rival;
    INFO(layout_text(rival.plan.spec));
    const std::optional<Shortage> lack = shortage_of(plan.cluster, rival.plan.spec, rival.plan.result);
    CHECK(rival.fits() == !lack);
    if (!lack || lack->home != Home::host) continue;
    ++homeless;
    CHECK(loss(plan, rival) == "does not fit: " + words_of(*lack));
  }
  CHECK(homeless > 0);
  REQUIRE(reasons.runner_up);
  CHECK(!shortage_of(plan.cluster, reasons.runner_up->spec, reasons.runner_up->result));
}

}  // namespace parplan
