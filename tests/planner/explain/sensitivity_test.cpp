#include "planner/explain/sensitivity.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/cluster/group_network.h"
#include "planner/cluster/host_share.h"
#include "planner/explain/find_reasons.h"
#include "planner/parallel/techniques.h"
#include "planner/suggest.h"
#include "tests/planner/explain/small_requests.h"

namespace parplan {

using testing::cluster_of;
using testing::graph_of;
using testing::nodes_of;
using testing::request_of;
using testing::source;
using testing::step;

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

// The rates of host and drives are varied where a plan uses them, and what binds is what the plan
// waits for, however much of its step computes beside it.
TEST_CASE("a plan that keeps its state off its devices gains by the host's rates and its drives what it waits for") {
  // Four layers of Llama 3 8B: 1.9 billion parameters, whose state takes more than all else.
  ModelSpec model = load_model(source + "/models/llama3-8b.yaml", "").spec;
  model.layers = 4;
  const OpGraph graph = build_graph(model, 256);
  ReasonsOptions without_searches;
  without_searches.searches = false;
  int bound_by_drives = 0, bound_by_host = 0, bound_by_others = 0;
  const std::span<const Offload> offloads = all_offloads();
  for (const char* const cluster : {"dgx-a100", "dgx-1-v100"})
    for (std::size_t i = 1; i < offloads.size(); i += 5) {
      const Offload& offload = offloads[i];
      SuggestRequest request = request_of(graph, cluster_of(cluster, 2), 4);
      request.training.precision = DataType::fp16;
      NodeGroup& group = request.cluster.groups.front();
      const bool has_files = uses(offload, Home::nvme), has_host = has_files || uses(offload, Home::host);
      request.layout = {{Choice::dp, 2},          {Choice::tp, 1},
                        {Choice::pp, 1},          {Choice::zero_stage, 3},
                        {Choice::micro_batch, 1}, {Choice::offload, offload}};
      if (illegal(graph, request.training, with_given(request.layout, request.training))) continue;
      // What is a thousand times too slow: the drives, the host, or neither.
      for (const char* const slow : {"drives", "host", "none"}) {
        const double of_drives = slow == std::string("drives") ? 1e-3 : 1e3;
        const double of_host = slow == std::string("host") ? 1e-3 : 1e3;
        group = cluster_of(cluster, 2).groups.front();
        group.nvme = {.read = BytesPerSecond(5e10 * of_drives),
                      .write = BytesPerSecond(3e10 * of_drives),
                      .latency = {},
                      .capacity = {}};
        group.host->memory = std::nullopt;
        group.host->memory_bandwidth *= of_host;
        group.host->link = BytesPerSecond(1.2e10 * of_host);
        INFO(std::string(cluster) << ", " << write_value(offload) << ", slow: " << std::string(slow));
        // As much memory as the plan takes.
        group.device.memory_overhead = Bytes(0);
        group.device.memory_capacity = simulate_layout(request).prediction.memory.peak();
        const Plan plan = simulate_layout(request);
        const MemoryUse& memory = plan.prediction.memory;
        const bool would_hold = memory.host + memory.nvme <= memory.peak();  // twice the memory
        const Reasons reasons = find_reasons(graph, plan, without_searches);
        const auto gain = [&](Resource resource) {
          SuggestRequest faster = request;
          faster.cluster = varied(request.cluster, resource, 2.0, 2);
          return 1.0 - step(simulate_layout(faster).prediction) / step(plan.prediction);
        };
        if (!has_host) CHECK(gain(Resource::host) == 0.0);
        if (!has_files) CHECK(gain(Resource::nvme) == 0.0);
        // Almost all that twice a rate can gain is more than anything else does.
        const bool drives = !would_hold && gain(Resource::nvme) > 0.45;
        const bool host = !would_hold && gain(Resource::host) > 0.45;
        if (drives) CHECK(reasons.binding == Constraint::nvme);
        if (host) CHECK(reasons.binding == Constraint::host);
        if (!has_host) CHECK(reasons.binding != Constraint::host);
        if (!has_files) CHECK(reasons.binding != Constraint::nvme);
        bound_by_drives += drives;
        bound_by_host += host;
        bound_by_others += !drives && !host;
      }
    }
  CAPTURE(bound_by_drives);
  CAPTURE(bound_by_host);
  CHECK(bound_by_drives > 4);
  CHECK(bound_by_host > 4);
  CHECK(bound_by_others > 4);
}

TEST_CASE("links inside nodes and the way to the host are varied apart, also where they are the same wires") {
  for (const char* const name : {"dgx-a100", "dgx-1-v100"})
    for (const int devices : {1, 2, 8}) {
      const Cluster cluster = cluster_of(name, 8);
      const auto share = [&](const Cluster& of) { return *host_share(of.groups.front(), devices); };
      for (const Resource resource : {Resource::node_links, Resource::network, Resource::links}) {
        CHECK(share(varied(cluster, resource, 2.0, devices)).link == share(cluster).link);
        CHECK(share(varied(cluster, resource, 2.0, devices)).latency == share(cluster).latency);
      }
      const Cluster faster = varied(cluster, Resource::host, 2.0, devices);
      CHECK(share(faster).link == share(cluster).link * 2.0);
      CHECK(share(faster).memory_bandwidth == share(cluster).memory_bandwidth * 2.0);
      CHECK(faster.groups.front().node == cluster.groups.front().node);
    }
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
  CHECK(step(less->best->result) == doctest::Approx(step(free.plan->prediction)).epsilon(tied_plans));
}

TEST_CASE("a batch of few micro-batches changes by sequences, in micro-batches that divide it") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  struct Case {
    int dp;
    std::int64_t batch, micro_batch;
    std::optional<std::pair<std::int64_t, std::int64_t>> less, more;  // batch, micro-batch
    bool is_interleaved = false;                                      // two ranks with two stages each
  };
  for (const Case& one : {Case{1, 4, 4, {{3, 3}}, {{5, 5}}},      // one micro-batch
                          Case{1, 10, 5, {{8, 4}}, {{12, 6}}},    // two
                          Case{2, 20, 2, {{16, 2}}, {{24, 2}}},   // five, of which four and six are a fifth away
                          Case{2, 2, 1, {}, {{4, 1}}},            // a sequence a rank
                          // Groups of two micro-batches: neither 11 nor 17; nor 5 or 7, and none
                          // close enough.
                          Case{1, 14, 1, {{12, 1}}, {{16, 1}}, true}, Case{1, 6, 1, {}, {}, true}}) {
    INFO("dp " << one.dp << " batch " << one.batch << " micro-batch " << one.micro_batch);
    const int devices = one.is_interleaved ? 2 : one.dp;
    SuggestRequest request =
        request_of(graph, cluster_of(source + "/tests/data/clusters/cpu-8.yaml", devices), one.batch);
    if (one.is_interleaved) {
      request.layout[Choice::pp] = 2;
      request.layout[Choice::tp] = 1;
      request.layout[Choice::schedule] = ScheduleKind::interleaved;
      request.layout[Choice::virtual_stages] = 2;
    }
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

TEST_CASE("the batch of unlike replicas is varied by replica, and one that cannot be is left out") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  SuggestRequest request = request_of(graph, cluster_of("dgx-a100", 2), 16);
  request.layout = {{Choice::dp, 2},          {Choice::tp, 1},
                    {Choice::pp, 1},          {Choice::zero_stage, 0},
                    {Choice::micro_batch, 1}, {Choice::replica_micro_batches, std::vector<int>{10, 6}}};
  const auto twice = [&] {
    const Plan plan = simulate_layout(request);
    const ReasonsOptions options;
    std::vector<Variation> all =
        double_without_searches({.graph = graph, .plan = plan, .options = options});
    std::erase_if(all, [](const Variation& one) { return one.resource != Resource::global_batch; });
    return all;
  };
  const std::vector<Variation> unlike = twice();
  REQUIRE(unlike.size() == 1);
  CHECK(unlike.front().global_batch == 32);
  CHECK(unlike.front().plan.plan.spec.replica_micro_batches == std::vector<int>{20, 12});
  // As many micro-batches as a plan may have: there is no larger batch.
  request.layout[Choice::replica_micro_batches].reset();
  request.layout[Choice::micro_batch] = 1;
  request.layout[Choice::dp] = 1;
  request.training.global_batch = 1;
  while (!has_too_many_calls(request.training, {})) request.training.global_batch *= 2;
  request.training.global_batch /= 2;
  CHECK(twice().empty());
}

}  // namespace parplan
