#include "planner/explain/find_reasons.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <set>
#include <tuple>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/base/text.h"
#include "planner/cluster/catalog.h"
#include "planner/cluster/node_layout.h"
#include "planner/explain/layout_families.h"
#include "planner/explain/sensitivity.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/search/space.h"
#include "planner/suggest.h"

namespace parplan {
namespace {

const std::string source = PARPLAN_SOURCE_DIR;

OpGraph graph_of(const std::string& model, std::int64_t sequence) {
  return build_graph(load_model(source + "/tests/data/models/" + model + ".yaml", "").spec, sequence);
}

Cluster cluster_of(const std::string& name, std::optional<int> devices = {}) {
  return find_cluster(name, {source + "/configs/devices", source + "/configs/clusters"},
                      {.device = {}, .network = {}, .devices = devices, .nodes = {}});
}

SuggestRequest request_of(const OpGraph& graph, Cluster cluster, std::int64_t batch) {
  SuggestRequest request;
  request.graph = &graph;
  request.model_name = "tiny";
  request.cluster = std::move(cluster);
  request.training.global_batch = batch;
  request.training.sequence_length = graph.sequence;
  request.training.precision = request.cluster.backend() == BackendKind::cpu ? DataType::fp32 : DataType::bf16;
  return request;
}

// The first of a DGX A100's GPUs in each node.
Cluster nodes_of(int devices_per_node, int nodes) {
  Cluster cluster = cluster_of("dgx-a100", 16);
  NodeGroup& group = cluster.groups.front();
  group.node = first_devices(group.node, devices_per_node);
  group.nodes = nodes;
  return cluster;
}

double step(const StepResult& result) { return result.time.total().value; }

}  // namespace

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

TEST_CASE("a varied cluster has more of one thing alone") {
  const Cluster cluster = cluster_of("dgx-a100", 16);
  CHECK(varied(cluster, Resource::compute, 1.0) == cluster);
  const Cluster memory = varied(cluster, Resource::memory, 2.0);
  CHECK(memory.groups.front().device.memory_capacity == cluster.groups.front().device.memory_capacity * 2);
  CHECK(memory.groups.front().node == cluster.groups.front().node);
  CHECK(varied(cluster, Resource::network, 3.0).groups.front().device == cluster.groups.front().device);
}

TEST_CASE("the network is what leads there alone, and with the links inside nodes it is all links") {
  struct Case {
    const char* cluster;
    int network;  // links
  };
  // Behind NVSwitch each of eight GPUs has a path over a PCIe switch to its own NIC: three links
  // each. Without NVLink everywhere, devices reach one another by PCIe switches and host bridges,
  // and the links from there over NICs to the network are the whole network.
  for (const Case& one : {Case{"dgx-a100", 8 * 3}, Case{"dgx-h100", 8 * 3}, Case{"gaudi2-8", 8 * 2},
                          Case{"dgx-1-v100", 4 * 2}, Case{"azure-ndv2", 2}}) {
    INFO(one.cluster);
    const Cluster cluster = cluster_of(one.cluster, 16);
    const auto links = [](const Cluster& of) -> const std::vector<Link>& { return of.groups.front().node.links; };
    const Cluster wider = varied(cluster, Resource::network, 3.0);
    const Cluster faster = varied(cluster, Resource::node_links, 3.0);
    const Cluster both = varied(cluster, Resource::links, 3.0);
    int network = 0;
    for (std::size_t i = 0; i < links(cluster).size(); ++i) {
      const BytesPerSecond now = links(cluster)[i].bandwidth;
      const bool of_network = links(wider)[i].bandwidth != now;
      CHECK((links(faster)[i].bandwidth != now) == !of_network);
      CHECK(links(both)[i].bandwidth == now * 3.0);
      network += of_network ? 1 : 0;
    }
    CHECK(network == one.network);
  }
}

TEST_CASE("twice the network is felt between nodes on every cluster that is named, and under every fabric") {
  int clusters = 0;
  for (const auto& file : std::filesystem::directory_iterator(source + "/configs/clusters")) {
    if (file.path().extension() != ".yaml") continue;
    Cluster cluster = cluster_of(file.path().string());
    cluster.groups.front().nodes = 4;
    const int per_node = cluster.groups.front().devices_per_node();
    if (problem_with(cluster)) continue;  // no NICs
    INFO(cluster.name);
    ++clusters;
    // A group has one device of each node, and all devices send at once.
    const DeviceMesh mesh{.degree = {.dp = 4, .tp = per_node}, .order = {Axis::pp, Axis::dp, Axis::tp}};
    for (const std::vector<FabricLevel>& levels :
         {std::vector<FabricLevel>{},
          std::vector<FabricLevel>{{.name = "leaf", .nodes = 2, .latency = {}},
                                   {.name = "spine", .nodes = {}, .oversubscription = 4.0, .latency = {}}}}) {
      cluster.network.levels = levels;
      const auto ring = [&](const Cluster& of) { return group_network(of, mesh, Axis::dp).ring_bandwidth; };
      CHECK(ring(varied(cluster, Resource::network, 2.0)) >
            ring(cluster) * 1.6);  // of azure-ndv2 the GPUs behind the other socket share that link then
      CHECK(ring(varied(cluster, Resource::links, 2.0)) / ring(cluster) == doctest::Approx(2.0));
    }
  }
  CHECK(clusters > 10);
}

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
  mixed[Choice::dp] = 2;
  mixed[Choice::tp] = mixed[Choice::pp] = 4;
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
                          Case{"gpt2-xl", "dgx-h100", 4, 32, data, Constraint::communication, false}}) {
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

TEST_CASE("devices that compute twice as fast take half of the time, where nothing is communicated") {
  const OpGraph graph = graph_of("tiny-llama", 16);
  for (const char* name : {"dgx-a100", "dgx-h100"}) {
    SuggestRequest request = request_of(graph, cluster_of(name, 1), 4);
    request.layout = {{Choice::dp, 1}, {Choice::tp, 1}, {Choice::pp, 1}};
    const double before = step(simulate_layout(request).prediction);
    request.cluster = varied(request.cluster, Resource::compute, 2.0);
    CHECK(step(simulate_layout(request).prediction) == doctest::Approx(before / 2.0).epsilon(1e-9));
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

TEST_CASE("less memory for a given layout is what a search with less memory finds") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  SuggestRequest request = request_of(graph, cluster_of("dgx-a100", 16), 32);
  request.layout[Choice::pp] = 4;
  request.layout[Choice::schedule] = ScheduleKind::gpipe;
  const SuggestResult fixed = suggest(request);
  REQUIRE(fixed.plan);
  REQUIRE(fixed.plan->search.certified);
  ReasonsOptions options;
  options.most_simulated = 64;
  const Reasons reasons = find_reasons(graph, *fixed.plan, options);
  const auto less = std::ranges::find_if(
      reasons.sensitivity, [](const Variation& v) { return v.resource == Resource::memory && v.factor < 1.0; });
  REQUIRE(less != reasons.sensitivity.end());
  REQUIRE(less->best);
  request.layout = {};
  request.cluster = varied(request.cluster, Resource::memory, 0.8);
  const SuggestResult free = suggest(request);
  REQUIRE(free.plan);
  CHECK(less->changes);
  CHECK(step(less->best->result) == doctest::Approx(step(free.plan->prediction)).epsilon(1e-9));
}

TEST_CASE("a batch of few micro-batches changes by sequences, in micro-batches that divide it") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  struct Case {
    int dp;
    std::int64_t batch, micro_batch;
    std::optional<std::pair<std::int64_t, std::int64_t>> less, more;  // batch, micro-batch
  };
  for (const Case& one : {Case{1, 4, 4, {{3, 3}}, {{5, 5}}},      // one micro-batch
                          Case{1, 10, 5, {{8, 4}}, {{12, 6}}},    // two
                          Case{2, 20, 2, {{16, 2}}, {{24, 2}}},   // five, of which four and six are a fifth away
                          Case{2, 2, 1, {}, {{4, 1}}}}) {         // a sequence a rank
    INFO("dp " << one.dp << " batch " << one.batch << " micro-batch " << one.micro_batch);
    SuggestRequest request =
        request_of(graph, cluster_of(source + "/tests/data/clusters/cpu-8.yaml", one.dp), one.batch);
    request.layout[Choice::dp] = one.dp;
    request.layout[Choice::micro_batch] = one.micro_batch;
    const Reasons reasons = find_reasons(graph, simulate_layout(request), {});
    std::optional<std::pair<std::int64_t, std::int64_t>> less, more;
    for (const Variation& variation : reasons.sensitivity)
      if (variation.resource == Resource::global_batch)
        (variation.factor < 1.0 ? less : more) =
            std::pair(variation.global_batch, variation.plan.plan.spec.micro_batch);
    CHECK(less == one.less);
    CHECK(more == one.more);
  }
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

TEST_CASE("the guide's rules are said when the numbers say so") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  SuggestRequest request = request_of(graph, cluster_of("dgx-a100", 16), 32);
  request.layout[Choice::pp] = 2;
  request.layout[Choice::tp] = 1;
  request.layout[Choice::dp] = 8;
  request.layout[Choice::zero_stage] = 1;
  request.layout[Choice::micro_batch] = 1;
  const SuggestResult found = suggest(request);
  REQUIRE(found.plan);
  const Plan& plan = *found.plan;
  const Reasons reasons = find_reasons(graph, plan, {});
  const Guide& guide = reasons.guide;
  // A tiny model: one device is enough, no block is too large.
  REQUIRE(guide.one_device);
  CHECK(guide.one_device->least.fits());
  CHECK(!guide.largest_block);
  // 4 micro-batches on 2 stages: 1 / (4 + 1).
  REQUIRE(guide.bubble);
  CHECK(guide.bubble->closed_form == doctest::Approx(0.2));
  CHECK(guide.bubble->enough == 8);
  CHECK(guide.bubble->closed_form_then == doctest::Approx(1.0 / 9.0));
  CHECK(guide.bubble->simulated == doctest::Approx(plan.prediction.time.bubble / plan.prediction.time.total()));
  // ZeRO-2 reduces gradients in each of the 4 micro-batches instead of once: it sends 4 (n - 1) / n
  // of them and gathers (n - 1) / n of the parameters once at the end (half the bytes of a
  // gradient), instead of 1 and 1/2: (4 + 1/2) / (1 + 1/2) = 3 times as much.
  REQUIRE(guide.sharded_pipeline.size() == 2);
  const Guide::ShardedPipeline& sharded = guide.sharded_pipeline.front();
  CHECK(sharded.rival.plan.spec.zero_stage == 2);
  CHECK(sharded.micro_batches == 4);
  CHECK(static_cast<double>(sharded.rival.plan.result.communication.dp.count) /
            static_cast<double>(sharded.sent.count) ==
        doctest::Approx(3.0).epsilon(0.01));
  CHECK(!guide.gathered);

  // Little memory: not even a block's state fits.
  SuggestRequest small = request_of(graph, cluster_of("dgx-a100", 16), 32);
  const std::int64_t overhead = small.cluster.groups.front().device.memory_overhead.count;
  small.cluster.groups.front().device.memory_capacity = Bytes(overhead + 200'000);
  small.layout[Choice::zero_stage] = 3;
  small.layout[Choice::dp] = 16;
  const Plan crowded = simulate_layout(small);
  const Guide none = find_reasons(graph, crowded, {}).guide;
  REQUIRE(none.one_device);
  CHECK(!none.one_device->least.fits());
  REQUIRE(none.largest_block);
  CHECK(none.largest_block->state.count > 200'000);
  REQUIRE(none.gathered);
  CHECK(none.gathered->micro_batches == 2);
}

TEST_CASE(
    "each kind of device is asked by itself whether one is enough, and the one with most memory whether a block is too "
    "large") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  for (const bool small_first : {true, false}) {
    INFO(small_first);
    SuggestRequest request = request_of(graph, nodes_of(2, 1), 16);
    std::vector<NodeGroup>& groups = request.cluster.groups;
    groups.push_back(groups.front());
    NodeGroup& small = groups[small_first ? 0 : 1];
    small.device.name = "small";
    small.device.memory_capacity = small.device.memory_overhead + Bytes(50'000);
    request.layout[Choice::dp] = 4;
    request.layout[Choice::zero_stage] = 3;
    const Plan plan = simulate_layout(request);
    const Guide guide = find_reasons(graph, plan, {}).guide;
    REQUIRE(guide.one_device);
    CHECK(guide.one_device->least.fits());
    CHECK(device_name(guide.one_device->cluster) == "a100-sxm4-80gb");
    CHECK(!guide.largest_block);

    // If it fits on no kind, the kind that lacks the least memory.
    NodeGroup& large = groups[small_first ? 1 : 0];
    large.device.memory_capacity = large.device.memory_overhead + Bytes(60'000);
    const Guide none = find_reasons(graph, simulate_layout(request), {}).guide;
    REQUIRE(none.one_device);
    CHECK(!none.one_device->least.fits());
    CHECK(none.one_device->least.capacity == large.device.memory_capacity);
    CHECK(device_name(none.one_device->cluster) == "a100-sxm4-80gb");
    REQUIRE(none.largest_block);
    CHECK(none.largest_block->capacity == large.device.memory_capacity);
  }
}

TEST_CASE("tensor parallelism beyond a node is looked for in every degree, and the one that is named is the best's") {
  ModelSpec spec = load_model(source + "/tests/data/models/tiny-gpt2.yaml", "").spec;
  spec.heads = spec.kv_heads = 12;
  spec.hidden = 12 * 64;
  spec.head_dim = 64;
  spec.feature = 4 * spec.hidden;
  const OpGraph graph = build_graph(spec, 16);
  // Three nodes of eight: beyond a node, 12 heads allow 12 ranks only, which are not twice a
  // node's. Four nodes of two: 3 does not divide eight devices, 4 does. Three nodes of two: 3 and
  // 6.
  for (const auto& [per_node, nodes, degrees] :
       {std::tuple{8, 3, std::set{12}}, std::tuple{2, 4, std::set{4}}, std::tuple{2, 3, std::set{3, 6}}}) {
    INFO(nodes << " nodes of " << per_node);
    SuggestRequest request = request_of(graph, nodes_of(per_node, nodes), 24);
    request.options.fewer_devices = false;
    const SuggestResult free = suggest(request);
    REQUIRE(free.plan);
    REQUIRE(!degrees.contains(free.plan->spec.tp()));
    const Guide guide = find_reasons(graph, *free.plan, {}).guide;
    REQUIRE(guide.beyond_node);
    CHECK(degrees.contains(guide.beyond_node->across_ranks));
    CHECK(guide.beyond_node->best.plan.spec.tp() == guide.beyond_node->across_ranks);
    CHECK(guide.beyond_node->inside_ranks == per_node);
    for (const int tp : degrees) {
      SuggestRequest fixed = request;
      fixed.layout[Choice::tp] = tp;
      const SuggestResult found = suggest(fixed);
      REQUIRE(found.plan);
      CHECK(step(guide.beyond_node->best.plan.result) <= step(found.plan->prediction) * (1 + 1e-9));
    }
  }
}

TEST_CASE("variations carry the cluster that they are of, and say whether a limit cut their search") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  SuggestRequest request = request_of(graph, nodes_of(4, 2), 16);
  request.layout[Choice::pp] = 4;
  const SuggestResult found = suggest(request);
  REQUIRE(found.plan);
  for (const std::int64_t most : {std::int64_t{1}, std::int64_t{1} << 20}) {
    ReasonsOptions options;
    options.most_simulated = most;
    const Reasons reasons = find_reasons(graph, *found.plan, options);
    int certified = 0;
    for (const Variation& variation : reasons.twice) {
      INFO(name(variation.resource));
      CHECK(variation.cluster == varied(request.cluster, variation.resource, 2.0));
      certified += variation.certified;
    }
    CHECK(certified == (most == 1 ? 0 : 6));
    REQUIRE(reasons.unrestricted);
    CHECK(reasons.unrestricted->certified == (most > 1));
    CHECK(reasons.unrestricted->cluster == request.cluster);
  }
}

}  // namespace parplan
