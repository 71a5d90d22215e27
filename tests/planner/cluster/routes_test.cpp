#include "planner/cluster/routes.h"

#include <doctest/doctest.h>

#include <cmath>

#include "planner/cluster/node_layout.h"

using namespace parplan;

namespace {

NodeKind node_of(int devices) {
  NodeKind node;
  node.name = "node";
  for (int i = 0; i < devices; ++i) add_vertex(node, "GPU" + std::to_string(i), VertexKind::device);
  return node;
}

}  // namespace

TEST_CASE("a device reaches itself at once and without limit") {
  const Route here = route(node_of(1), 0, 0);
  CHECK(here.links.empty());
  CHECK(std::isinf(here.bandwidth.value));
  CHECK(here.latency == Seconds(0));
}

TEST_CASE("NVLink is taken before a wider way over PCIe") {
  NodeKind node = node_of(2);
  const int bridge = add_vertex(node, "host bridge", VertexKind::host_bridge);
  add_link(node, 0, bridge, BytesPerSecond(50), Seconds(1), "PCIe");
  add_link(node, 1, bridge, BytesPerSecond(50), Seconds(1), "PCIe");
  add_link(node, 0, 1, BytesPerSecond(20), Seconds(5), "NV1");
  CHECK(route(node, 0, 1) == Route{.links = {2}, .bandwidth = BytesPerSecond(20), .latency = Seconds(5)});
  CHECK(routes_of(node)->between[0][1].distance == PathClass::nvlink);
}

TEST_CASE("of ways of one class the widest is taken, then the one with fewest links, then the quickest") {
  NodeKind node = node_of(2);
  const auto way = [&](double bandwidth, double latency, int switches) {
    int at = 0;
    for (int i = 0; i < switches; ++i) {
      const int next = add_vertex(node, "switch", VertexKind::pcie_switch);
      add_link(node, at, next, BytesPerSecond(bandwidth), Seconds(latency), "PCIe");
      at = next;
    }
    add_link(node, at, 1, BytesPerSecond(bandwidth), Seconds(latency), "PCIe");
  };
  way(5, 1, 1);   // links 0 1
  way(9, 1, 2);   // links 2 3 4: wider
  CHECK(route(node, 0, 1) == Route{.links = {2, 3, 4}, .bandwidth = BytesPerSecond(9), .latency = Seconds(3)});
  way(9, 7, 1);   // links 5 6: as wide, fewer
  CHECK(route(node, 0, 1) == Route{.links = {5, 6}, .bandwidth = BytesPerSecond(9), .latency = Seconds(14)});
  way(9, 2, 1);   // links 7 8: quicker
  CHECK(route(node, 0, 1) == Route{.links = {7, 8}, .bandwidth = BytesPerSecond(9), .latency = Seconds(4)});
}

TEST_CASE("no way leads through a third device or a NIC") {
  NodeKind node = node_of(3);
  add_link(node, 0, 1, BytesPerSecond(9), Seconds(1), "NV1");
  add_link(node, 1, 2, BytesPerSecond(9), Seconds(1), "NV1");
  const int nic = add_vertex(node, "NIC0", VertexKind::nic);
  add_link(node, 0, nic, BytesPerSecond(9), Seconds(1), "PCIe");
  add_link(node, 2, nic, BytesPerSecond(9), Seconds(1), "PCIe");
  CHECK(routes_of(node)->between[0][2].distance == PathClass::unreachable);
}

TEST_CASE("devices around one switch are a star, and with one that has no link they are none") {
  NodeKind node = node_of(4);
  const int nvswitch = add_vertex(node, "NVSwitch", VertexKind::nvswitch);
  for (const int device : {0, 1, 3}) add_link(node, device, nvswitch, BytesPerSecond(9), Seconds(1), "NVLink");
  CHECK(!routes_of(node)->star);
  CHECK(routes_of(node)->between[0][2].distance == PathClass::unreachable);
  add_link(node, 2, nvswitch, BytesPerSecond(9), Seconds(1), "NVLink");
  CHECK(routes_of(node)->star);
}

TEST_CASE("devices take turns at NICs that are equally near, and take the nearest") {
  // GPU0 has a NIC at its own switch; GPU1, 2 and 3 have two at the host bridge.
  NodeKind node = node_of(4);
  const int bridge = add_vertex(node, "host bridge", VertexKind::host_bridge);
  const int pcie_switch = add_vertex(node, "PCIe switch", VertexKind::pcie_switch);
  const int network = add_vertex(node, "network", VertexKind::network);
  add_link(node, 0, pcie_switch, BytesPerSecond(12), Seconds(1), "PCIe");
  add_link(node, pcie_switch, bridge, BytesPerSecond(12), Seconds(1), "PCIe");
  for (int i = 1; i < 4; ++i) add_link(node, i, bridge, BytesPerSecond(12), Seconds(1), "PCIe");
  std::vector<int> nics;
  for (int i = 0; i < 3; ++i) {
    nics.push_back(add_vertex(node, "NIC" + std::to_string(i), VertexKind::nic));
    add_link(node, nics.back(), i == 0 ? pcie_switch : bridge, BytesPerSecond(12), Seconds(1), "PCIe");
    add_link(node, nics.back(), network, BytesPerSecond(10), Seconds(1), "network");
  }
  const auto routes = routes_of(node);
  const auto nic_of = [&](std::size_t device) {
    REQUIRE(routes->uplinks[device].size() == 1);
    return routes->uplinks[device][0].nic;
  };
  CHECK(nic_of(0) == nics[0]);
  CHECK(nic_of(1) == nics[1]);
  CHECK(nic_of(2) == nics[2]);
  CHECK(nic_of(3) == nics[1]);
  CHECK(routes->network_bandwidth == BytesPerSecond(30));
  CHECK(route(node, 1, {}).latency == Seconds(3));
}

TEST_CASE("PCIe carries what NCCL counts on") {
  CHECK(pcie_bandwidth(3, 16) == BytesPerSecond(12e9));
  CHECK(pcie_bandwidth(4, 16) == BytesPerSecond(24e9));
  CHECK(pcie_bandwidth(5, 16) == BytesPerSecond(48e9));
  CHECK(pcie_bandwidth(5, 8) == BytesPerSecond(24e9));
}
