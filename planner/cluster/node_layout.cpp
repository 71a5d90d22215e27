#include "planner/cluster/node_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "planner/base/error.h"

namespace parplan {
namespace {

int smaller(int a, int b) { return a < b ? a : b; }

}  // namespace

BytesPerSecond pcie_bandwidth(int generation, int lanes) {
  constexpr std::array<double, 6> per_80_lanes = {15e9, 30e9, 60e9, 120e9, 240e9, 480e9};
  PARPLAN_ASSERT(generation >= 1 && generation <= 6 && lanes >= 1, fmt::format("PCIe {} x{}", generation, lanes));
  return BytesPerSecond(lanes * per_80_lanes[generation - 1] / 80.0);
}

int add_vertex(NodeKind& node, std::string name, VertexKind kind) {
  const auto vertex = static_cast<int>(node.vertices.size());
  node.vertices.push_back({.name = std::move(name), .kind = kind});
  if (kind == VertexKind::device) node.devices.push_back(vertex);
  return vertex;
}

void add_link(NodeKind& node, int a, int b, BytesPerSecond bandwidth, Seconds latency, std::string kind,
              std::optional<BytesPerSecond> line_rate) {
  node.links.push_back({.a = a,
                        .b = b,
                        .bandwidth = bandwidth,
                        .latency = latency,
                        .kind = std::move(kind),
                        .line_rate = line_rate});
}

std::optional<std::string> problem_with(const NodeLayout& layout, const DeviceKind& device) {
  const bool nvlink = layout.intra == Intra::nvswitch || layout.intra == Intra::nvlink_mesh;
  if (nvlink && !layout.bandwidth && device.nvlinks == 0)
    return fmt::format("device '{}' has no NVLink; write the links' 'bandwidth'", device.name);
  if (layout.intra == Intra::nvlink_mesh && !layout.bandwidth && layout.devices > 1 &&
      device.nvlinks % (layout.devices - 1) != 0)
    return fmt::format("{} NVLinks of device '{}' do not divide evenly over {} others; write the links' 'bandwidth'",
                       device.nvlinks, device.name, layout.devices - 1);
  if (layout.intra == Intra::pcie && !layout.bandwidth && device.pcie_generation == 0)
    return fmt::format("device '{}' has no PCIe; write the links' 'bandwidth'", device.name);
  if (layout.intra == Intra::memory && !layout.bandwidth)
    return std::string("memory says nothing of its speed; write the 'bandwidth' of one device's link to it");
  if (!layout.nics) return std::nullopt;
  if (device.pcie_generation == 0) return fmt::format("device '{}' has no PCIe to reach NICs by", device.name);
  const int few = smaller(layout.devices, layout.nics->count);
  if (layout.devices % few != 0 || layout.nics->count % few != 0)
    return fmt::format(
        "{} NICs cannot be shared evenly by {} devices; one number must divide the other, or write vertices and links",
        layout.nics->count, layout.devices);
  return std::nullopt;
}

NodeKind build_node(const NodeLayout& layout, const DeviceKind& device) {
  const auto problem = problem_with(layout, device);
  PARPLAN_ASSERT(!problem, *problem);
  NodeKind node;
  node.name = layout.name;
  const bool cores = layout.intra == Intra::memory;
  for (int i = 0; i < layout.devices; ++i)
    add_vertex(node, fmt::format("{}{}", cores ? "core" : "GPU", i), VertexKind::device);
  const int links = device.nvlinks;
  const BytesPerSecond per_link = device.nvlink_per_link_reached;
  std::optional<int> host_bridge;
  if (layout.intra == Intra::nvlink_mesh) {
    const int per_pair = layout.devices > 1 ? links / (layout.devices - 1) : links;
    for (int i = 0; i < layout.devices; ++i)
      for (int j = i + 1; j < layout.devices; ++j)
        add_link(node, i, j, layout.bandwidth.value_or(per_link * per_pair),
                 layout.latency.value_or(nvlink_hop_latency), per_pair > 0 ? fmt::format("NV{}", per_pair) : "NVLink");
  } else {
    struct Star {
      const char* name;
      VertexKind kind;
      BytesPerSecond bandwidth;
      Seconds hop;
      std::string link;
    };
    const bool pcie = layout.intra == Intra::pcie;
    const Star star =
        cores ? Star{"memory", VertexKind::memory, {}, {}, "memory"}
        : pcie ? Star{"host bridge", VertexKind::host_bridge,
                      layout.bandwidth ? *layout.bandwidth : pcie_bandwidth(device.pcie_generation, device.pcie_lanes),
                      2.0 * pcie_link_latency, "PCIe"}
               : Star{"NVSwitch", VertexKind::nvswitch, per_link * links, nvlink_hop_latency,
                      links > 0 ? fmt::format("NV{}", links) : "NVLink"};
    const int center = add_vertex(node, star.name, star.kind);
    if (pcie) host_bridge = center;
    for (int i = 0; i < layout.devices; ++i)
      add_link(node, i, center, layout.bandwidth.value_or(star.bandwidth), layout.latency.value_or(star.hop) / 2.0,
               star.link);
  }
  if (!layout.nics) return node;

  const BytesPerSecond pcie = pcie_bandwidth(device.pcie_generation, device.pcie_lanes);
  const int count = layout.nics->count;
  const BytesPerSecond reached = layout.nics->reached.value_or(layout.nics->line_rate * nic_reached_share);
  const auto line_rate = layout.nics->reached ? std::optional(layout.nics->line_rate) : std::nullopt;
  const int network = add_vertex(node, "network", VertexKind::network);
  const int switches = host_bridge ? 0 : smaller(layout.devices, count);
  std::vector<int> pcie_switches;
  for (int s = 0; s < switches; ++s) {
    pcie_switches.push_back(add_vertex(node, fmt::format("PCIe switch {}", s), VertexKind::pcie_switch));
    for (int i = s * (layout.devices / switches); i < (s + 1) * (layout.devices / switches); ++i)
      add_link(node, i, pcie_switches.back(), pcie, pcie_link_latency, "PCIe");
  }
  for (int n = 0; n < count; ++n) {
    const int nic = add_vertex(node, fmt::format("NIC{}", n), VertexKind::nic);
    const int near = host_bridge ? *host_bridge : pcie_switches[n / (count / switches)];
    add_link(node, near, nic, pcie, pcie_link_latency, "PCIe");
    add_link(node, nic, network, reached, Seconds(0.0), "network", line_rate);
  }
  return node;
}

NodeKind with_devices(const NodeKind& node, const std::vector<int>& devices) {
  NodeKind part;
  part.name = node.name;
  std::vector<int> kept;
  for (const int device : devices) kept.push_back(node.devices[device]);
  std::vector<std::optional<int>> place(node.vertices.size());
  for (std::size_t v = 0; v < node.vertices.size(); ++v) {
    const bool is_device = node.vertices[v].kind == VertexKind::device;
    if (is_device && std::find(kept.begin(), kept.end(), static_cast<int>(v)) == kept.end()) continue;
    place[v] = static_cast<int>(part.vertices.size());
    part.vertices.push_back(node.vertices[v]);
  }
  for (const int device : kept) part.devices.push_back(place[device].value());
  for (Link link : node.links) {
    const std::optional<int> a = place[link.a];
    const std::optional<int> b = place[link.b];
    if (!a || !b) continue;
    link.a = *a;
    link.b = *b;
    part.links.push_back(link);
  }
  return part;
}

NodeKind first_devices(const NodeKind& node, int devices) {
  std::vector<int> first(static_cast<std::size_t>(devices));
  std::iota(first.begin(), first.end(), 0);
  NodeKind part = with_devices(node, first);
  if (node.devices_per_machine && *node.devices_per_machine < devices)
    part.devices_per_machine = node.devices_per_machine;
  return part;
}

}  // namespace parplan
