#include "planner/explain/rules_of_thumb.h"

#include <doctest/doctest.h>

#include <set>
#include <tuple>
#include <vector>

#include "planner/explain/find_reasons.h"
#include "planner/suggest.h"
#include "tests/planner/explain/small_requests.h"

namespace parplan {

using testing::cluster_of;
using testing::graph_of;
using testing::nodes_of;
using testing::request_of;
using testing::source;
using testing::step;

TEST_CASE("the guide's rules are said when the numbers say so") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  SuggestRequest request = request_of(graph, cluster_of("dgx-a100", 16), 32);
  request.layout[Choice::pp] = 2;
  request.layout[Choice::tp] = 1;
  request.layout[Choice::dp] = 8;
  request.layout[Choice::zero_stage] = 1;
  request.layout[Choice::micro_batch] = 1;
  request.layout[Choice::schedule] = ScheduleKind::one_f_one_b;
  request.layout[Choice::dp_shard] = std::int64_t{0};
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
    ReasonsOptions options;
    options.most_simulated = 1000;
    const ExplainedPlan explained{graph, *free.plan, options};
    CandidateMaker maker(graph, request.cluster, request.training, Objective::time, explained.shapes);
    const Guide guide = find_guide(explained, maker, {});
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

}  // namespace parplan
