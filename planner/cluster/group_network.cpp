#include "planner/cluster/group_network.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/base/error.h"
#include "planner/cluster/disjoint_rings.h"
#include "planner/cluster/fabric_traffic.h"
#include "planner/cluster/nccl/import.h"
#include "planner/cluster/node_traffic.h"
#include "planner/cluster/occupied_nodes.h"

namespace parplan {
namespace {

constexpr double infinite = std::numeric_limits<double>::infinity();

// The parts of an axis's groups on the node whose first rank is `first`: ranks of one block of
// stride * degree ranks with equal remainder by the stride.
std::vector<GroupPart> parts_of(int first, int count, int stride, int degree) {
  std::vector<GroupPart> parts;
  const int block = stride * degree;
  for (int device = 0; device < count; ++device) {
    const int rank = first + device;
    const int start = rank / block * block;
    if (rank - stride >= std::max(start, first)) continue;  // not the first of its group here
    GroupPart part;
    for (int other = rank; other < std::min(start + block, first + count); other += stride)
      part.members.push_back(other - first);
    part.closed = static_cast<int>(part.members.size()) == degree;
    parts.push_back(std::move(part));
  }
  return parts;
}

// Records for each part which members of its group a ring reaches in the next node.
void add_next_members(const Cluster& cluster, const AxisLayout& axis, const OccupiedNode& node,
                      std::vector<GroupPart>& parts) {
  const int block = axis.stride * axis.degree;
  for (GroupPart& part : parts) {
    if (part.closed) continue;
    const int last = node.first + part.members.back();
    const int start = last / block * block;
    const int next = last + axis.stride < start + block ? last + axis.stride : start + (last - start) % axis.stride;
    const OccupiedNode other = node_of(cluster, axis.ranks, next);
    part.next_routes = other.routes;
    for (int rank = next; rank < std::min(start + block, other.first + other.ranks); rank += axis.stride)
      part.next.push_back(rank - other.first);
  }
}

// The rates at which the first block of a level above the lowest is full, and the highest level
// that the axis crosses.
struct FabricRates {
  BytesPerSecond ring{infinite};
  BytesPerSecond tree{infinite};
  std::size_t level = 0;
};

// `leaving(first, last)` is the traffic that leaves the ranks [first, last), in units of the rate
// of one rank. `between_rails` is the traffic that leaves a node by the wrong rail for another node
// of its block.
template <class Leaving>
FabricRates fabric_rates(const Cluster& cluster, const AxisLayout& axis, double exchanged, double between_rails_ring,
                         double between_rails_tree, const Leaving& leaving) {
  FabricRates rates;
  const std::vector<FabricLevel>& levels = cluster.network.levels;
  for (std::size_t level = 1; level < levels.size(); ++level)
    for (const FabricBlock& block : blocks_of(cluster, axis, *levels[level - 1].nodes)) {
      const double out = leaving(block.first, block.last);
      // Hops from node to node within the block.
      const double inside = level == 1 ? block.nodes - (out > 0.0 ? 1.0 : 0.0) : 0.0;
      const double ring = out + inside * between_rails_ring;
      const double tree = out * exchanged + inside * between_rails_tree;
      if (ring <= 0.0) continue;
      rates.level = level;
      rates.ring = std::min(rates.ring, block.nics / (levels[level].oversubscription * ring));
      rates.tree = std::min(rates.tree, block.nics / (levels[level].oversubscription * tree));
    }
  return rates;
}

double lowest_oversubscription(const Network& network) {
  return network.levels.empty() ? network.oversubscription : network.levels.front().oversubscription;
}
Seconds latency_through(const Network& network, std::size_t level) {
  return network.levels.empty() ? network.latency : network.levels[level].latency;
}
// For a group that leaves its nodes, by NICs with links of `uplink` and through `level`.
void add_hop_between_nodes(const Network& network, std::size_t level, Seconds uplink, GroupNetwork& result) {
  result.inter_latency = 2.0 * uplink + latency_through(network, level);
  result.post_overhead = network.post_overhead.value_or(Seconds(0.0));
  result.ring_protocols = network.ring_protocols;
  result.tree_protocols = network.tree_protocols;
  result.transfer_chunk = network.transfer_chunk;
}

// The lowest among the GPUs of a job, which is what NCCL uses; 0 where one of them is unknown.
int lowest_capability(std::span<const NodeGroup> groups) {
  std::optional<int> lowest;
  for (const NodeGroup& group : groups) {
    const int own = compute_capability_of(group.device.name).value_or(0);
    lowest = std::min(lowest.value_or(own), own);
  }
  return lowest.value_or(0);
}

bool all_amd(std::span<const NodeGroup> groups) {
  return std::ranges::all_of(groups, [](const NodeGroup& group) { return group.processor == ProcessorVendor::amd; });
}

// A device's link to the NVSwitch that joins all of the node; 0 where another thing does.
BytesPerSecond link_to_nvswitch(const NodeRoutes& routes) {
  if (!routes.star || routes.between.size() < 2) return {};
  const Link& link = routes.node.links[link_of(routes.between[0][1].arcs.front())];
  const int middle = link.a == routes.node.devices[0] ? link.b : link.a;
  return routes.node.vertices[middle].kind == VertexKind::nvswitch ? link.bandwidth : BytesPerSecond();
}

constexpr int nvlink_sharp_since = 90;  // compute capability (ncclTopoCompute, NVIDIA/nccl src/graph/search.cc)

void check_fits(const Cluster& cluster, const DeviceMesh& mesh) {
  PARPLAN_ASSERT(mesh.size() <= cluster.devices(),
                 std::to_string(mesh.size()) + " ranks on " + std::to_string(cluster.devices()) + " devices");
}

}  // namespace

GroupNetwork group_network(const Cluster& cluster, const DeviceMesh& mesh, Axis axis) {
  return group_network(cluster, mesh, group_size(mesh, axis), group_stride(mesh, axis));
}

GroupNetwork group_network(const Cluster& cluster, const DeviceMesh& mesh, int degree, int stride) {
  check_fits(cluster, mesh);
  const int ranks = mesh.size();
  const int per_node = cluster.groups.front().devices_per_node();
  const bool alike = cluster.groups.size() == 1 || ranks <= cluster.groups.front().devices();
  const std::vector<OccupiedNode> nodes =
      alike ? occupied_nodes(cluster, ranks, distinct_nodes(ranks, per_node, stride, degree, cluster.network.rails))
            : occupied_nodes(cluster, ranks);
  GroupNetwork result{
      .ranks = degree,
      .nodes = alike ? nodes_spanned(ranks, per_node, stride, degree) : nodes_spanned(nodes, ranks, stride, degree),
      .ring_bandwidth = BytesPerSecond(infinite),
      .tree_bandwidth = BytesPerSecond(infinite),
      .intra_latency = {},
      .inter_latency = {}};
  if (degree == 1) return result;
  result.compute_capability = lowest_capability(groups_in_use(cluster, ranks));
  result.amd_hosts = all_amd(groups_in_use(cluster, ranks));
  const double exchanged = result.nodes == 2 ? 0.5 : 1.0;
  const Network& network = cluster.network;
  const AxisLayout axis_layout{.ranks = ranks, .stride = stride, .degree = degree};

  std::array<BytesPerSecond, all_hop_layouts.size()> ring;
  std::array<BytesPerSecond, all_hop_layouts.size()> tree;
  std::array<Seconds, all_hop_layouts.size()> intra_latency;
  std::array<bool, all_hop_layouts.size()> nvlink;
  ring.fill(BytesPerSecond(infinite));
  tree.fill(BytesPerSecond(infinite));
  nvlink.fill(true);
  Seconds uplink_latency;
  BytesPerSecond uplinks(infinite);
  BytesPerSecond to_switch(infinite);
  double between_rails_ring = 0.0;
  double between_rails_tree = 0.0;
  for (const OccupiedNode& node : alike ? nodes : distinct_of(nodes, stride, degree, network.rails)) {
    const NodeRoutes& routes = *node.routes;
    std::vector<GroupPart> parts = parts_of(node.first, node.ranks, stride, degree);
    if (network.rails && result.nodes > 1) add_next_members(cluster, axis_layout, node, parts);
    if (!routes.star)
      for (GroupPart& part : parts) part.rings = disjoint_rings(routes, part.members);
    to_switch = std::min(to_switch, link_to_nvswitch(routes));
    if (result.nodes > 1) {
      NodeLoad load(routes);
      for (const GroupPart& part : parts) add_exchange(routes, part, 1.0, network, load);
      uplinks = std::min(uplinks, rate(routes, lowest_oversubscription(network), load));
    }
    NodeLoad ring_load(routes);
    NodeLoad tree_load(routes);
    BytesPerSecond ring_here;
    BytesPerSecond tree_here;
    for (std::size_t i = 0; i < all_hop_layouts.size(); ++i) {
      // Around one switch every layout crosses the same links: the first represents all.
      if (!routes.star || i == 0) {
        ring_load.clear();
        tree_load.clear();
        for (const GroupPart& part : parts) {
          add_ring(routes, part, all_hop_layouts[i], network, ring_load);
          add_tree(routes, part, all_hop_layouts[i], exchanged, network, tree_load);
        }
        ring_here = rate(routes, lowest_oversubscription(network), ring_load);
        tree_here = rate(routes, lowest_oversubscription(network), tree_load);
      }
      ring[i] = std::min(ring[i], ring_here);
      tree[i] = std::min(tree[i], tree_here);
      intra_latency[i] = std::max(intra_latency[i], ring_load.intra_latency);
      nvlink[i] = nvlink[i] && ring_load.nvlink;
      uplink_latency = std::max(uplink_latency, ring_load.uplink_latency);
      between_rails_ring = std::max(between_rails_ring, ring_load.between_rails);
      between_rails_tree = std::max(between_rails_tree, tree_load.between_rails);
    }
  }
  // Layouts that differ by rounding only are equal: the first is taken.
  const auto best_of = [](const std::array<BytesPerSecond, all_hop_layouts.size()>& rates) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < rates.size(); ++i)
      if (rates[i] > rates[best] * (1.0 + 1e-9)) best = i;
    return best;
  };
  const std::size_t best = best_of(ring);
  const FabricRates fabric =
      fabric_rates(cluster, axis_layout, exchanged, between_rails_ring, between_rails_tree,
                   [&](int first, int last) { return static_cast<double>(groups_leaving(axis_layout, first, last)); });
  result.ring_bandwidth = std::min(ring[best], fabric.ring);
  result.intra_latency = intra_latency[best];
  result.nvlink = nvlink[best];
  result.tree_bandwidth = std::min(tree[best_of(tree)], fabric.tree);
  if (result.compute_capability >= nvlink_sharp_since) result.nvls_bandwidth = to_switch;
  if (result.nodes > 1) {
    result.uplink_bandwidth = std::min(uplinks, fabric.ring);
    add_hop_between_nodes(network, fabric.level, uplink_latency, result);
  }
  return result;
}

bool has_nvlink_sharp(const Cluster& cluster) {
  // A job has the first group's devices whatever else it has.
  for (const NodeGroup& group : cluster.groups) {
    if (lowest_capability({&group, 1}) < nvlink_sharp_since) return false;
    if (std::ranges::any_of(group.node.vertices,
                            [](const Vertex& vertex) { return vertex.kind == VertexKind::nvswitch; }))
      return true;
  }
  return false;
}

GroupNetwork stage_network(const Cluster& cluster, const DeviceMesh& mesh, int from_stage, int to_stage) {
  check_fits(cluster, mesh);
  const int stages = mesh.degree_of(Axis::pp);
  PARPLAN_ASSERT(from_stage >= 0 && from_stage < stages && to_stage >= 0 && to_stage < stages && from_stage != to_stage,
                 std::to_string(from_stage) + " to " + std::to_string(to_stage) + " of " + std::to_string(stages));
  const int stride = mesh.stride_of(Axis::pp);
  const int block = stride * stages;
  const int ranks = mesh.size();
  const int per_node = cluster.groups.front().devices_per_node();
  const int distance = (to_stage - from_stage) * stride;

  // Nodes that show every pattern: if stages have whole nodes, one of each stage; if nodes have
  // whole blocks, any; otherwise those at which the two stages begin and end in each block, and the
  // next ones; on heterogeneous nodes, all.
  const bool alike = cluster.groups.size() == 1 || ranks <= cluster.groups.front().devices();
  std::vector<int> nodes;
  const int used = static_cast<int>(ceil_div(ranks, per_node));
  if (!alike) {
    // occupied_nodes below
  } else if (stride % per_node == 0) {
    nodes = {from_stage * stride / per_node, to_stage * stride / per_node};
  } else if (per_node % block == 0 || ranks <= per_node) {
    nodes = {0};
  } else {
    const int period = std::min(used, block / std::gcd(block, per_node));
    const int blocks = std::min(ranks / block, per_node / std::gcd(block, per_node));
    if (period <= 16 * blocks) {
      for (int node = 0; node < period; ++node) nodes.push_back(node);
    } else {
      for (int b = 0; b < blocks; ++b)
        for (const int stage : {from_stage, from_stage + 1, to_stage, to_stage + 1})
          for (const int before : {per_node, 1, 0, -per_node})
            nodes.push_back(std::clamp((b * block + stage * stride - before) / per_node, 0, used - 1));
    }
    nodes.push_back(used - 1);
    std::ranges::sort(nodes);
    nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
  }

  GroupNetwork result{.ranks = 2,
                      .nodes = 1,
                      .ring_bandwidth = BytesPerSecond(infinite),
                      .tree_bandwidth = BytesPerSecond(infinite),
                      .intra_latency = {},
                      .inter_latency = {}};
  const Network& network = cluster.network;
  const AxisLayout axis_layout{.ranks = ranks, .stride = stride, .degree = stages};
  Seconds uplink_latency;
  double between_rails = 0.0;
  for (const OccupiedNode& node : alike ? occupied_nodes(cluster, ranks, nodes) : occupied_nodes(cluster, ranks)) {
    const NodeRoutes& routes = *node.routes;
    NodeLoad load(routes);
    const int first = node.first;
    const int last = first + node.ranks;
    for (int rank = first; rank < last; ++rank) {
      const int stage = rank / stride % stages;
      if (stage != from_stage && stage != to_stage) continue;
      const int partner = stage == from_stage ? rank + distance : rank - distance;
      // Activations go one way while gradients come back: each rank sends to its partner and
      // receives from it.
      if (partner >= first && partner < last) {
        add_hop(routes, rank - first, partner - first, 1.0, load);
      } else if (network.rails) {
        const OccupiedNode other = node_of(cluster, ranks, partner);
        add_exchange_on_rails(routes, {rank - first}, *other.routes, {partner - other.first}, 1.0, network, load);
      } else {
        add_exchange(routes, rank - first, 1.0, load);
      }
    }
    result.ring_bandwidth = std::min(result.ring_bandwidth, rate(routes, lowest_oversubscription(network), load));
    result.intra_latency = std::max(result.intra_latency, load.intra_latency);
    result.nvlink = result.nvlink && load.nvlink;
    uplink_latency = std::max(uplink_latency, load.uplink_latency);
    between_rails = std::max(between_rails, load.between_rails);
    if (load.out > 0.0) result.nodes = 2;
  }
  const FabricRates fabric =
      fabric_rates(cluster, axis_layout, 1.0, between_rails, between_rails, [&](int first, int last) {
        return static_cast<double>(ranks_leaving(axis_layout, from_stage, to_stage, first, last));
      });
  result.ring_bandwidth = std::min(result.ring_bandwidth, fabric.ring);
  if (result.nodes > 1) add_hop_between_nodes(network, fabric.level, uplink_latency, result);
  result.tree_bandwidth = result.ring_bandwidth;
  result.compute_capability = lowest_capability(groups_in_use(cluster, ranks));
  result.amd_hosts = all_amd(groups_in_use(cluster, ranks));
  return result;
}

}  // namespace parplan
