#include "planner/cluster/host_share.h"

#include <algorithm>
#include <limits>
#include <queue>
#include <vector>

#include <fmt/format.h>

namespace parplan {
namespace {

// The links from a vertex to the nearest host bridge over PCIe switches alone; nothing where there
// is no such way.
std::optional<std::vector<int>> way_to_host(const NodeKind& node, int from) {
  const std::size_t vertices = node.vertices.size();
  std::vector<int> over(vertices, -1), before(vertices, -1);
  std::queue<int> open;
  open.push(from);
  before[static_cast<std::size_t>(from)] = from;
  while (!open.empty()) {
    const int at = open.front();
    open.pop();
    if (node.vertices[at].kind == VertexKind::host_bridge) {
      std::vector<int> links;
      for (int v = at; v != from; v = before[v]) links.push_back(over[v]);
      return links;
    }
    for (std::size_t l = 0; l < node.links.size(); ++l) {
      const Link& link = node.links[l];
      if (link.a != at && link.b != at) continue;
      const int next = link.a == at ? link.b : link.a;
      const VertexKind kind = node.vertices[next].kind;
      if (before[next] >= 0 || (kind != VertexKind::pcie_switch && kind != VertexKind::host_bridge)) continue;
      before[next] = at;
      over[next] = static_cast<int>(l);
      open.push(next);
    }
  }
  return std::nullopt;
}

struct LinkShare {
  BytesPerSecond rate;
  Seconds latency;
};

// The share of the device that has the least.
std::optional<LinkShare> link_share(const NodeKind& node, int active) {
  std::vector<std::vector<int>> ways;
  std::vector<int> users(node.links.size());
  for (int device = 0; device < std::min(active, static_cast<int>(node.devices.size())); ++device) {
    const std::optional<std::vector<int>> way = way_to_host(node, node.devices[device]);
    if (!way) return std::nullopt;
    for (const int link : *way) ++users[link];
    ways.push_back(*way);
  }
  LinkShare least{.rate = BytesPerSecond(std::numeric_limits<double>::infinity()), .latency = {}};
  for (const std::vector<int>& way : ways) {
    Seconds latency;
    for (const int link : way) {
      least.rate = std::min(least.rate, node.links[link].bandwidth * (1.0 / users[link]));
      latency += node.links[link].latency;
    }
    least.latency = std::max(least.latency, latency);
  }
  return least;
}

}  // namespace

std::optional<HostShare> host_share(const NodeGroup& group, int active) {
  if (!group.host || !is_accelerator(group.device.backend)) return std::nullopt;
  const int of_machine = std::clamp(active, 1, group.devices_per_machine());
  std::optional<LinkShare> link = link_share(group.node, std::max(active, 1));
  // Without a way in the graph, what a copy waits for is at least the launch that starts it.
  if (group.host->link) link = {.rate = *group.host->link, .latency = link ? link->latency : Seconds(0.0)};
  if (!link) return std::nullopt;
  return HostShare{.link = link->rate,
                   .latency = link->latency + group.device.kernel_launch,
                   .memory_bandwidth = group.host->memory_bandwidth * (1.0 / of_machine)};
}

std::optional<std::string> lacks_host(const Cluster& cluster) {
  for (const NodeGroup& group : cluster.groups) {
    if (!is_accelerator(group.device.backend) || host_share(group, 1)) continue;
    if (!group.host)
      return fmt::format(
          "offload needs the rates of the host, and cluster '{}' states none for {}; add to its file, with the rate of "
          "each device while all copy, host: {{memory: 1 TiB, memory_bandwidth: 400 GB/s, link: 12 GB/s}}",
          cluster.name, group.device.name);
    return fmt::format(
        "offload needs the way from each device to its host, and the node of {} in cluster '{}' has none over PCIe "
        "switches; add 'link' to its 'host', the rate of each device while all copy",
        group.device.name, cluster.name);
  }
  return std::nullopt;
}

std::optional<NvmeShare> nvme_share(const NodeGroup& group, int active) {
  if (!group.nvme) return std::nullopt;
  const double share = 1.0 / std::clamp(active, 1, group.devices_per_machine());
  return NvmeShare{
      .read = group.nvme->read * share, .write = group.nvme->write * share, .latency = group.nvme->latency};
}

std::optional<std::string> lacks_nvme(const Cluster& cluster) {
  for (const NodeGroup& group : cluster.groups)
    if (!group.nvme)
      return fmt::format(
          "offload to NVMe needs the rates of the drives, and cluster '{}' states none for {}; add to its file, with "
          "what all drives of a machine do together, nvme: {{read: 25 GB/s, write: 12 GB/s, capacity: 15 TB}} "
          "(parplan measure --nvme-dir measures them)",
          cluster.name, group.device.name);
  return std::nullopt;
}

namespace {

// A rank's share of what a machine of these kinds has, where its file states it: the least.
template <class OfMachine>
std::optional<Bytes> least_of_machines(const Cluster& cluster, const DeviceMesh& mesh, std::uint64_t groups,
                                       OfMachine of_machine) {
  std::optional<Bytes> least;
  for (std::size_t g = 0; g < cluster.groups.size(); ++g) {
    const NodeGroup& group = cluster.groups[g];
    if ((groups >> g & 1u) == 0) continue;
    const std::optional<Bytes> all = of_machine(group);
    if (!all) continue;
    const Bytes share(all->count / std::min(mesh.size(), group.devices_per_machine()));
    least = least ? std::min(*least, share) : share;
  }
  return least;
}

}  // namespace

std::optional<Bytes> host_memory(const Cluster& cluster, const DeviceMesh& mesh, std::uint64_t groups) {
  return least_of_machines(cluster, mesh, groups,
                           [](const NodeGroup& group) { return group.host ? group.host->memory : std::nullopt; });
}

std::optional<Bytes> nvme_capacity(const Cluster& cluster, const DeviceMesh& mesh, std::uint64_t groups) {
  return least_of_machines(cluster, mesh, groups,
                           [](const NodeGroup& group) { return group.nvme ? group.nvme->capacity : std::nullopt; });
}

}  // namespace parplan
