#pragma once

#include <memory>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/cluster/routes.h"

// The nodes that a mesh of `ranks` ranks fills (rank r is device r of the cluster), and the few of
// them that represent all for the groups of an axis: `degree` ranks each, `stride` apart.
namespace parplan {

// A node as a mesh fills it: its first rank, its number of ranks, and its links.
struct OccupiedNode {
  int first = 0;
  int ranks = 0;
  std::shared_ptr<const NodeRoutes> routes;
};

// Every node that holds ranks, in order. Only heterogeneous clusters are examined in this way: of
// equal nodes, a few represent all.
std::vector<OccupiedNode> occupied_nodes(const Cluster& cluster, int ranks);

// The given nodes of a cluster of one kind.
std::vector<OccupiedNode> occupied_nodes(const Cluster& cluster, int ranks, const std::vector<int>& numbers);

// The node that holds a rank.
OccupiedNode node_of(const Cluster& cluster, int ranks, int rank);

// Nodes that show every pattern of groups on a node. Groups with a stride of at least a node leave
// it with each member, on every node. Otherwise the pattern depends only on where the first block
// border is inside the node, and the last node may be partly used. With rails it also matters which
// members the next node has: where the border is there, and, for a stride that is no whole number
// of nodes, which ranks of the node continue to the next member of their group and which, the last
// stride of a block, close its ring.
std::vector<int> distinct_nodes(int ranks, int per_node, int stride, int degree, bool rails);

// Among heterogeneous nodes, those that differ in kind, in how many ranks they hold, or in where
// blocks of the axis begin in them (which does not matter to groups with one member per node).
std::vector<OccupiedNode> distinct_of(const std::vector<OccupiedNode>& nodes, int stride, int degree, bool rails);

// The most nodes that one group of the axis touches.
int nodes_spanned(int ranks, int per_node, int stride, int degree);

// The most nodes that one group of the axis touches, on heterogeneous nodes.
int nodes_spanned(const std::vector<OccupiedNode>& nodes, int ranks, int stride, int degree);

}  // namespace parplan
