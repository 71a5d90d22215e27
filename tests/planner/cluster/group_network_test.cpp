#include "planner/cluster/group_network.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "planner/base/error.h"
#include "planner/cluster/node_layout.h"
#include "planner/cluster/routes.h"

using namespace parplan;

namespace {

DeviceKind test_device() {
  DeviceKind device;
  device.name = "test";
  device.title = "Test";
  device.memory_capacity = Bytes(1000);
  device.kernel_launch = Seconds(0.0);
  device.rates = {{.active = 1,
                   .matrix_fp32 = FlopsPerSecond(1),
                   .matrix_half = FlopsPerSecond(1),
                   .vector = FlopsPerSecond(1),
                   .memory = BytesPerSecond(1)}};
  device.pcie_generation = 3;
  return device;
}

// Nodes of `devices` devices of 100 B/s to a switch (2 s per hop) with `nics` NICs of `nic` B/s
// before losses. PCIe of 12 GB/s is never the limit; it takes 0.5 us per link.
Cluster test_cluster(int devices, int nics, int nodes, double nic = 10.0) {
  Cluster cluster;
  cluster.name = "test";
  cluster.groups.front().device = test_device();
  NodeLayout layout{.name = "node",
                    .devices = devices,
                    .intra = Intra::nvswitch,
                    .bandwidth = BytesPerSecond(100),
                    .latency = Seconds(2),
                    .nics = {}};
  if (nics > 0) layout.nics = NicLayout{.count = nics, .line_rate = BytesPerSecond(nic / nic_reached_share)};
  cluster.groups.front().node = build_node(layout, cluster.groups.front().device);
  cluster.groups.front().nodes = nodes;
  cluster.network.latency = Seconds(3);
  return cluster;
}

DeviceMesh mesh(int pp, int dp, int tp, const std::string& order = "pp-dp-tp") {
  return {.degree = {.pp = pp, .dp = dp, .tp = tp}, .order = parse_order(order)};
}

double ring(const Cluster& cluster, const DeviceMesh& m, Axis axis) {
  return group_network(cluster, m, axis).ring_bandwidth.value;
}
double tree(const Cluster& cluster, const DeviceMesh& m, Axis axis) {
  return group_network(cluster, m, axis).tree_bandwidth.value;
}

}  // namespace

TEST_CASE("where NCCL finds one ring of whole nodes, all of it enters a node by one NIC and leaves it by another") {
  // 4 devices a node, a NIC of 10 B/s for each; rings over 2 nodes.
  Cluster several = test_cluster(4, 4, 2), one = several;
  one.network.one_ring = true;
  const auto check = [&](const DeviceMesh& m, double with_several, double with_one) {
    CHECK(ring(several, m, Axis::dp) == doctest::Approx(with_several));
    CHECK(ring(one, m, Axis::dp) == doctest::Approx(with_one));
  };
  // All eight ranks: four channels of a NIC each, or one NIC one way.
  check(mesh(1, 8, 1), 40.0, 10.0);
  // Two groups with two members on each node, 0 and 2, 1 and 3, have two NICs each: their rings are
  // others than those of whole nodes.
  check(mesh(1, 4, 2), 20.0, 20.0);
  // Groups with one member on each node have one NIC anyway, and those within a node have none.
  check(mesh(1, 2, 4), 10.0, 10.0);
  CHECK(ring(several, mesh(1, 2, 4), Axis::tp) == ring(one, mesh(1, 2, 4), Axis::tp));
}

TEST_CASE("hosts count as AMD's where all of a job's are") {
  Cluster cluster = test_cluster(4, 4, 2);
  cluster.groups.push_back(cluster.groups.front());
  const auto of_amd = [&](const DeviceMesh& m) {
    const bool of_group = group_network(cluster, m, Axis::dp).amd_hosts;
    if (group_size(m, Axis::pp) == 2) CHECK(stage_network(cluster, m, 0, 1).amd_hosts == of_group);
    return of_group;
  };
  const DeviceMesh first = mesh(2, 4, 1), all = mesh(2, 8, 1);  // both nodes of the first group; all four
  CHECK(!of_amd(first));
  CHECK(!of_amd(all));
  cluster.groups[0].processor = ProcessorVendor::amd;
  CHECK(of_amd(first));
  CHECK(!of_amd(all));  // the others' are unknown
  cluster.groups[1].processor = ProcessorVendor::intel;
  CHECK(!of_amd(all));
  cluster.groups[1].processor = ProcessorVendor::amd;
  CHECK(of_amd(all));
}

TEST_CASE("a group of one rank communicates with nobody") {
  const GroupNetwork network = group_network(test_cluster(8, 0, 1), mesh(1, 8, 1), Axis::tp);
  CHECK(network.ranks == 1);
  CHECK(network.nodes == 1);
  CHECK(std::isinf(network.ring_bandwidth.value));
  CHECK(network.intra_latency == Seconds(0));
  CHECK(network.inter_latency == Seconds(0));
}

TEST_CASE("a ring behind a switch has each device's whole link, however many groups there are") {
  const Cluster cluster = test_cluster(8, 0, 1);
  const GroupNetwork whole = group_network(cluster, mesh(1, 1, 8), Axis::tp);
  CHECK(whole == GroupNetwork{.ranks = 8,
                              .nodes = 1,
                              .ring_bandwidth = BytesPerSecond(100),
                              .tree_bandwidth = BytesPerSecond(100),
                              .intra_latency = Seconds(2),
                              .inter_latency = Seconds(0)});
  CHECK(ring(cluster, mesh(1, 4, 2), Axis::tp) == 100);
  CHECK(ring(cluster, mesh(1, 4, 2), Axis::dp) == 100);
}

TEST_CASE("eight tensor ranks leave each data-parallel ring one of eight NICs") {
  const Cluster cluster = test_cluster(8, 8, 4);
  const GroupNetwork data = group_network(cluster, mesh(1, 4, 8), Axis::dp);
  CHECK(data.ranks == 4);
  CHECK(data.nodes == 4);
  CHECK(data.ring_bandwidth.value == doctest::Approx(10));
  CHECK(data.tree_bandwidth.value == doctest::Approx(10));
  CHECK(data.intra_latency == Seconds(0));
  CHECK(data.inter_latency.value == doctest::Approx(3 + 4 * 0.5e-6));  // two PCIe links on each side
  CHECK(ring(cluster, mesh(1, 4, 8), Axis::tp) == 100);
}

TEST_CASE("one NIC is shared by the eight data-parallel rings that leave the node") {
  CHECK(ring(test_cluster(8, 1, 2), mesh(1, 2, 8), Axis::dp) == doctest::Approx(10.0 / 8));
}

TEST_CASE("a ring over whole nodes uses all their NICs") {
  // Eight channels, each through another NIC: 80 B/s; each device's link carries 7/8 of the ring:
  // 100 * 8 / 7.
  CHECK(ring(test_cluster(8, 8, 2), mesh(1, 16, 1), Axis::dp) == doctest::Approx(80));
  CHECK(ring(test_cluster(8, 8, 2, 20.0), mesh(1, 16, 1), Axis::dp) == doctest::Approx(100.0 * 8 / 7));
  CHECK(ring(test_cluster(8, 1, 2), mesh(1, 16, 1), Axis::dp) == doctest::Approx(10));
}

TEST_CASE("with two NICs a device their rates add") {
  CHECK(ring(test_cluster(4, 8, 2), mesh(1, 2, 4), Axis::dp) == doctest::Approx(20));
  CHECK(route(test_cluster(4, 8, 2).groups.front().node, 0, {}).bandwidth.value == doctest::Approx(20));
}

TEST_CASE("oversubscription divides what leaves a node with all its NICs at work, but not one flow alone") {
  Cluster cluster = test_cluster(8, 8, 2);
  cluster.network.oversubscription = 2.0;
  CHECK(ring(cluster, mesh(1, 2, 8), Axis::dp) == doctest::Approx(5));
  cluster.groups.front().node = first_devices(cluster.groups.front().node, 8);
  // One pipeline stage per node with one rank per stage would use one NIC of eight: 80 / 2 is more
  // than its 10.
  Cluster small = test_cluster(1, 4, 2);
  small.network.oversubscription = 4.0;
  CHECK(ring(small, mesh(1, 2, 1), Axis::dp) == doctest::Approx(10));  // 4 NICs of 10, a quarter
}

TEST_CASE("two-node trees exceed the NICs, trees over more nodes do not") {
  CHECK(tree(test_cluster(8, 8, 2), mesh(1, 2, 8), Axis::dp) == doctest::Approx(20));
  CHECK(tree(test_cluster(8, 8, 3), mesh(1, 3, 8), Axis::dp) == doctest::Approx(10));
  CHECK(tree(test_cluster(8, 8, 2, 10.0), mesh(1, 16, 1), Axis::dp) == doctest::Approx(100));  // the chain inside
}

TEST_CASE("a ring of two uses both directions of a link") {
  Cluster cluster;
  cluster.groups.front().device = test_device();
  cluster.groups.front().node = build_node({.name = "pair",
                                            .devices = 2,
                                            .intra = Intra::nvlink_mesh,
                                            .bandwidth = BytesPerSecond(7),
                                            .latency = Seconds(1),
                                            .nics = {}},
                                           cluster.groups.front().device);
  CHECK(ring(cluster, mesh(1, 2, 1), Axis::dp) == 7);
}

TEST_CASE("a full mesh is used by all its links at once") {
  Cluster cluster;
  cluster.groups.front().device = test_device();
  cluster.groups.front().node = build_node({.name = "mesh",
                                            .devices = 4,
                                            .intra = Intra::nvlink_mesh,
                                            .bandwidth = BytesPerSecond(7),
                                            .latency = Seconds(1),
                                            .nics = {}},
                                           cluster.groups.front().device);
  CHECK(ring(cluster, mesh(1, 1, 4), Axis::tp) == doctest::Approx(21));  // three links a device
  CHECK(ring(cluster, mesh(1, 2, 2), Axis::tp) == doctest::Approx(7));
  CHECK(ring(cluster, mesh(1, 2, 2), Axis::dp) == doctest::Approx(7));
}

TEST_CASE("rings use NVLink pairs that rank order would miss") {
  // NVLink pairs 0-2 and 1-3 (9 B/s), all four on one host bridge by links of 4 B/s. In rank order
  // every hop is PCIe: 4 B/s. With a third of a device's traffic to each other device, two thirds
  // are PCIe: 4 / (2 / 3) = 6.
  NodeKind node;
  node.name = "pairs";
  for (int i = 0; i < 4; ++i) add_vertex(node, "GPU" + std::to_string(i), VertexKind::device);
  const int bridge = add_vertex(node, "host bridge", VertexKind::host_bridge);
  for (int i = 0; i < 4; ++i) add_link(node, i, bridge, BytesPerSecond(4), Seconds(1), "PCIe");
  add_link(node, 0, 2, BytesPerSecond(9), Seconds(1), "NV1");
  add_link(node, 1, 3, BytesPerSecond(9), Seconds(1), "NV1");
  Cluster cluster;
  cluster.groups.front().device = test_device();
  cluster.groups.front().node = node;
  CHECK(ring(cluster, mesh(1, 4, 1), Axis::dp) == doctest::Approx(6));
  CHECK(group_network(cluster, mesh(1, 4, 1), Axis::dp).intra_latency == Seconds(2));
  CHECK(ring(cluster, mesh(1, 2, 2), Axis::dp) == 9);  // 0-2 and 1-3
  CHECK(ring(cluster, mesh(1, 2, 2), Axis::tp) == 4);  // 0-1 and 2-3
}

TEST_CASE("rings visit a socket once where rank order would go to and fro") {
  // Devices 0 and 2 in one socket, 1 and 3 in the other, 5 B/s between. In rank order two hops
  // cross each way: 2.5. By nearest neighbours, 0 2 1 3, one crosses each way: 5. A third to each
  // other: 4/3 cross each way, 3.75.
  NodeKind node;
  node.name = "sockets";
  for (int i = 0; i < 4; ++i) add_vertex(node, "GPU" + std::to_string(i), VertexKind::device);
  const int left = add_vertex(node, "host bridge 0", VertexKind::host_bridge);
  const int right = add_vertex(node, "host bridge 1", VertexKind::host_bridge);
  for (int i = 0; i < 4; ++i) add_link(node, i, i % 2 == 0 ? left : right, BytesPerSecond(10), Seconds(1), "PCIe");
  add_link(node, left, right, BytesPerSecond(5), Seconds(1), "SYS");
  Cluster cluster;
  cluster.groups.front().device = test_device();
  cluster.groups.front().node = node;
  CHECK(ring(cluster, mesh(1, 4, 1), Axis::dp) == 5);
}

TEST_CASE("a host bridge link between sockets is shared by the rings that cross it") {
  // Two sockets of two devices, 5 B/s between them. Data-parallel pairs 0-2 and 1-3 both cross: 2.5
  // each way.
  NodeKind node;
  node.name = "sockets";
  for (int i = 0; i < 4; ++i) add_vertex(node, "GPU" + std::to_string(i), VertexKind::device);
  const int left = add_vertex(node, "host bridge 0", VertexKind::host_bridge);
  const int right = add_vertex(node, "host bridge 1", VertexKind::host_bridge);
  for (int i = 0; i < 4; ++i) add_link(node, i, i < 2 ? left : right, BytesPerSecond(10), Seconds(1), "PCIe");
  add_link(node, left, right, BytesPerSecond(5), Seconds(1), "SYS");
  Cluster cluster;
  cluster.groups.front().device = test_device();
  cluster.groups.front().node = node;
  CHECK(ring(cluster, mesh(1, 2, 2), Axis::dp) == 2.5);
  CHECK(ring(cluster, mesh(1, 2, 2), Axis::tp) == 10);
  CHECK(ring(cluster, mesh(1, 4, 1), Axis::dp) == 5);  // one hop each way
}

TEST_CASE("neighbouring stages send over what lies between their ranks, all at once") {
  const Cluster cluster = test_cluster(8, 8, 4);
  const GroupNetwork far = stage_network(cluster, mesh(4, 1, 8), 0, 1);
  CHECK(far.ranks == 2);
  CHECK(far.nodes == 2);
  CHECK(far.ring_bandwidth.value == doctest::Approx(10));
  CHECK(far.inter_latency.value == doctest::Approx(3 + 4 * 0.5e-6));
  CHECK(stage_network(cluster, mesh(4, 1, 8), 3, 0).ring_bandwidth.value == doctest::Approx(10));
  const GroupNetwork near = stage_network(cluster, mesh(2, 2, 8, "dp-tp-pp"), 0, 1);
  CHECK(near.nodes == 1);
  CHECK(near.ring_bandwidth == BytesPerSecond(100));
  CHECK(near.intra_latency == Seconds(2));
  CHECK(stage_network(test_cluster(8, 1, 4), mesh(4, 1, 8), 0, 1).ring_bandwidth.value == doctest::Approx(10.0 / 8));
  // Two stages of four ranks in the first node, two in the second: stage 1 to 2 leaves it with four
  // ranks.
  CHECK(stage_network(test_cluster(8, 1, 2), mesh(4, 1, 4), 1, 2).ring_bandwidth.value == doctest::Approx(10.0 / 4));
  CHECK(stage_network(test_cluster(8, 1, 2), mesh(4, 1, 4), 0, 1).ring_bandwidth.value == doctest::Approx(100));
}

TEST_CASE("groups that fit nodes badly are seen at their worst node") {
  const Cluster cluster = test_cluster(8, 8, 3);
  // Tensor groups of 12 on nodes of 8: the first group has 8 devices in node 0 and 4 in node 1, the
  // second 4 and 8. A group with four devices in a node has four NICs there: 40 B/s.
  CHECK(group_network(cluster, mesh(1, 2, 12), Axis::tp).nodes == 2);
  CHECK(ring(cluster, mesh(1, 2, 12), Axis::tp) == doctest::Approx(40));
  // Groups of 5: ranks 5 to 9 have three devices in node 0 and two in node 1, ranks 15 to 19 one in
  // node 1: 10 B/s.
  CHECK(group_network(cluster, mesh(1, 4, 5), Axis::tp).nodes == 2);
  CHECK(ring(cluster, mesh(1, 4, 5), Axis::tp) == doctest::Approx(10));
}

// Every hop of every group on every node, one by one, for a switch with one NIC per device: the
// number of flows on each device's switch link and NIC, each way.
TEST_CASE("looking at distinct nodes only gives what all nodes give") {
  const Cluster cluster = test_cluster(4, 4, 30, 60.0);
  int checked = 0;
  for (int pp = 1; pp <= 7; ++pp)
    for (int dp = 1; dp <= 7; ++dp)
      for (int tp = 1; tp <= 7; ++tp)
        for (const char* order : {"pp-dp-tp", "tp-dp-pp"}) {
          const DeviceMesh m = mesh(pp, dp, tp, order);
          if (m.size() > cluster.devices()) continue;
          for (const Axis axis : all_axes) {
            if (m.degree_of(axis) == 1) continue;
            std::map<int, double> inside;
            std::map<int, double> outside;
            int most_nodes = 1;
            for (int rank = 0; rank < m.size(); ++rank) {
              const std::vector<int> group = group_of(m, rank, axis);
              const auto here =
                  std::count_if(group.begin(), group.end(), [&](int other) { return other / 4 == rank / 4; });
              const auto ranks = static_cast<std::ptrdiff_t>(group.size());
              inside[rank] += here == ranks ? 1.0 : static_cast<double>(here - 1) / static_cast<double>(here);
              outside[rank] += here == ranks ? 0.0 : 1.0 / static_cast<double>(here);
              std::map<int, int> nodes;
              for (const int other : group) ++nodes[other / 4];
              most_nodes = std::max(most_nodes, static_cast<int>(nodes.size()));
            }
            double least = INFINITY;
            for (int rank = 0; rank < m.size(); ++rank) {
              if (inside[rank] > 0) least = std::min(least, 100.0 / inside[rank]);
              if (outside[rank] > 0) least = std::min(least, 60.0 / outside[rank]);
            }
            const GroupNetwork network = group_network(cluster, m, axis);
            INFO(pp, " ", dp, " ", tp, " ", order, " ", name(axis));
            CHECK(network.ring_bandwidth.value == doctest::Approx(least));
            CHECK(network.nodes == most_nodes);
            ++checked;
          }
        }
  CHECK(checked > 500);
}
