#include "planner/cluster/fabric_traffic.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "planner/cluster/group_network.h"
#include "planner/cluster/mesh.h"
#include "planner/cluster/node_layout.h"

using namespace parplan;

namespace {

DeviceKind test_device() {
  DeviceKind device;
  device.name = "test";
  device.rates = {{.active = 1,
                   .matrix_fp32 = FlopsPerSecond(1),
                   .matrix_half = FlopsPerSecond(1),
                   .vector = FlopsPerSecond(1),
                   .memory = BytesPerSecond(1)}};
  device.pcie_generation = 3;
  return device;
}

// Nodes of `devices` devices of `bandwidth` B/s to a switch, or joined otherwise, with `nics` NICs
// that reach 10 B/s each.
NodeGroup nodes_of(int devices, int nics, int nodes, double bandwidth = 100.0, Intra intra = Intra::nvswitch) {
  NodeGroup group;
  group.device = test_device();
  group.node = build_node({.name = "node",
                           .devices = devices,
                           .intra = intra,
                           .bandwidth = BytesPerSecond(bandwidth),
                           .latency = Seconds(2),
                           .nics = NicLayout{.count = nics, .line_rate = BytesPerSecond(10.0 / nic_reached_share)}},
                          group.device);
  group.nodes = nodes;
  return group;
}

Cluster cluster_of(std::vector<NodeGroup> groups, std::vector<FabricLevel> levels = {}) {
  Cluster cluster;
  cluster.name = "test";
  cluster.groups = std::move(groups);
  cluster.network.latency = Seconds(3);
  cluster.network.levels = std::move(levels);
  return cluster;
}

// Leaves of a number of nodes without loss, and a spine.
std::vector<FabricLevel> leaf_and_spine(int nodes, double oversubscription) {
  return {{.name = "leaf", .nodes = nodes, .oversubscription = 1.0, .latency = Seconds(3)},
          {.name = "spine", .nodes = std::nullopt, .oversubscription = oversubscription, .latency = Seconds(5)}};
}

DeviceMesh mesh(int pp, int dp, int tp, const char* order = "pp-dp-tp") {
  return {.degree = {.pp = pp, .dp = dp, .tp = tp}, .order = parse_order(order)};
}
double ring(const Cluster& cluster, const DeviceMesh& m, Axis axis) {
  return group_network(cluster, m, axis).ring_bandwidth.value;
}
double tree(const Cluster& cluster, const DeviceMesh& m, Axis axis) {
  return group_network(cluster, m, axis).tree_bandwidth.value;
}

constexpr std::array<const char*, 6> orders = {"pp-dp-tp", "pp-tp-dp", "dp-pp-tp", "dp-tp-pp", "tp-pp-dp", "tp-dp-pp"};

// Every mesh of at most `most` ranks with small degrees, in every order.
template <class Visit>
void for_each_mesh(int most, const Visit& visit) {
  for (const int pp : {1, 2, 3, 4})
    for (const int dp : {1, 2, 3, 5, 8})
      for (const int tp : {1, 2, 3, 4})
        for (const char* order : orders)
          if (const DeviceMesh m = mesh(pp, dp, tp, order); m.size() <= most) visit(m);
}

}  // namespace

TEST_CASE("groups and pairs that leave a range of ranks are counted as one by one") {
  int checked = 0;
  for (const int stride : {1, 2, 3, 5})
    for (const int degree : {2, 3, 4})
      for (const int blocks : {1, 2, 3}) {
        const int ranks = stride * degree * blocks;
        for (int first = 0; first < ranks; ++first)
          for (int last = first + 1; last <= ranks; ++last) {
            const auto inside = [&](int rank) { return rank >= first && rank < last; };
            int groups = 0;
            for (int start = 0; start < ranks; start += stride * degree)
              for (int i = 0; i < stride; ++i) {
                int members = 0;
                for (int k = 0; k < degree; ++k) members += inside(start + i + k * stride);
                groups += members > 0 && members < degree;
              }
            INFO(stride, " ", degree, " ", blocks, ": ", first, " to ", last);
            CHECK(groups_leaving({.ranks = ranks, .stride = stride, .degree = degree}, first, last) == groups);
            for (const auto& [from, to] : {std::pair{0, 1}, std::pair{1, 0}, std::pair{0, degree - 1}}) {
              int pairs = 0;
              for (int start = 0; start < ranks; start += stride * degree)
                for (int i = 0; i < stride; ++i)
                  pairs += inside(start + i + from * stride) != inside(start + i + to * stride);
              CHECK(ranks_leaving({.ranks = ranks, .stride = stride, .degree = degree}, from, to, first, last) ==
                    pairs);
            }
            ++checked;
          }
      }
  CHECK(checked > 5000);
}

TEST_CASE("of blocks that look alike one is enough") {
  const Cluster alike = cluster_of({nodes_of(4, 4, 40)});
  const Cluster split = cluster_of({nodes_of(4, 4, 17), nodes_of(4, 4, 23)});  // gone through block by block
  for (const int stride : {1, 2, 3, 8, 12})
    for (const int degree : {2, 3, 5})
      for (const int nodes : {1, 2, 3, 7, 50}) {
        const AxisLayout axis{.ranks = 160 / (stride * degree) * stride * degree, .stride = stride, .degree = degree};
        const auto worst = [&](const Cluster& cluster) {
          double most = 0.0;
          for (const FabricBlock& block : blocks_of(cluster, axis, nodes))
            most = std::max(most, groups_leaving(axis, block.first, block.last) / block.nics.value);
          return most;
        };
        INFO(stride, " ", degree, " ", nodes);
        CHECK(worst(alike) == doctest::Approx(worst(split)));
      }
}

TEST_CASE("a block counts the nodes that hold ranks, and the NICs of all") {
  const AxisLayout axis{.ranks = 8, .stride = 1, .degree = 8};
  for (const Cluster& cluster :
       {cluster_of({nodes_of(4, 4, 16)}), cluster_of({nodes_of(4, 4, 1), nodes_of(4, 4, 15)})}) {
    const std::vector<FabricBlock> blocks = blocks_of(cluster, axis, 16);
    REQUIRE(blocks.size() == 1);
    CHECK(blocks.front().nodes == 2);
    CHECK(blocks.front().nics.value == doctest::Approx(16 * blocks_of(cluster, axis, 1).front().nics.value));
  }
}

TEST_CASE("what crosses a spine is divided by its oversubscription, as far as its leaf's NICs do not do it before") {
  // Eight groups of eight nodes, one rail each. A leaf of four nodes has NICs of 4 * 80 = 320 B/s,
  // and each of eight rings leaves it once: 320 / 8 = 40 per ring without loss; a NIC gives it 10.
  // So a spine of a quarter costs nothing, and one of an eighth leaves 5.
  for (const auto& [oversubscription, expected] : {std::pair{1.0, 10.0}, std::pair{4.0, 10.0}, std::pair{8.0, 5.0}}) {
    const Cluster cluster = cluster_of({nodes_of(8, 8, 8)}, leaf_and_spine(4, oversubscription));
    CHECK(ring(cluster, mesh(1, 8, 8), Axis::dp) == doctest::Approx(expected));
    CHECK(tree(cluster, mesh(1, 8, 8), Axis::dp) == doctest::Approx(expected));
  }
  // Two stages of four nodes each: all 32 ranks of a leaf send through the spine, 320 / (4 * 32) =
  // 2.5 each.
  const Cluster cluster = cluster_of({nodes_of(8, 8, 8)}, leaf_and_spine(4, 4.0));
  CHECK(stage_network(cluster, mesh(2, 4, 8), 0, 1).ring_bandwidth.value == doctest::Approx(2.5));
  CHECK(stage_network(cluster, mesh(2, 4, 8), 0, 1).inter_latency.value == doctest::Approx(5 + 4 * 0.5e-6));
}

TEST_CASE("a group within a leaf does not feel the spine") {
  const Cluster slow = cluster_of({nodes_of(8, 8, 8)}, leaf_and_spine(4, 1000.0));
  const GroupNetwork inside = group_network(slow, mesh(2, 4, 8), Axis::dp);
  CHECK(inside.ring_bandwidth.value == doctest::Approx(10));
  CHECK(inside.inter_latency.value == doctest::Approx(3 + 4 * 0.5e-6));
  CHECK(ring(slow, mesh(1, 8, 8), Axis::tp) == 100);
  // With the stages innermost, their pairs stay in the leaf, and the data-parallel groups cross.
  CHECK(stage_network(slow, mesh(2, 4, 8, "dp-pp-tp"), 0, 1).ring_bandwidth.value == doctest::Approx(10));
  CHECK(ring(slow, mesh(2, 4, 8, "dp-pp-tp"), Axis::dp) == doctest::Approx(320.0 / 1000 / 16));
}

TEST_CASE("each level that is crossed may be the narrowest, and the highest gives the latency") {
  std::vector<FabricLevel> levels = {{.name = "leaf", .nodes = 2, .oversubscription = 1, .latency = Seconds(3)},
                                     {.name = "spine", .nodes = 4, .oversubscription = 8, .latency = Seconds(5)},
                                     {.name = "core", .nodes = {}, .oversubscription = 2, .latency = Seconds(9)}};
  // One rank per node: a ring over eight nodes leaves a leaf (20 B/s) once, 20 / 8 = 2.5, and a pod
  // of four (40) once, 40 / 2.
  const Cluster cluster = cluster_of({nodes_of(1, 1, 8)}, levels);
  const GroupNetwork all = group_network(cluster, mesh(1, 8, 1), Axis::dp);
  CHECK(all.ring_bandwidth.value == doctest::Approx(2.5));
  CHECK(all.inter_latency.value == doctest::Approx(9 + 4 * 0.5e-6));
  const GroupNetwork pod = group_network(cluster, mesh(2, 4, 1), Axis::dp);
  CHECK(pod.ring_bandwidth.value == doctest::Approx(2.5));
  CHECK(pod.inter_latency.value == doctest::Approx(5 + 4 * 0.5e-6));
  const GroupNetwork leaf = group_network(cluster, mesh(4, 2, 1), Axis::dp);
  CHECK(leaf.ring_bandwidth.value == doctest::Approx(10));
  CHECK(leaf.inter_latency.value == doctest::Approx(3 + 4 * 0.5e-6));
  // What the network has, groups that leave their nodes and transfers between stages have.
  CHECK(pod.post_overhead == Seconds(0));
  CHECK(pod.transfer_chunk == Bytes(131072));
  Cluster other = cluster;
  other.network.post_overhead = Seconds(2);
  other.network.ring_protocols = {.simple = false, .low_latency = true, .low_latency_128 = true};
  other.network.tree_protocols = {.simple = false, .low_latency = false};
  other.network.transfer_chunk = Bytes(524288);
  for (const GroupNetwork& network :
       {group_network(other, mesh(2, 4, 1), Axis::dp), stage_network(other, mesh(2, 4, 1), 0, 1)}) {
    CHECK(network.post_overhead == Seconds(2));
    CHECK(network.ring_protocols == other.network.ring_protocols);
    CHECK(network.tree_protocols == other.network.tree_protocols);
    CHECK(network.transfer_chunk == Bytes(524288));
  }
  // Stages of four nodes: four ranks leave the pod for the other, 40 / (2 * 4) = 5, and each leaf's
  // two: 20 / (8 * 2) = 1.25.
  CHECK(stage_network(cluster, mesh(2, 4, 1), 0, 1).ring_bandwidth.value == doctest::Approx(1.25));
}

TEST_CASE("one level for all nodes is what oversubscription alone says") {
  Cluster plain = cluster_of({nodes_of(4, 2, 5)});
  for (const double oversubscription : {1.0, 3.0}) {
    plain.network.oversubscription = oversubscription;
    Cluster level = plain;
    level.network.oversubscription = 1.0;
    level.network.levels = {{.name = "all", .nodes = {}, .oversubscription = oversubscription, .latency = Seconds(3)}};
    // And a spine with the same loss above leaves of one node each.
    Cluster leaves = level;
    leaves.network.levels = leaf_and_spine(1, oversubscription);
    leaves.network.levels[1].latency = Seconds(3);
    for_each_mesh(plain.devices(), [&](const DeviceMesh& m) {
      for (const Axis axis : all_axes) {
        CHECK(group_network(plain, m, axis) == group_network(level, m, axis));
        if (m.degree_of(axis) > 1) CHECK(ring(leaves, m, axis) == doctest::Approx(ring(plain, m, axis)));
      }
      if (m.degree_of(Axis::pp) > 1) CHECK(stage_network(plain, m, 0, 1) == stage_network(level, m, 0, 1));
    });
  }
}

TEST_CASE("more oversubscription is never faster, nor is a level more") {
  for_each_mesh(40, [&](const DeviceMesh& m) {
    for (const Axis axis : all_axes) {
      double before = INFINITY;
      for (const double oversubscription : {1.0, 2.0, 16.0}) {
        const double now = ring(cluster_of({nodes_of(4, 4, 10)}, leaf_and_spine(2, oversubscription)), m, axis);
        CHECK(now <= before);
        before = now;
      }
      CHECK(ring(cluster_of({nodes_of(4, 4, 10)}, leaf_and_spine(2, 1.0)), m, axis) <=
            ring(cluster_of({nodes_of(4, 4, 10)}), m, axis) * (1 + 1e-9));
    }
  });
}

TEST_CASE("rails cost nothing where every hop stays on its rail") {
  for (const DeviceMesh& m : {mesh(1, 8, 8), mesh(2, 4, 8), mesh(1, 64, 1), mesh(4, 2, 8, "dp-pp-tp"), mesh(1, 16, 4)})
    for (const bool pxn : {true, false}) {
      const Cluster plain = cluster_of({nodes_of(8, 8, 8)}, leaf_and_spine(4, 8.0));
      Cluster rails = plain;
      rails.network.rails = true;
      rails.network.pxn = pxn;
      for (const Axis axis : all_axes)
        if (m.degree_of(axis) > 1) CHECK(ring(rails, m, axis) == doctest::Approx(ring(plain, m, axis)));
      if (m.degree_of(Axis::pp) > 1)
        CHECK(stage_network(rails, m, 0, 1).ring_bandwidth.value ==
              doctest::Approx(stage_network(plain, m, 0, 1).ring_bandwidth.value));
    }
}

TEST_CASE("a hop that changes rails crosses NVLink first, or the spine without it") {
  // Six nodes of two devices with a NIC each; groups of four ranks, three apart: each hop goes to
  // the other rail. With PXN both devices of a node hand all their traffic to each other: a NIC
  // still sends 1, and so does each NVLink one way.
  const DeviceMesh m = mesh(1, 4, 3);
  Cluster cluster = cluster_of({nodes_of(2, 2, 6, 4.0)}, leaf_and_spine(3, 1.0));
  CHECK(ring(cluster, m, Axis::dp) == doctest::Approx(10));  // no rails
  cluster.network.rails = true;
  CHECK(ring(cluster, m, Axis::dp) == doctest::Approx(4));   // NVLinks of 4 B/s
  // Without PXN, two ranks of each node send through the spine. Two of a leaf's three nodes send to
  // nodes of their leaf: 4; and three groups leave the leaf. Its NICs' 60 B/s, a quarter of them
  // through the spine, are 15 / 7.
  cluster.network.pxn = false;
  cluster.network.levels[1].oversubscription = 4.0;
  CHECK(ring(cluster, m, Axis::dp) == doctest::Approx(15.0 / 7));
  CHECK(group_network(cluster, m, Axis::dp).inter_latency.value == doctest::Approx(5 + 4 * 0.5e-6));
}

TEST_CASE("stages a part of a node apart change rails too") {
  // Three nodes of two devices, stages of three ranks: 0 sends to 3, 1 to 4 and 2 to 5, from one
  // rail to the other. The devices of a node first exchange what they send.
  Cluster cluster = cluster_of({nodes_of(2, 2, 3, 4.0)}, leaf_and_spine(3, 1.0));
  CHECK(stage_network(cluster, mesh(2, 3, 1), 0, 1).ring_bandwidth.value == doctest::Approx(10));
  cluster.network.rails = true;
  CHECK(stage_network(cluster, mesh(2, 3, 1), 0, 1).ring_bandwidth.value == doctest::Approx(4));
  // Through the spine instead: all six ranks share a tenth of the NICs' 60 B/s: 6 / 6.
  cluster.network.pxn = false;
  cluster.network.levels[1].oversubscription = 10.0;
  CHECK(stage_network(cluster, mesh(2, 3, 1), 0, 1).ring_bandwidth.value == doctest::Approx(1));
}

TEST_CASE("unlike nodes: the slowest decides, by hand") {
  // Ranks 0-1 and 2-3 on nodes of two devices with a NIC of 10 B/s each, ranks 4-7 on a node of
  // four with one NIC of 10.
  const Cluster cluster = cluster_of({nodes_of(2, 2, 2), nodes_of(4, 1, 1)});
  // One ring: each NIC of the small nodes carries half of it, the one of the large node all of it.
  const GroupNetwork all = group_network(cluster, mesh(1, 8, 1), Axis::dp);
  CHECK(all.ranks == 8);
  CHECK(all.nodes == 3);
  CHECK(all.ring_bandwidth.value == doctest::Approx(10));
  // Two rings: ranks 4, 6 and 5, 7 are two members each of the large node, all through one NIC: 5.
  CHECK(ring(cluster, mesh(1, 4, 2), Axis::dp) == doctest::Approx(5));
  CHECK(group_network(cluster, mesh(1, 4, 2), Axis::dp).nodes == 3);
  // Everywhere, pairs are within nodes.
  CHECK(ring(cluster, mesh(1, 4, 2), Axis::tp) == 100);
  CHECK(group_network(cluster, mesh(1, 4, 2), Axis::tp).nodes == 1);
  // The first four ranks are on one kind of node.
  CHECK(ring(cluster, mesh(1, 4, 1), Axis::dp) == doctest::Approx(20));
  // Four ranks of the small nodes to four of the large one: 10 / 4.
  CHECK(stage_network(cluster, mesh(2, 4, 1), 0, 1).ring_bandwidth.value == doctest::Approx(2.5));
  CHECK(stage_network(cluster, mesh(2, 4, 1), 0, 1).nodes == 2);
}

TEST_CASE("rails: groups whose stride is more than a node and no whole number of nodes are seen at their worst node") {
  // Pairs of ranks nine apart on nodes of eight, two devices a NIC: a block is 0-8 and 9-17, the
  // next 18-26 and 27-35. A rank's partner is one device further in its node, or for the second
  // half one device back, and each flow leaves by its partner's rail. Node 0: all go one further,
  // two flows a NIC. Node 1 (ranks 8-15): devices 0 and 2 send to 1, device 1 to 0: three flows
  // leave by the first NIC. Node 2 (16-23), devices 0 and 1 back, the others further: to 7, 0, 3,
  // 4, 5, 6, 7, 0, three by the last. Node 3 (24-31), devices 0 to 2 further, the others back: to
  // 1, 2, 3, 2, 3, 4, 5, 6, and four flows share 10 B/s.
  Cluster cluster = cluster_of({nodes_of(8, 4, 5)}, leaf_and_spine(5, 1.0));
  cluster.network.rails = true;
  CHECK(ring(cluster, mesh(2, 2, 9), Axis::dp) == doctest::Approx(2.5));
}

TEST_CASE("random clusters have the same networks written as one group of nodes and as groups of one node each") {
  std::mt19937 random(20261121);
  const auto upto = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most)); };
  const auto divisor_of = [&](int number) {
    std::vector<int> divisors;
    for (int d = 1; d <= number; ++d)
      if (number % d == 0) divisors.push_back(d);
    return divisors[upto(static_cast<int>(divisors.size()))];
  };
  int several_nodes = 0;
  for (int setting = 0; setting < 400; ++setting) {
    const int devices = 2 + upto(7), nodes = 2 + upto(12);
    const Intra intra = std::array{Intra::nvswitch, Intra::nvlink_mesh, Intra::pcie}[upto(3)];
    NodeGroup group = nodes_of(devices, divisor_of(devices), nodes, std::array{4.0, 20.0, 100.0}[upto(3)], intra);
    Cluster one = cluster_of({group});
    one.network.oversubscription = 1.0 + upto(3);
    if (upto(4) > 0) {
      one.network.oversubscription = 1.0;
      one.network.levels = leaf_and_spine(1 + upto(4), std::exp2(upto(6)));
      one.network.rails = upto(4) > 0;
      one.network.pxn = upto(2) == 0;
    }
    Cluster split = one;
    group.nodes = 1;
    split.groups.assign(static_cast<std::size_t>(nodes), group);
    for (int trial = 0; trial < 40; ++trial) {
      const int size = 1 + upto(one.devices());
      const int pp = divisor_of(size), dp = divisor_of(size / pp);
      const DeviceMesh m = mesh(pp, dp, size / pp / dp, orders[upto(6)]);
      const auto same = [&](const char* what, const GroupNetwork& a, const GroupNetwork& b) {
        INFO(what, " of pp ", pp, " dp ", dp, " tp ", size / pp / dp, " ", write_order(m.order), " on ", nodes,
             " nodes of ", devices, ", ", write_cluster(one));
        CHECK(a.ranks == b.ranks);
        CHECK(a.nodes == b.nodes);
        CHECK(a.ring_bandwidth.value == doctest::Approx(b.ring_bandwidth.value).epsilon(1e-9));
        CHECK(a.tree_bandwidth.value == doctest::Approx(b.tree_bandwidth.value).epsilon(1e-9));
        CHECK(a.intra_latency.value == doctest::Approx(b.intra_latency.value));
        CHECK(a.inter_latency.value == doctest::Approx(b.inter_latency.value));
        CHECK(a.nvlink == b.nvlink);
        several_nodes += a.nodes > 1;
      };
      for (const Axis axis : all_axes)
        if (m.degree_of(axis) > 1) same(name(axis), group_network(one, m, axis), group_network(split, m, axis));
      for (int stage = 1; stage < pp; ++stage) {
        same("stages", stage_network(one, m, stage - 1, stage), stage_network(split, m, stage - 1, stage));
        same("stages back", stage_network(one, m, stage, stage - 1), stage_network(split, m, stage, stage - 1));
      }
    }
  }
  CHECK(several_nodes > 10'000);
}

TEST_CASE("a cluster written as several groups of equal nodes is the cluster of one group") {
  const std::vector<FabricLevel> levels = leaf_and_spine(2, 4.0);
  for (const bool rails : {false, true}) {
    Cluster one = cluster_of({nodes_of(4, 4, 10)}, levels);
    Cluster three = cluster_of({nodes_of(4, 4, 3), nodes_of(4, 4, 1), nodes_of(4, 4, 6)}, levels);
    one.network.rails = three.network.rails = rails;
    for_each_mesh(one.devices(), [&](const DeviceMesh& m) {
      INFO(rails, " ", write_order(m.order), " ", m.degree.pp, " ", m.degree.dp, " ", m.degree.tp);
      for (const Axis axis : all_axes) {
        const GroupNetwork a = group_network(one, m, axis);
        const GroupNetwork b = group_network(three, m, axis);
        if (m.degree_of(axis) == 1) continue;
        CHECK(a.nodes == b.nodes);
        CHECK(a.ring_bandwidth.value == doctest::Approx(b.ring_bandwidth.value));
        CHECK(a.tree_bandwidth.value == doctest::Approx(b.tree_bandwidth.value));
        CHECK(a.inter_latency.value == doctest::Approx(b.inter_latency.value));
        CHECK(a.intra_latency.value == doctest::Approx(b.intra_latency.value));
      }
      for (int stage = 1; stage < m.degree_of(Axis::pp); ++stage) {
        CHECK(stage_network(one, m, stage - 1, stage).ring_bandwidth.value ==
              doctest::Approx(stage_network(three, m, stage - 1, stage).ring_bandwidth.value));
        CHECK(stage_network(one, m, stage - 1, stage).nodes == stage_network(three, m, stage - 1, stage).nodes);
      }
    });
  }
}
