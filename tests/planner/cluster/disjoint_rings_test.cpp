#include "planner/cluster/disjoint_rings.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include <fmt/format.h>

#include "planner/cluster/find_cluster.h"
#include "planner/cluster/group_network.h"
#include "planner/cluster/mesh.h"
#include "planner/cluster/nccl/search.h"
#include "planner/cluster/nccl/system.h"
#include "planner/cluster/node_layout.h"

using namespace parplan;

namespace {

const ClusterCatalog catalog{PARPLAN_SOURCE_DIR "/configs/devices", PARPLAN_SOURCE_DIR "/configs/clusters"};

// The rate of rings through some devices, alone in each of `nodes` nodes.
double ring_gigabytes(Cluster cluster, const std::vector<int>& devices, int nodes) {
  NodeGroup& group = cluster.groups.front();
  group.node = with_devices(group.node, devices);
  group.nodes = nodes;
  DeviceMesh mesh;
  mesh.degree.dp = cluster.devices();
  return group_network(cluster, mesh, Axis::dp).ring_bandwidth.value / 1e9;
}

double nccl_ring_gigabytes(const Cluster& cluster, const std::vector<int>& devices, int nodes) {
  const NodeGroup& group = cluster.groups.front();
  NcclSystem system = nccl_system(with_devices(group.node, devices), group.device);
  system.several_nodes = nodes > 1;
  const NcclGraph ring = nccl_graphs(std::move(system)).front();
  return std::min(ring.bandwidth_intra(), nodes > 1 ? ring.bandwidth_inter() : std::numeric_limits<double>::infinity());
}

// V100s joined by some NVLinks of 20 GB/s each, several per pair, and all joined to one PCIe
// switch.
Cluster random_mesh(std::mt19937& random, int devices) {
  Cluster cluster;
  NodeGroup& group = cluster.groups.front();
  group.device = find_device("v100-sxm2-32gb", catalog);
  group.node = build_node({.name = "node",
                           .devices = devices,
                           .intra = Intra::pcie,
                           .bandwidth = BytesPerSecond(12e9),
                           .latency = Seconds(0.5e-6),
                           .nics = {}},
                          group.device);
  for (int a = 0; a < devices; ++a)
    for (int b = a + 1; b < devices; ++b)
      if (const int links = std::uniform_int_distribution(0, 2)(random); links > 0)
        add_link(group.node, a, b, BytesPerSecond(20e9 * links), nvlink_hop_latency, fmt::format("NV{}", links));
  return cluster;
}

std::vector<int> first(int count) {
  std::vector<int> devices(static_cast<std::size_t>(count));
  std::iota(devices.begin(), devices.end(), 0);
  return devices;
}

}  // namespace

TEST_CASE("groups on a hybrid cube of NVLinks have the rate of the channels that NCCL finds there") {
  constexpr double reached = 22.4 / 20;  // of the files' links, where NCCL counts 20 GB/s
  for (const char* name : {"dgx-1-v100", "azure-ndv2"}) {
    const Cluster cluster = find_cluster(name, catalog);
    for (const std::vector<int>& devices : {std::vector{0, 1},
                                            {0, 3},
                                            {0, 1, 2},
                                            {0, 1, 2, 3},
                                            {4, 5, 6, 7},
                                            {0, 1, 4, 5},
                                            {0, 2, 4, 6},
                                            {0, 1, 2, 3, 4, 5, 6, 7}}) {
      CAPTURE(name);
      CAPTURE(fmt::format("{}", fmt::join(devices, ",")));
      CHECK(ring_gigabytes(cluster, devices, 1) ==
            doctest::Approx(reached * nccl_ring_gigabytes(cluster, devices, 1)).epsilon(1e-6));
    }
    CHECK(ring_gigabytes(cluster, first(8), 2) ==  // of the NICs
          doctest::Approx(nccl_ring_gigabytes(cluster, first(8), 2)).epsilon(1e-6));
  }
}

TEST_CASE("where NVLinks make no ring, hops go over a third device instead of PCIe") {
  // GPU4 of a DGX-1 has NVLinks to GPU0 only of the first five. Two rings of 22.4 GB/s go over
  // GPU0, once each way: 44.8; vTrain measured 37.2 (trace/v100/AR_GPU5_1M_1024M_LUT), PCIe has 6.
  const Cluster cluster = find_cluster("dgx-1-v100", catalog);
  CHECK(ring_gigabytes(cluster, {0, 1, 2, 3, 4}, 1) == doctest::Approx(44.8));
  // Six of them, and seven, have rings of their own: 45.7 and 87.0 measured.
  CHECK(ring_gigabytes(cluster, first(6), 1) == doctest::Approx(44.8));
  CHECK(ring_gigabytes(cluster, first(7), 1) == doctest::Approx(89.6));
}

TEST_CASE("rings on random meshes visit all members over links of their own and fit on them together") {
  std::mt19937 random(7);
  int several = 0;
  for (int round = 0; round < 60; ++round) {
    const int count = std::uniform_int_distribution(3, 8)(random);
    const Cluster cluster = random_mesh(random, count);
    const auto routes = routes_of(cluster.groups.front().node);
    std::vector<int> members = first(count);
    std::ranges::shuffle(members, random);
    const auto rings = disjoint_rings(*routes, members);
    several += rings.size() > 1;
    std::map<std::pair<int, int>, double> used;
    for (const std::vector<int>& ring : rings) {
      REQUIRE(std::set<int>(ring.begin(), ring.end()) == std::set<int>(members.begin(), members.end()));
      REQUIRE(ring.size() == members.size());
      for (std::size_t i = 0; i < ring.size(); ++i) used[{ring[i], ring[(i + 1) % ring.size()]}] += 20e9;
    }
    for (const auto& [pair, rate] : used) {
      const Path& path = routes->between[pair.first][pair.second];
      CHECK(path.arcs.size() == 1);
      CHECK(rate <= path.bandwidth.value);
    }
  }
  CHECK(several > 10);
}

TEST_CASE(
    "groups on random meshes of NVLinks are no slower than NCCL's channels and no faster than what leaves any of "
    "them") {
  std::mt19937 random(11);
  int held = 0;
  for (int round = 0; round < 40; ++round) {
    const int count = std::uniform_int_distribution(3, 7)(random);
    const Cluster cluster = random_mesh(random, count);
    double least = std::numeric_limits<double>::infinity();
    for (int device = 0; device < count; ++device) {
      double leaves = 0.0;
      for (const Link& link : cluster.groups.front().node.links)
        if (link.a == device || link.b == device) leaves += link.bandwidth.value / 1e9;
      least = std::min(least, leaves);
    }
    const double ours = ring_gigabytes(cluster, first(count), 1);
    const NcclGraph nccl = nccl_graphs(nccl_system(cluster.groups.front().node, cluster.groups.front().device)).front();
    CAPTURE(round);
    CHECK(ours <= least * (1 + 1e-9));
    // NCCL also goes through third devices and mixes NVLink with PCIe.
    if (nccl.type_intra != NcclDistance::nvlink) continue;
    ++held;
    CHECK(ours >= nccl.bandwidth_intra() * (1 - 1e-6));
  }
  CHECK(held > 10);
}

TEST_CASE("where one layout does for all, rings are not sought") {
  const Cluster switched = find_cluster("dgx-a100", catalog);
  CHECK(disjoint_rings(*routes_of(switched.groups.front().node), first(8)).empty());
  const DeviceKind device = find_device("v100-sxm2-32gb", catalog);
  const NodeKind full = build_node({.name = "node",
                                    .devices = 4,
                                    .intra = Intra::nvlink_mesh,
                                    .bandwidth = BytesPerSecond(40e9),
                                    .latency = Seconds(0.6e-6),
                                    .nics = {}},
                                   device);
  CHECK(disjoint_rings(*routes_of(full), first(4)).empty());
  CHECK(disjoint_rings(*routes_of(full), {0, 1}).empty());
}
