#include "planner/reasons.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/cluster/catalog.h"
#include "planner/plan/layout_text.h"
#include "planner/search/space.h"
#include "planner/suggest.h"

namespace parplan {
namespace {

const std::string source = PARPLAN_SOURCE_DIR;

OpGraph graph_of(const std::string& model, std::int64_t sequence) {
  return build_graph(load_model(source + "/tests/data/models/" + model + ".yaml", "").spec, sequence);
}

Cluster cluster_of(const std::string& name, std::optional<int> devices = {}) {
  return find_cluster(name, {source + "/configs/devices", source + "/configs/clusters"}, {.device = {}, .network = {}, .devices = devices, .nodes = {}});
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

double step(const StepResult& result) { return result.time.total().value; }

}  // namespace

TEST_CASE("a layout is of one family at most, and every family has a name of its own") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  TrainingSpec training;
  training.global_batch = 16;
  training.sequence_length = 16;
  std::set<std::string_view> names;
  std::set<std::string_view> met;
  for (const LayoutFamily& family : layout_families()) CHECK(names.insert(family.name).second);
  // tiny-gpt2 has four heads: alone, tensor parallelism takes four devices.
  for (const auto& [devices, devices_per_node] : {std::pair{8, 2}, std::pair{8, 4}, std::pair{8, 8}, std::pair{4, 4}})
    for (const ParallelSpec& spec : enumerate_specs(graph, training, devices, {})) {
      int families = 0;
      for (const LayoutFamily& family : layout_families())
        if (belongs(family, spec, devices_per_node)) {
          ++families;
          met.insert(family.name);
        }
      INFO(layout_text(spec) << " with nodes of " << devices_per_node);
      // Tensor-parallel groups that are small enough for a node but lie across nodes are of none.
      CHECK(families <= 1);
      if (spec.mesh.stride_of(Axis::tp) == 1) CHECK(families == 1);
    }
  CHECK(met == names);
}

TEST_CASE("a varied cluster has more of one thing alone") {
  const Cluster cluster = cluster_of("dgx-a100", 16);
  CHECK(varied(cluster, Resource::compute, 1.0) == cluster);
  const Cluster memory = varied(cluster, Resource::memory, 2.0);
  CHECK(memory.groups.front().device.memory_capacity == cluster.groups.front().device.memory_capacity * 2);
  CHECK(memory.groups.front().node == cluster.groups.front().node);
  // Eight GPUs behind NVSwitch, eight NICs: the links of NICs to the network are the network, all others are inside.
  int inside = 0, network = 0;
  const Cluster wider = varied(cluster, Resource::network, 3.0);
  const Cluster faster = varied(cluster, Resource::node_links, 3.0);
  const NodeKind& node = cluster.groups.front().node;
  for (std::size_t i = 0; i < node.links.size(); ++i) {
    const bool of_network = wider.groups.front().node.links[i].bandwidth != node.links[i].bandwidth;
    CHECK((faster.groups.front().node.links[i].bandwidth != node.links[i].bandwidth) == !of_network);
    (of_network ? network : inside) += 1;
  }
  CHECK(network == 8);
  CHECK(inside > 8);
  CHECK(wider.groups.front().device == cluster.groups.front().device);
}

TEST_CASE("devices that compute twice as fast take half of the time, where nothing is communicated") {
  const OpGraph graph = graph_of("tiny-llama", 16);
  for (const char* name : {"dgx-a100", "dgx-h100"}) {
    SuggestRequest request = request_of(graph, cluster_of(name, 1), 4);
    request.layout = {.dp = 1, .tp = 1, .pp = 1, .zero_stage = {}, .micro_batch = {}, .schedule = {}, .sequence_parallel = {}, .recompute = {}, .order = {}, .stage_blocks = {}};
    const double before = step(simulate_layout(request).prediction);
    request.cluster = varied(request.cluster, Resource::compute, 2.0);
    CHECK(step(simulate_layout(request).prediction) == doctest::Approx(before / 2.0).epsilon(1e-9));
  }
}

TEST_CASE("the reasons of a certified plan agree with it") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  for (Cluster cluster : {cluster_of(source + "/tests/data/clusters/cpu-8.yaml", 4), cluster_of("dgx-a100", 16)}) {
    SuggestRequest request = request_of(graph, cluster, 16);
    request.options.fewer_devices = false;
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

    // Stage by stage and along the critical path it is the step that was predicted.
    REQUIRE(static_cast<int>(reasons.details.stages.size()) == plan.spec.pp());
    double path = 0.0;
    for (const CriticalWork& work : reasons.details.critical_path) path += work.time.value;
    CHECK(path == doctest::Approx(own).epsilon(1e-9));
    CHECK(std::ranges::max(reasons.details.stages, {}, [](const StageResult& s) { return s.time.total(); }).time.total().value ==
          doctest::Approx(own).epsilon(1e-9));

    // Nothing of another family, and nothing one choice away, is faster.
    int of_the_plan = 0;
    for (const FamilyBest& family : reasons.families) {
      INFO(family.family);
      if (family.best && family.best->fits()) CHECK(step(family.best->plan.result) >= own * (1 - 1e-9));
      if (!family.of_the_plan) continue;
      ++of_the_plan;
      CHECK(family.best->plan.spec == plan.spec);
    }
    CHECK(of_the_plan <= 1);
    CHECK(reasons.families.size() >= 8);
    for (const Neighbour& neighbour : reasons.neighbours) {
      INFO(neighbour.change);
      if (neighbour.rival.fits()) CHECK(step(neighbour.rival.plan.result) >= own * (1 - 1e-9));
      CHECK(neighbour.rival.plan.spec != plan.spec);
    }
    CHECK(!reasons.unrestricted);

    // More of anything does not make the best slower, less not faster; a plan that is not the best any more has a faster one beside it.
    REQUIRE(reasons.relaxed);
    for (const Variation& variation : reasons.sensitivity) {
      INFO(name(variation.resource) << " x " << variation.factor);
      REQUIRE(variation.best);
      const double then = step(variation.plan.plan.result);
      const double best = step(variation.best->result);
      if (variation.plan.fits()) CHECK(best <= then);
      CHECK((variation.best->spec != plan.spec) == variation.changes);
      if (variation.resource == Resource::global_batch) {
        CHECK(variation.global_batch % (plan.spec.dp() * plan.spec.micro_batch) == 0);
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
  CHECK(!reasons.relaxed);
  CHECK(!reasons.guide.one_device);
}

TEST_CASE("a plan of a given layout is told what a free search finds") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  SuggestRequest request = request_of(graph, cluster_of(source + "/tests/data/clusters/cpu-8.yaml", 4), 16);
  const SuggestResult free = suggest(request);
  request.layout.pp = 4;
  request.layout.micro_batch = 1;
  request.layout.schedule = ScheduleKind::gpipe;
  request.layout.recompute = Recompute::full;
  const SuggestResult fixed = suggest(request);
  REQUIRE(free.plan);
  REQUIRE(fixed.plan);
  REQUIRE(step(fixed.plan->prediction) > step(free.plan->prediction));
  const Reasons reasons = find_reasons(graph, *fixed.plan, {});
  REQUIRE(reasons.unrestricted);
  CHECK(step(reasons.unrestricted->best->result) < step(fixed.plan->prediction));
}

TEST_CASE("the guide's rules are said when the numbers say so") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  SuggestRequest request = request_of(graph, cluster_of("dgx-a100", 16), 32);
  request.layout.pp = 2;
  request.layout.tp = 1;
  request.layout.dp = 8;
  request.layout.zero_stage = 1;
  request.layout.micro_batch = 1;
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
  CHECK(guide.bubble->simulated == doctest::Approx(plan.prediction.time.bubble / plan.prediction.time.total()));
  // ZeRO-2 reduces gradients in each of the 4 micro-batches and not once: 4 (n - 1) / n of them and once (n - 1) / n of the parameters
  // gathered at the end (half the bytes of a gradient), instead of 1 and 1/2: (4 + 1/2) / (1 + 1/2) = 3 times as much.
  REQUIRE(guide.sharded_pipeline.size() == 2);
  const Guide::ShardedPipeline& sharded = guide.sharded_pipeline.front();
  CHECK(sharded.rival.plan.spec.zero_stage == 2);
  CHECK(sharded.micro_batches == 4);
  CHECK(static_cast<double>(sharded.rival.plan.result.communication.data.count) / static_cast<double>(sharded.sent.count) == doctest::Approx(3.0).epsilon(0.01));
  CHECK(!guide.gathered);

  // Little memory: not even a block's state fits.
  SuggestRequest small = request_of(graph, cluster_of("dgx-a100", 16), 32);
  const std::int64_t overhead = small.cluster.groups.front().device.memory_overhead.count;
  small.cluster.groups.front().device.memory_capacity = Bytes(overhead + 200'000);
  small.layout.zero_stage = 3;
  small.layout.dp = 16;
  const Plan crowded = simulate_layout(small);
  const Guide none = find_reasons(graph, crowded, {}).guide;
  REQUIRE(none.one_device);
  CHECK(!none.one_device->least.fits());
  REQUIRE(none.largest_block);
  CHECK(none.largest_block->state.count > 200'000);
  REQUIRE(none.gathered);
  CHECK(none.gathered->micro_batches == 2);
}

}  // namespace parplan
