#include "planner/cluster/occupied_nodes.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <set>
#include <tuple>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

std::vector<OccupiedNode> occupied_nodes(const Cluster& cluster, int ranks) {
  std::vector<OccupiedNode> nodes;
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

std::vector<OccupiedNode> occupied_nodes(const Cluster& cluster, int ranks, const std::vector<int>& numbers) {
  const NodeGroup& group = cluster.groups.front();
  const auto routes = routes_of(group.node);
  std::vector<OccupiedNode> nodes;
  for (const int node : numbers) {
    const int first = node * group.devices_per_node();
    nodes.push_back({.first = first, .ranks = std::min(group.devices_per_node(), ranks - first), .routes = routes});
  }
  return nodes;
}

OccupiedNode node_of(const Cluster& cluster, int ranks, int rank) {
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

std::vector<OccupiedNode> distinct_of(const std::vector<OccupiedNode>& nodes, int stride, int degree, bool rails) {
  std::set<std::tuple<const NodeRoutes*, int, int>> seen;
  std::vector<OccupiedNode> distinct;
  for (const OccupiedNode& node : nodes)
    if (seen.emplace(node.routes.get(), node.ranks, stride >= node.ranks && !rails ? 0 : node.first % (stride * degree))
            .second)
      distinct.push_back(node);
  return distinct;
}

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

int nodes_spanned(const std::vector<OccupiedNode>& nodes, int ranks, int stride, int degree) {
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

}  // namespace parplan
