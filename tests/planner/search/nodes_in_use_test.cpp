// The price of a layout on unlike nodes: what it leaves out bears on none of it.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "planner/cluster/price_and_power.h"
#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"
#include "planner/search/layout_floors.h"
#include "planner/search/search.h"
#include "planner/search/simulate_spec.h"
#include "planner/search/space.h"
#include "planner/simulator/estimate.h"
#include "tests/planner/search/random_settings.h"

namespace parplan {

using testing::cluster_of;
using testing::describe;
using testing::random_cut;
using testing::random_graph;
using testing::training_of;

namespace {

// Two or three groups of one or two nodes, of kinds that differ in compute capability, switches,
// NVLink, devices of a node, libraries and rates; each with a host and drives of its own.
Cluster unlike_nodes(std::mt19937& random) {
  constexpr std::array kinds = {"dgx-a100", "dgx-h100", "dgx-1-v100", "l40s-8", "rtx-4090-4", "dgx-b200"};
  const auto share = [&] { return std::exp2(std::uniform_real_distribution<double>(-2.0, 2.0)(random)); };
  Cluster cluster = cluster_of("dgx-a100");
  cluster.groups.clear();
  cluster.network.latency *= share();
  cluster.network.rails = random() % 3 == 0;
  if (random() % 2 == 0) cluster.network.oversubscription = 1.0 + share();
  for (int groups = 2 + static_cast<int>(random() % 2); groups > 0; --groups) {
    NodeGroup group = cluster_of(kinds[random() % kinds.size()]).groups.front();
    // Nodes without a NIC are no part of a cluster of several.
    if (std::ranges::none_of(group.node.vertices, [](const Vertex& one) { return one.kind == VertexKind::nic; }))
      group.node = cluster_of("dgx-a100").groups.front().node;
    group.nodes = 1 + static_cast<int>(random() % 2);
    group.device.memory_overhead = Bytes(static_cast<std::int64_t>(1e9 * share()));
    group.device.kernel_launch *= share();
    group.host = Host{.memory = Bytes(static_cast<std::int64_t>(1e12 * share())),
                      .memory_bandwidth = BytesPerSecond(2e11 * share()),
                      .link = BytesPerSecond(1e10 * share())};
    group.nvme = Nvme{.read = BytesPerSecond(6e9 * share()),
                      .write = BytesPerSecond(3e9 * share()),
                      .latency = Seconds(1e-4 * share()),
                      .capacity = {}};
    cluster.groups.push_back(std::move(group));
  }
  return cluster;
}

}  // namespace

TEST_CASE("a layout costs what it costs on the nodes that it uses alone, whatever others the cluster has") {
  std::mt19937 random = testing::random_from(20261126);
  int several = 0, offloaded = 0, part_of_a_node = 0, sharp = 0, tried = 0;
  for (int setting = 0; setting < 60; ++setting) {
    OpGraph graph = random_graph(random, 16);
    const Cluster cluster = unlike_nodes(random);
    TrainingSpec training = training_of(16, DataType::fp16);
    training.engine = testing::random_engine(static_cast<unsigned>(setting), graph);
    if (setting % 2 == 0) training.engine = {};
    testing::train_random_parts(static_cast<unsigned>(setting), training, graph);
    // So many devices that at least the last group is left out.
    const int most = cluster.devices() - cluster.groups.back().devices();
    for (int trial = 0; trial < 8; ++trial) {
      const int devices = trial % 2 == 0 ? most : std::min(most, 2 << random() % 4);
      const std::vector<ParallelSpec> specs = enumerate_specs(graph, training, devices, {});
      if (specs.empty()) continue;
      ParallelSpec spec = specs[random() % specs.size()];
      spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.stages(), random);
      if (trial % 3 == 0 && setting % 2 == 0) {
        ParallelSpec elsewhere = spec;
        elsewhere.offload = all_offloads()[random() % all_offloads().size()];
        if (!illegal(graph, training, elsewhere)) spec = elsewhere;
      }
      const Cluster used = first_nodes(cluster, spec.mesh.size());
      REQUIRE(used.groups.size() < cluster.groups.size());
      INFO("setting " << setting << ", " << describe_groups(cluster) << ": " << describe(spec));
      const auto simulated = [&](const Cluster& on) {
        NetworkCache networks(on, training.engine);
        return simulate_spec(graph, networks, training, spec, place(graph, spec), schedule_of(spec, training), nullptr);
      };
      const StepResult whole = simulated(cluster), alone = simulated(used);
      CHECK(whole.time == alone.time);
      CHECK(whole.memory == alone.memory);
      CHECK(whole.memory_stage == alone.memory_stage);

      const auto bound_on = [&](const Cluster& on) {
        Estimator estimator(graph, on, training);
        return estimator.bound(spec, place(graph, spec), forms_of(row_of(spec.schedule)));
      };
      const Bound of_whole = bound_on(cluster), of_alone = bound_on(used);
      CHECK(of_whole.memory == of_alone.memory);
      CHECK(of_whole.spare == of_alone.spare);
      CHECK(of_whole.room_in_all == of_alone.room_in_all);
      CHECK(of_whole.lower_bound == of_alone.lower_bound);

      // What bounds all layouts on so many devices stays below.
      LayoutRequest request;
      if (spec.offload != Offload{}) request[Choice::offload] = spec.offload;
      CandidateMaker maker(graph, cluster, training);
      LayoutFloors floors(graph, cluster, training, request, usual_width(graph, training.engine, request), maker);
      const Floor floor = floors.of_devices(spec.mesh.size());
      CHECK(floor.time <= whole.time.total());
      CHECK(floor.memory <= whole.memory.peak());

      ++tried;
      several += used.groups.size() > 1;
      offloaded += spec.offload != Offload{};
      part_of_a_node += spec.mesh.size() < cluster.groups.front().devices_per_node();
      sharp += has_nvlink_sharp(used);
    }
  }
  CHECK(tried > 200);
  CHECK(several > 20);
  CHECK(offloaded > 20);
  CHECK(part_of_a_node > 20);
  CHECK(sharp > 20);
}

}  // namespace parplan
