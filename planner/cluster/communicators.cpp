#include "planner/cluster/communicators.h"

#include <algorithm>
#include <limits>
#include <span>

namespace parplan {
namespace {

// NCCL's buffers of one channel's connection (src/include/comm.h and src/transport/p2p.cc of
// NVIDIA/nccl at 5067397c): 4 MiB of Simple, 4.7 of LL128 and 0.5 of LL at the receiver, in pages
// of 2 MiB; the sender inside a node has one page of flags.
constexpr Bytes mebibyte{std::int64_t{1} << 20};
constexpr Bytes receiver = mebibyte * 10, sender_inside = mebibyte * 2;
// Channels that NCCL lays over NVLink: 24 of collectives on 8 A100, H100 and H200 (12 that its
// search finds, doubled), 32 of transfers; few over PCIe, and 2 for each NIC between nodes.
constexpr int ring_channels = 24, transfer_channels = 32, channels_without_nvlink = 4, channels_of_nic = 2;

struct Nodes {
  int devices = 0;  // of the smallest
  bool nvlink = false;
};
Nodes nodes_of(std::span<const NodeGroup> groups) {
  Nodes nodes{.devices = std::numeric_limits<int>::max(), .nvlink = true};
  for (const NodeGroup& group : groups) {
    nodes.devices = std::min(nodes.devices, group.devices_per_node());
    nodes.nvlink = nodes.nvlink && group.device.nvlinks > 0;
  }
  return nodes;
}

}  // namespace

int collective_channels(bool nvlink, int members, bool inside) {
  const int of_node = nvlink ? ring_channels : channels_without_nvlink;
  return inside ? of_node : std::min(of_node, channels_of_nic * members);
}

Bytes communicator_memory(const Cluster& cluster, const DeviceMesh& mesh, const PerAxis<bool>& rings) {
  Bytes sum;
  if (!is_accelerator(cluster.backend())) return sum;
  const Nodes nodes = nodes_of(groups_in_use(cluster, mesh.size()));
  const auto connection = [](bool inside) { return receiver + (inside ? sender_inside : receiver); };
  const auto neighbours = [&](int ranks, bool inside) {
    const int channels = !inside ? channels_of_nic : nodes.nvlink ? transfer_channels : channels_without_nvlink;
    return connection(inside) * (channels * (ranks > 2 ? 2 : 1));
  };
  for (const Axis axis : all_axes) {
    const int ranks = group_size(mesh, axis), stride = axis == Axis::tp ? 1 : mesh.degree_of(Axis::tp);
    if (axis == Axis::pp || ranks == 1) continue;
    const auto ring = [&](int size, int apart) { return neighbours(size, size * apart <= nodes.devices); };
    const auto collectives = [&](int size, int apart) {
      const bool inside = size * apart <= nodes.devices;
      const int members = std::clamp(nodes.devices / apart, 1, size);  // on a node
      return connection(inside) * collective_channels(nodes.nvlink, members, inside);
    };
    const int exchanging = axis == Axis::cp ? mesh.cp_ulysses : 1;
    if (exchanging > 1) sum += collectives(exchanging, stride);
    if (rings[axis]) sum += ring(ranks / exchanging, stride * exchanging);
    if (rings[axis] && axis == Axis::cp) continue;
    sum += collectives(ranks / exchanging, stride * exchanging);
  }
  const int stages = mesh.degree_of(Axis::pp), stride = mesh.size() / stages;
  if (stages > 1) sum += (rings.pp ? 2 : 1) * neighbours(stages, stages * stride <= nodes.devices);
  return sum;
}

Bytes memory_overhead(const Cluster& cluster, const Engine& engine, const DeviceMesh& mesh,
                      const PerAxis<bool>& rings) {
  const Bytes of_device = memory_overhead(cluster, mesh.size());
  if (!is_accelerator(cluster.backend())) return of_device;
  const Bytes libraries = engine.libraries.count > 0 ? engine.libraries + assumed_communicators : Bytes(0);
  const Bytes communicators = communicator_memory(cluster, mesh, rings);
  return std::max(of_device, libraries) + std::max(communicators - assumed_communicators, Bytes(0));
}

}  // namespace parplan
