#include "planner/cluster/mesh.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>

#include <fmt/format.h>

#include "planner/base/enum.h"
#include "planner/base/error.h"
#include "planner/base/text.h"
#include "planner/cluster/fabric.h"
#include "planner/cluster/nccl/import.h"
#include "planner/cluster/rings.h"
#include "planner/cluster/routes.h"

namespace parplan {
namespace {


constexpr double infinite = std::numeric_limits<double>::infinity();

// The traffic on the links of one node, in units of the rate of one rank, and the slowest hops
// seen.
struct NodeLoad {
  std::vector<double> arcs;  // per link and direction
  double out = 0.0;          // traffic to other nodes
  // The part of it that crosses a level above the rails although the other node is in the same
  // block.
  double between_rails = 0.0;
  Seconds intra_latency;
  Seconds uplink_latency;    // device to network
  bool nvlink = true;        // all hops inside the node

  explicit NodeLoad(const NodeRoutes& routes) : arcs(2 * routes.node.links.size(), 0.0) {}
  void clear() {
    std::ranges::fill(arcs, 0.0);
    out = between_rails = 0.0;
    intra_latency = uplink_latency = Seconds();
    nvlink = true;
  }
};

void add_hop(const NodeRoutes& routes, int from, int to, double share, NodeLoad& load) {
  const Path& path = routes.between[from][to];
  PARPLAN_ASSERT(path.distance != PathClass::unreachable,
                 "device " + std::to_string(from) + " to " + std::to_string(to) + " of " + routes.node.name);
  for (const Arc arc : path.arcs) load.arcs[arc] += share;
  load.intra_latency = std::max(load.intra_latency, path.latency);
  // (Devices with a direct link, such as AMD's and Intel's, count too: RCCL treats XGMI like
  // NVLink.)
  load.nvlink = load.nvlink && (path.distance <= PathClass::nvlink || path.arcs.size() == 1);
}

const std::vector<Uplink>& uplinks_of(const NodeRoutes& routes, int device) {
  const auto& uplinks = routes.uplinks[device];
  PARPLAN_ASSERT(!uplinks.empty(),
                 "device " + std::to_string(device) + " of " + routes.node.name + " reaches no network");
  return uplinks;
}

void add_sent(const Uplink& uplink, double share, NodeLoad& load) {
  for (const Arc arc : uplink.path.arcs) load.arcs[arc] += share;
}

// Adds traffic to the network and the same from it.
void add_exchange(const NodeRoutes& routes, int device, double share, NodeLoad& load) {
  for (const Uplink& uplink : uplinks_of(routes, device)) {
    for (const Arc arc : uplink.path.arcs) {
      load.arcs[arc] += share * uplink.share;
      load.arcs[reversed(arc)] += share * uplink.share;
    }
    load.uplink_latency = std::max(load.uplink_latency, uplink.path.latency);
  }
  load.out += share;
}

// The rate of one rank at which the first link is full. The fabric carries the NICs' sum divided by
// the oversubscription of its lowest level for each node.
BytesPerSecond rate(const NodeRoutes& routes, double oversubscription, const NodeLoad& load) {
  double least = infinite;
  for (std::size_t arc = 0; arc < load.arcs.size(); ++arc)
    if (load.arcs[arc] > 0.0) least = std::min(least, routes.node.links[arc / 2].bandwidth.value / load.arcs[arc]);
  if (load.out > 0.0) least = std::min(least, routes.network_bandwidth.value / (oversubscription * load.out));
  return BytesPerSecond(least);
}

// The share of each rail (NIC, in the order of NodeRoutes::nics) in the traffic that `devices` send
// evenly.
std::vector<double> rail_shares(const NodeRoutes& routes, const std::vector<int>& devices) {
  std::vector<double> shares(routes.nics.size(), 0.0);
  for (const int device : devices)
    for (const Uplink& uplink : uplinks_of(routes, device))
      shares[std::ranges::find(routes.nics, uplink.nic) - routes.nics.begin()] +=
          uplink.share / static_cast<double>(devices.size());
  return shares;
}

// Where rail r of a node is entered from inside: the first device that uses its NIC.
struct RailEntry {
  int device = 0;
  const Uplink* uplink = nullptr;
};
std::optional<RailEntry> entry_of(const NodeRoutes& routes, std::size_t rail) {
  for (std::size_t device = 0; device < routes.uplinks.size(); ++device)
    for (const Uplink& uplink : routes.uplinks[device])
      if (uplink.nic == routes.nics[rail]) return RailEntry{.device = static_cast<int>(device), .uplink = &uplink};
  return std::nullopt;
}

// Adds the traffic that `devices` of a node send evenly, `share` in all, to the NICs through which
// `others` of another node receive it evenly, and that they receive from their own NICs. Traffic
// that leaves on another rail than it has to arrive on first goes to a device of the right rail,
// over NVLink, as in NCCL (PXN, src/graph/paths.cc and transport/net.cc); where it cannot, it
// leaves unchanged and crosses the level above the rails.
void add_exchange_on_rails(const NodeRoutes& routes, const std::vector<int>& devices, const NodeRoutes& other_routes,
                           const std::vector<int>& others, double share, const Network& network, NodeLoad& load) {
  const std::vector<double> here = rail_shares(routes, devices);
  std::vector<double> there = rail_shares(other_routes, others);
  const bool moves = network.pxn && routes.nvlink_everywhere;
  // On rails where more arrives than leaves; only for those that this node has.
  double missing = 0.0;
  for (std::size_t rail = 0; rail < here.size() && rail < there.size(); ++rail)
    if (entry_of(routes, rail)) missing += std::max(0.0, there[rail] - here[rail]);
  there.resize(here.size(), 0.0);
  double surplus = 0.0;
  for (std::size_t rail = 0; rail < here.size(); ++rail) surplus += std::max(0.0, here[rail] - there[rail]);
  // The moved share of the traffic on the wrong rail.
  const double moved = moves && surplus > 0.0 ? std::min(1.0, missing / surplus) : 0.0;
  for (const int device : devices)
    for (const Uplink& uplink : uplinks_of(routes, device)) {
      const auto rail = static_cast<std::size_t>(std::ranges::find(routes.nics, uplink.nic) - routes.nics.begin());
      const double sent = share * uplink.share / static_cast<double>(devices.size());
      const double wrong = std::max(0.0, 1.0 - there[rail] / here[rail]) * moved;
      for (const Arc arc : uplink.path.arcs) load.arcs[reversed(arc)] += sent;
      add_sent(uplink, sent * (1.0 - wrong), load);
      load.uplink_latency = std::max(load.uplink_latency, uplink.path.latency);
      if (wrong == 0.0) continue;
      for (std::size_t to = 0; to < here.size(); ++to) {
        const auto entry = there[to] > here[to] ? entry_of(routes, to) : std::nullopt;
        if (!entry) continue;
        const double part = sent * wrong * (there[to] - here[to]) / missing;
        if (entry->device != device) add_hop(routes, device, entry->device, part, load);
        add_sent(*entry->uplink, part, load);
      }
    }
  load.out += share;
  load.between_rails += share * surplus * (1.0 - moved);
}

// How the hops inside a node are laid out. NCCL searches for the best channels
// (src/graph/search.cc); here the best of four layouts is taken. Together they are exact for
// switches (any), direct full meshes (all pairs), PCIe trees or NVLink pairs (nearest next) and
// meshes of NVLinks between some pairs (several rings, rings.h).
enum class Layout { rank_order, nearest_next, all_pairs, several_rings };
constexpr std::array<Layout, 4> all_layouts = {Layout::rank_order, Layout::nearest_next, Layout::all_pairs,
                                               Layout::several_rings};

// From the first member on, always the nearest remaining member, ties to the lowest rank.
std::vector<int> nearest_next(const NodeRoutes& routes, std::vector<int> members) {
  for (std::size_t i = 1; i + 1 < members.size(); ++i) {
    const auto& row = routes.between[members[i - 1]];
    const auto nearer = [&](int a, int b) {
      const Path& to_a = row[a];
      const Path& to_b = row[b];
      if (to_a.distance != to_b.distance) return to_a.distance < to_b.distance;
      if (to_a.bandwidth != to_b.bandwidth) return to_a.bandwidth > to_b.bandwidth;
      return a < b;
    };
    const auto best = std::min_element(members.begin() + static_cast<std::ptrdiff_t>(i), members.end(), nearer);
    std::rotate(members.begin() + static_cast<std::ptrdiff_t>(i), best, best + 1);
  }
  return members;
}

// The members of one group inside one node. `closed`: the whole group is here. A ring that leaves
// the node has as many channels as it has members here, each leaving through another member's NIC,
// so all channels but one use every hop between neighbours (the first and the last are neighbours
// too). An all-reduce by trees is a reduction and then a broadcast, each at `tree_bandwidth`: 2 *
// bytes / tree_bandwidth and latencies. A tree that leaves the node is attached to all members in
// turn; inside, the members form a chain through which a pass takes the whole message once (NCCL's
// `bus * 0.5`, src/graph/tuning.cc). Between nodes a double binary tree takes, in each pass, the
// whole message into and out of a node that is inner in one of its trees, but with two nodes only
// half of it, which is why NCCL's two-node trees exceed the NICs' speed.
struct Segment {
  std::vector<int> members;  // local devices, ascending
  bool closed = false;
  std::vector<std::vector<int>> rings;  // for several_rings; without rings that layout is rank_order
  // With rails: the group's members in the node where a ring continues.
  std::shared_ptr<const NodeRoutes> next_routes;
  std::vector<int> next;
};

void add_exchange(const NodeRoutes& routes, const Segment& segment, double exchanged, const Network& network,
                  NodeLoad& load) {
  if (segment.closed) return;
  if (segment.next_routes != nullptr)
    return add_exchange_on_rails(routes, segment.members, *segment.next_routes, segment.next, exchanged, network, load);
  for (const int member : segment.members)
    add_exchange(routes, member, exchanged / static_cast<double>(segment.members.size()), load);
}

// Adds the traffic around each of the segment's rings: on every hop the given share of one rank's
// rate, divided among the rings.
void add_several(const NodeRoutes& routes, const Segment& segment, double share, NodeLoad& load) {
  for (const std::vector<int>& ring : segment.rings)
    for (std::size_t i = 0; i < ring.size(); ++i)
      add_hop(routes, ring[i], ring[(i + 1) % ring.size()], share / static_cast<double>(segment.rings.size()), load);
}

void add_ring(const NodeRoutes& routes, Segment segment, Layout layout, const Network& network, NodeLoad& load) {
  const auto count = segment.members.size();
  const auto n = static_cast<double>(count);
  if (layout == Layout::nearest_next) segment.members = nearest_next(routes, std::move(segment.members));
  if (layout == Layout::all_pairs) {
    const double share = segment.closed ? 1.0 / (n - 1.0) : 1.0 / n;
    for (const int a : segment.members)
      for (const int b : segment.members)
        if (a != b) add_hop(routes, a, b, share, load);
  } else if (layout == Layout::several_rings && !segment.rings.empty()) {
    add_several(routes, segment, segment.closed ? 1.0 : (n - 1.0) / n, load);
  } else if (count > 1) {
    const double share = segment.closed ? 1.0 : (n - 1.0) / n;
    for (std::size_t i = 0; i < count; ++i)
      add_hop(routes, segment.members[i], segment.members[(i + 1) % count], share, load);
  }
  add_exchange(routes, segment, 1.0, network, load);
}

void add_tree(const NodeRoutes& routes, Segment segment, Layout layout, double exchanged, const Network& network,
              NodeLoad& load) {
  const auto count = segment.members.size();
  const auto n = static_cast<double>(count);
  if (layout == Layout::nearest_next) segment.members = nearest_next(routes, std::move(segment.members));
  if (layout == Layout::all_pairs) {
    for (const int a : segment.members)
      for (const int b : segment.members)
        if (a != b) add_hop(routes, a, b, 1.0 / (n - 1.0), load);
  } else if (layout == Layout::several_rings && !segment.rings.empty()) {
    // Chains, each cut at another place: NCCL's have the rings' rate.
    add_several(routes, segment, 1.0, load);
  } else {
    for (std::size_t i = 0; i + 1 < count; ++i) add_hop(routes, segment.members[i], segment.members[i + 1], 1.0, load);
  }
  add_exchange(routes, segment, exchanged, network, load);
}

// The parts of an axis's groups on the node whose first rank is `first`: ranks of one block of
// stride * degree ranks with equal remainder by the stride.
std::vector<Segment> segments_of(int first, int count, int stride, int degree) {
  std::vector<Segment> segments;
  const int block = stride * degree;
  for (int device = 0; device < count; ++device) {
    const int rank = first + device;
    const int start = rank / block * block;
    if (rank - stride >= std::max(start, first)) continue;  // not the first of its group here
    Segment segment;
    for (int other = rank; other < std::min(start + block, first + count); other += stride)
      segment.members.push_back(other - first);
    segment.closed = static_cast<int>(segment.members.size()) == degree;
    segments.push_back(std::move(segment));
  }
  return segments;
}

// Nodes that show every pattern of groups on a node. Groups with a stride of at least a node leave
// it with each member, on every node. Otherwise the pattern depends only on where the first block
// border is inside the node, and the last node may be partly used. With rails it also matters which
// members the next node has: where the border is there, and, for a stride that is no whole number
// of nodes, which ranks of the node continue to the next member of their group and which, the last
// stride of a block, close its ring.
std::vector<int> distinct_nodes(int ranks, int per_node, int stride, int degree, bool rails) {
  if (ranks <= per_node) return {0};
  const int block = stride * degree;
  if (stride >= per_node && (!rails || stride % per_node == 0)) return {0};
  const int looked_at = rails ? 2 * per_node : per_node;
  const int nodes = static_cast<int>(ceil_div(ranks, per_node));
  std::vector<bool> seen(static_cast<std::size_t>(looked_at), false);
  std::vector<int> distinct;
  const int period = block / std::gcd(block, per_node);
  for (int node = 0; node < std::min(period, nodes); ++node) {
    const int begin = node * per_node % block;
    std::size_t key = 0;
    if (stride >= per_node) {
      // Neither stretch is shorter than a node, so at most one border between them is inside: the
      // node begins with one stretch, which ends there.
      const bool closing = begin >= block - stride;
      const int end = (closing ? block : block - stride) - begin;
      key = static_cast<std::size_t>((closing ? per_node : 0) + (end < per_node ? end : 0));
    } else {
      // A border at the very start and none inside are the same: one stretch of one block.
      const int border = (block - begin) % block;
      key = static_cast<std::size_t>(border < looked_at ? border : 0);
    }
    if (seen[key]) continue;
    seen[key] = true;
    distinct.push_back(node);
  }
  if (ranks % per_node != 0 && distinct.back() != nodes - 1) distinct.push_back(nodes - 1);
  return distinct;
}

// The most nodes that one group of the axis touches.
int nodes_spanned(int ranks, int per_node, int stride, int degree) {
  if (ranks <= per_node) return 1;
  if (stride >= per_node) return degree;
  const int block = stride * degree;
  int most = 1;
  const int blocks = std::min(ranks / block, per_node / std::gcd(block, per_node));
  for (int b = 0; b < blocks; ++b)
    for (int i = 0; i < stride; ++i) {
      const int base = b * block + i;
      most = std::max(most, (base + stride * (degree - 1)) / per_node - base / per_node + 1);
    }
  return most;
}

// A node as a mesh fills it: its first rank, its number of ranks, and its links.
struct FilledNode {
  int first = 0;
  int ranks = 0;
  std::shared_ptr<const NodeRoutes> routes;
};

// Every node that holds ranks, in order. Only heterogeneous clusters are examined in this way: of
// equal nodes, a few represent all.
std::vector<FilledNode> filled_nodes(const Cluster& cluster, int ranks) {
  std::vector<FilledNode> nodes;
  int first = 0;
  for (const NodeGroup& group : cluster.groups) {
    const auto routes = routes_of(group.node);
    for (int node = 0; node < group.nodes && first < ranks; ++node) {
      nodes.push_back({.first = first, .ranks = std::min(group.devices_per_node(), ranks - first), .routes = routes});
      first += group.devices_per_node();
    }
  }
  return nodes;
}

// Among heterogeneous nodes, those that differ in kind, in how many ranks they hold, or in where
// blocks of the axis begin in them (which does not matter to groups with one member per node).
std::vector<FilledNode> distinct_of(const std::vector<FilledNode>& nodes, int stride, int degree, bool rails) {
  std::set<std::tuple<const NodeRoutes*, int, int>> seen;
  std::vector<FilledNode> distinct;
  for (const FilledNode& node : nodes)
    if (seen.emplace(node.routes.get(), node.ranks, stride >= node.ranks && !rails ? 0 : node.first % (stride * degree))
            .second)
      distinct.push_back(node);
  return distinct;
}

// The given nodes of a cluster of one kind.
std::vector<FilledNode> filled_nodes(const Cluster& cluster, int ranks, const std::vector<int>& numbers) {
  const NodeGroup& group = cluster.groups.front();
  const auto routes = routes_of(group.node);
  std::vector<FilledNode> nodes;
  for (const int node : numbers) {
    const int first = node * group.devices_per_node();
    nodes.push_back({.first = first, .ranks = std::min(group.devices_per_node(), ranks - first), .routes = routes});
  }
  return nodes;
}

// The node that holds a rank.
FilledNode node_of(const Cluster& cluster, int ranks, int rank) {
  int first = 0;
  for (const NodeGroup& group : cluster.groups) {
    if (rank < first + group.devices()) {
      first += (rank - first) / group.devices_per_node() * group.devices_per_node();
      return {
          .first = first, .ranks = std::min(group.devices_per_node(), ranks - first), .routes = routes_of(group.node)};
    }
    first += group.devices();
  }
  throw InternalError(fmt::format("rank {} of {}", rank, first));
}

// Records for each segment which members of its group a ring reaches in the next node.
void add_next_members(const Cluster& cluster, const AxisLayout& axis, const FilledNode& node,
                      std::vector<Segment>& segments) {
  const int block = axis.stride * axis.degree;
  for (Segment& segment : segments) {
    if (segment.closed) continue;
    const int last = node.first + segment.members.back();
    const int start = last / block * block;
    const int next = last + axis.stride < start + block ? last + axis.stride : start + (last - start) % axis.stride;
    const FilledNode other = node_of(cluster, axis.ranks, next);
    segment.next_routes = other.routes;
    for (int rank = next; rank < std::min(start + block, other.first + other.ranks); rank += axis.stride)
      segment.next.push_back(rank - other.first);
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

// The most nodes that one group of the axis touches, on heterogeneous nodes.
int nodes_spanned(const std::vector<FilledNode>& nodes, int ranks, int stride, int degree) {
  std::vector<int> node_of(static_cast<std::size_t>(ranks));
  for (std::size_t n = 0; n < nodes.size(); ++n)
    std::fill_n(node_of.begin() + nodes[n].first, nodes[n].ranks, static_cast<int>(n));
  int most = 1;
  for (int start = 0; start < ranks; start += stride * degree)
    for (int i = 0; i < stride; ++i) {
      int touched = 1;
      for (int at = 1; at < degree; ++at)
        touched += node_of[start + i + at * stride] != node_of[start + i + (at - 1) * stride];
      most = std::max(most, touched);
    }
  return most;
}

// The lowest among all GPUs, which is what NCCL uses; 0 where one of them is unknown.
int lowest_capability(const Cluster& cluster) {
  std::optional<int> lowest;
  for (const NodeGroup& group : cluster.groups) {
    const int own = compute_capability_of(group.device.name).value_or(0);
    lowest = std::min(lowest.value_or(own), own);
  }
  return lowest.value_or(0);
}

void check_fits(const Cluster& cluster, const DeviceMesh& mesh) {
  PARPLAN_ASSERT(mesh.size() <= cluster.devices(),
                 std::to_string(mesh.size()) + " ranks on " + std::to_string(cluster.devices()) + " devices");
}

}  // namespace

int DeviceMesh::stride_of(Axis axis) const {
  int stride = 1;
  for (const Axis* inner = order.end(); inner != order.begin() && *--inner != axis;) stride *= degree_of(*inner);
  return stride;
}

Coordinates coordinates_of(const DeviceMesh& mesh, int rank) {
  PARPLAN_ASSERT(rank >= 0 && rank < mesh.size(), std::to_string(rank) + " of " + std::to_string(mesh.size()));
  Coordinates coordinates{};
  for (const Axis* next = mesh.order.end(); next != mesh.order.begin();) {
    const Axis inner = *--next;
    coordinates[inner] = rank % mesh.degree_of(inner);
    rank /= mesh.degree_of(inner);
  }
  return coordinates;
}

int rank_at(const DeviceMesh& mesh, Coordinates coordinates) {
  for (const Axis axis : all_axes)
    PARPLAN_ASSERT(coordinates[axis] >= 0 && coordinates[axis] < mesh.degree_of(axis),
                   std::string(name(axis)) + " " + std::to_string(coordinates[axis]) + " of " +
                       std::to_string(mesh.degree_of(axis)));
  int rank = 0;
  for (const Axis axis : mesh.order) rank = rank * mesh.degree_of(axis) + coordinates[axis];
  return rank;
}

std::vector<int> group_of(const DeviceMesh& mesh, int rank, Axis axis) {
  Coordinates coordinates = coordinates_of(mesh, rank);
  std::vector<int> group;
  for (int at = 0; at < mesh.degree_of(axis); ++at) {
    coordinates[axis] = at;
    group.push_back(rank_at(mesh, coordinates));
  }
  return group;
}

GroupNetwork group_network(const Cluster& cluster, const DeviceMesh& mesh, Axis axis) {
  check_fits(cluster, mesh);
  const int degree = mesh.degree_of(axis);
  const int stride = mesh.stride_of(axis);
  const int ranks = mesh.size();
  const int per_node = cluster.groups.front().devices_per_node();
  const bool alike = cluster.groups.size() == 1 || ranks <= cluster.groups.front().devices();
  const std::vector<FilledNode> nodes =
      alike ? filled_nodes(cluster, ranks, distinct_nodes(ranks, per_node, stride, degree, cluster.network.rails))
            : filled_nodes(cluster, ranks);
  GroupNetwork result{
      .ranks = degree,
      .nodes = alike ? nodes_spanned(ranks, per_node, stride, degree) : nodes_spanned(nodes, ranks, stride, degree),
      .ring_bandwidth = BytesPerSecond(infinite),
      .tree_bandwidth = BytesPerSecond(infinite),
      .intra_latency = {},
      .inter_latency = {}};
  if (degree == 1) return result;
  result.compute_capability = lowest_capability(cluster);
  const double exchanged = result.nodes == 2 ? 0.5 : 1.0;
  const Network& network = cluster.network;
  const AxisLayout axis_layout{.ranks = ranks, .stride = stride, .degree = degree};

  std::array<BytesPerSecond, all_layouts.size()> ring;
  std::array<BytesPerSecond, all_layouts.size()> tree;
  std::array<Seconds, all_layouts.size()> intra_latency;
  std::array<bool, all_layouts.size()> nvlink;
  ring.fill(BytesPerSecond(infinite));
  tree.fill(BytesPerSecond(infinite));
  nvlink.fill(true);
  Seconds uplink_latency;
  double between_rails_ring = 0.0;
  double between_rails_tree = 0.0;
  for (const FilledNode& node : alike ? nodes : distinct_of(nodes, stride, degree, network.rails)) {
    const NodeRoutes& routes = *node.routes;
    std::vector<Segment> segments = segments_of(node.first, node.ranks, stride, degree);
    if (network.rails && result.nodes > 1) add_next_members(cluster, axis_layout, node, segments);
    if (!routes.star)
      for (Segment& segment : segments) segment.rings = disjoint_rings(routes, segment.members);
    NodeLoad ring_load(routes);
    NodeLoad tree_load(routes);
    BytesPerSecond ring_here;
    BytesPerSecond tree_here;
    for (std::size_t i = 0; i < all_layouts.size(); ++i) {
      // Around one switch every layout crosses the same links: the first represents all.
      if (!routes.star || i == 0) {
        ring_load.clear();
        tree_load.clear();
        for (const Segment& segment : segments) {
          add_ring(routes, segment, all_layouts[i], network, ring_load);
          add_tree(routes, segment, all_layouts[i], exchanged, network, tree_load);
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
  const auto best_of = [](const std::array<BytesPerSecond, all_layouts.size()>& rates) {
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
  if (result.nodes > 1) result.inter_latency = 2.0 * uplink_latency + latency_through(network, fabric.level);
  return result;
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
    // filled_nodes below
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
  for (const FilledNode& node : alike ? filled_nodes(cluster, ranks, nodes) : filled_nodes(cluster, ranks)) {
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
        const FilledNode other = node_of(cluster, ranks, partner);
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
  if (result.nodes > 1) result.inter_latency = 2.0 * uplink_latency + latency_through(network, fabric.level);
  result.tree_bandwidth = result.ring_bandwidth;
  result.compute_capability = lowest_capability(cluster);
  return result;
}

std::uint64_t groups_of_stage(const Cluster& cluster, const DeviceMesh& mesh, int stage) {
  if (cluster.groups.size() == 1) return 1;
  PARPLAN_ASSERT(cluster.groups.size() <= 64, fmt::format("{} groups", cluster.groups.size()));
  const int stride = mesh.stride_of(Axis::pp);
  const int block = stride * mesh.degree_of(Axis::pp);
  std::uint64_t groups = 0;
  int first = 0;
  for (std::size_t g = 0; g < cluster.groups.size(); ++g) {
    const int last = std::min(first + cluster.groups[g].devices(), mesh.size());
    // Ranks of the stage are [block * i + stage * stride, + stride).
    for (int begin = first / block * block + stage * stride; begin < last; begin += block)
      if (begin + stride > first) {
        groups |= std::uint64_t{1} << g;
        break;
      }
    first += cluster.groups[g].devices();
  }
  return groups;
}

Bytes memory_capacity(const Cluster& cluster, const DeviceMesh& mesh, int stage) {
  const std::uint64_t groups = groups_of_stage(cluster, mesh, stage);
  Bytes least(std::numeric_limits<std::int64_t>::max());
  for (std::size_t g = 0; g < cluster.groups.size(); ++g)
    if (groups >> g & 1u) least = std::min(least, cluster.groups[g].device.memory_capacity);
  return least;
}

Bytes memory_overhead(const Cluster& cluster) {
  Bytes most;
  for (const NodeGroup& group : cluster.groups) most = std::max(most, group.device.memory_overhead);
  return most;
}

FlopsPerSecond peak(const Cluster& cluster, int devices, DataType type) {
  double sum = 0.0;
  int left = devices;
  for (const NodeGroup& group : cluster.groups) {
    const int taken = std::min(left, group.devices());
    sum += taken * peak(group.device, type).value;
    left -= taken;
  }
  return FlopsPerSecond(sum / devices);
}

}  // namespace parplan
