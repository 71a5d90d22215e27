#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "planner/base/units.h"
#include "planner/cluster/cluster.h"
#include "planner/cluster/routes.h"

// How the rings and trees of groups load the links of one node.
namespace parplan {

// The traffic on the links of one node, in units of the rate of one rank, and the slowest hops
// seen.
struct NodeLoad {
  std::vector<double> arcs;  // per link and direction
  double out = 0.0;          // traffic to other nodes
  // The part of it that crosses a level above the rails although the other node is in the same
  // block.
  double between_rails = 0.0;
  Seconds intra_latency;
  Seconds uplink_latency;                        // device to network
  bool nvlink = true;                            // all hops inside the node

  explicit NodeLoad(const NodeRoutes& routes) : arcs(2 * routes.node.links.size(), 0.0) {}
  void clear() {
    std::ranges::fill(arcs, 0.0);
    out = between_rails = 0.0;
    intra_latency = uplink_latency = Seconds();
    nvlink = true;
  }
};

// Adds `share` of one rank's traffic from a device of the node to another.
void add_hop(const NodeRoutes& routes, int from, int to, double share, NodeLoad& load);
// Adds traffic to the network and the same from it.
void add_exchange(const NodeRoutes& routes, int device, double share, NodeLoad& load);
// Adds the traffic that `devices` of a node send evenly, `share` in all, to the NICs through which
// `others` of another node receive it evenly, and that they receive from their own NICs. Traffic
// that leaves on another rail than it has to arrive on first goes to a device of the right rail,
// over NVLink, as in NCCL (PXN, src/graph/paths.cc and transport/net.cc); where it cannot, it
// leaves unchanged and crosses the level above the rails.
void add_exchange_on_rails(const NodeRoutes& routes, const std::vector<int>& devices, const NodeRoutes& other_routes,
                           const std::vector<int>& others, double share, const Network& network, NodeLoad& load);

// The rate of one rank at which the first link is full. The fabric carries the NICs' sum divided by
// the oversubscription of its lowest level for each node.
BytesPerSecond rate(const NodeRoutes& routes, double oversubscription, const NodeLoad& load);

// How the hops inside a node are laid out. NCCL searches for the best channels
// (src/graph/search.cc); here the best of five layouts is taken. Together they are exact for
// switches (any), direct full meshes (all pairs), PCIe trees or NVLink pairs (nearest next) and
// meshes of NVLinks between some pairs (several rings, disjoint_rings.h). Where NVLinks make no
// ring, a hop between members that none joins goes over a third that has NVLinks to both (NCCL's
// PATH_NVB): `relayed` is the ring of the nearest next and its reverse, each with half of the
// traffic.
enum class HopLayout { rank_order, nearest_next, all_pairs, several_rings, relayed };
inline constexpr std::array<HopLayout, 5> all_hop_layouts = {HopLayout::rank_order, HopLayout::nearest_next,
                                                             HopLayout::all_pairs, HopLayout::several_rings,
                                                             HopLayout::relayed};

// The members of one group inside one node. `closed`: the whole group is here. A ring that leaves
// the node has as many channels as it has members here, each leaving through another member's NIC,
// so all channels but one use every hop between neighbours (the first and the last are neighbours
// too); with Network::one_ring, all channels of a whole node are that of the first. An all-reduce
// by trees is a reduction and then a broadcast, each at `tree_bandwidth`: 2 * bytes /
// tree_bandwidth and latencies. A tree that leaves the node is attached to all members in turn;
// inside, the members form a chain through which a pass takes the whole message once (NCCL's `bus *
// 0.5`, src/graph/tuning.cc). Between nodes a double binary tree takes, in each pass, the whole
// message into and out of a node that is inner in one of its trees, but with two nodes only half of
// it, which is why NCCL's two-node trees exceed the NICs' speed.
struct GroupPart {
  std::vector<int> members;  // local devices, ascending
  bool closed = false;
  std::vector<std::vector<int>> rings;  // for several_rings; without rings that layout is rank_order
  // With rails: the group's members in the node where a ring continues.
  std::shared_ptr<const NodeRoutes> next_routes;
  std::vector<int> next;
};

// Adds the traffic of a part to other nodes, and the same from them.
void add_exchange(const NodeRoutes& routes, const GroupPart& part, double exchanged, const Network& network,
                  NodeLoad& load);
// Add a ring, or a tree's chain, through the group's members here, and its traffic to other nodes.
void add_ring(const NodeRoutes& routes, GroupPart part, HopLayout layout, const Network& network, NodeLoad& load);
void add_tree(const NodeRoutes& routes, GroupPart part, HopLayout layout, double exchanged, const Network& network,
              NodeLoad& load);

}  // namespace parplan
