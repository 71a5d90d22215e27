#include "planner/cluster/fabric_traffic.h"

#include <algorithm>
#include <numeric>

#include "planner/base/error.h"
#include "planner/cluster/routes.h"

namespace parplan {
namespace {

// How many of [a, b) are in [c, d).
int overlap(int a, int b, int c, int d) { return std::max(0, std::min(b, d) - std::max(a, c)); }

// Calls `count` with each stretch of the range that is a part of a block of the axis but not all of
// it, relative to the block: there are at most two.
template <class Count>
int sum_over_parts(const AxisLayout& axis, int first, int last, const Count& count) {
  const int block = axis.stride * axis.degree;
  const int begin = first / block;
  const int end = (last - 1) / block;
  if (begin == end) return last - first == block ? 0 : count(first - begin * block, last - begin * block);
  return (first % block == 0 ? 0 : count(first % block, block)) + (last % block == 0 ? 0 : count(0, last % block));
}

}  // namespace

int groups_leaving(const AxisLayout& axis, int first, int last) {
  if (first >= last) return 0;
  return sum_over_parts(axis, first, last, [&](int low, int high) {
    const int touched = std::min(axis.stride, high - low);
    // Group i (below the stride) is all here if its first and its last member are.
    const int whole = std::max(0, std::min(axis.stride, high - (axis.degree - 1) * axis.stride) - low);
    return touched - whole;
  });
}

int ranks_leaving(const AxisLayout& axis, int from, int to, int first, int last) {
  if (first >= last) return 0;
  const int distance = (to - from) * axis.stride;
  return sum_over_parts(axis, first, last, [&](int low, int high) {
    const int begin = from * axis.stride;
    const int end = begin + axis.stride;
    const int senders = overlap(begin, end, low, high);
    const int receivers = overlap(begin + distance, end + distance, low, high);
    const int both = overlap(begin, end, std::max(low, low - distance), std::min(high, high - distance));
    return senders + receivers - 2 * both;
  });
}

std::vector<FabricBlock> blocks_of(const Cluster& cluster, const AxisLayout& axis, int nodes_per_block) {
  std::vector<FabricBlock> blocks;
  if (cluster.groups.size() == 1) {
    const NodeGroup& group = cluster.groups.front();
    const BytesPerSecond nics = routes_of(group.node)->network_bandwidth;
    nodes_per_block = std::min(nodes_per_block, group.nodes);
    const int width = nodes_per_block * group.devices_per_node();
    const auto count = static_cast<int>(ceil_div(axis.ranks, width));
    const auto add = [&](int block) {
      const int first = block * width, last = std::min(first + width, axis.ranks);
      blocks.push_back({.first = first,
                        .last = last,
                        .nodes = static_cast<int>(ceil_div(last - first, group.devices_per_node())),
                        .nics = nics * std::min(nodes_per_block, group.nodes - block * nodes_per_block)});
    };
    const int axis_block = axis.stride * axis.degree;
    const int period = axis_block / std::gcd(axis_block, width);
    for (int block = 0; block < std::min(period, count); ++block) add(block);
    if (count > period) add(count - 1);  // may have fewer ranks or nodes
    return blocks;
  }
  int rank = 0;
  int node = 0;
  for (const NodeGroup& group : cluster.groups) {
    const BytesPerSecond nics = routes_of(group.node)->network_bandwidth;
    for (int i = 0; i < group.nodes; ++i, ++node) {
      if (node % nodes_per_block == 0) {
        if (rank >= axis.ranks) return blocks;
        blocks.push_back({.first = rank, .last = rank, .nodes = 0, .nics = {}});
      }
      blocks.back().nodes += rank < axis.ranks ? 1 : 0;
      rank += group.devices_per_node();
      blocks.back().last = std::min(rank, axis.ranks);
      blocks.back().nics += nics;
    }
  }
  return blocks;
}

}  // namespace parplan
