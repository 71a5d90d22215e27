#include "planner/cluster/mesh.h"

#include <algorithm>
#include <limits>
#include <span>
#include <string>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

AxisOrder DeviceMesh::axes() const {
  const bool has_context = degree.cp == 1 || std::ranges::find(order, Axis::cp) != order.end();
  return has_context ? order : order.with_inside(Axis::dp, Axis::cp);
}

int DeviceMesh::stride_of(Axis axis) const {
  int stride = 1;
  const AxisOrder whole = axes();
  for (const Axis* inner = whole.end(); inner != whole.begin() && *--inner != axis;) stride *= degree_of(*inner);
  return stride;
}

int DeviceMesh::replica_ranks() const {
  int ranks = 1;
  for (const Axis axis : replica_axes) ranks *= degree_of(axis);
  return ranks;
}

DeviceMesh with_replicas_along_data(const DeviceMesh& mesh) {
  DeviceMesh folded = mesh;
  folded.degree.dp = mesh.replica_ranks();
  folded.degree.cp = 1;
  folded.cp_ulysses = 1;
  return folded;
}

int replica_rank(const DeviceMesh& mesh, const Coordinates& coordinates) {
  int rank = 0;
  for (const Axis axis : replica_axes) rank = rank * mesh.degree_of(axis) + coordinates[axis];
  return rank;
}

int DeviceMesh::batch_ranks() const {
  int ranks = 1;
  for (const Axis axis : batch_axes) ranks *= degree_of(axis);
  return ranks;
}

Coordinates coordinates_of(const DeviceMesh& mesh, int rank) {
  PARPLAN_ASSERT(rank >= 0 && rank < mesh.size(), std::to_string(rank) + " of " + std::to_string(mesh.size()));
  Coordinates coordinates{};
  const AxisOrder whole = mesh.axes();
  for (const Axis* next = whole.end(); next != whole.begin();) {
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
  for (const Axis axis : mesh.axes()) rank = rank * mesh.degree_of(axis) + coordinates[axis];
  return rank;
}

int group_size(const DeviceMesh& mesh, Axis axis) {
  return axis == Axis::dp ? mesh.replica_ranks() : mesh.degree_of(axis);
}

int group_stride(const DeviceMesh& mesh, Axis axis) {
  return axis == Axis::dp ? with_replicas_along_data(mesh).stride_of(axis) : mesh.stride_of(axis);
}

int batch_rank(const DeviceMesh& mesh, const Coordinates& coordinates) {
  int rank = 0;
  for (const Axis axis : batch_axes) rank = rank * mesh.degree_of(axis) + coordinates[axis];
  return rank;
}

std::vector<int> group_of(const DeviceMesh& mesh, int rank, Axis axis) {
  if (axis == Axis::dp && mesh.degree.cp > 1) return group_of(with_replicas_along_data(mesh), rank, axis);
  Coordinates coordinates = coordinates_of(mesh, rank);
  std::vector<int> group;
  for (int at = 0; at < mesh.degree_of(axis); ++at) {
    coordinates[axis] = at;
    group.push_back(rank_at(mesh, coordinates));
  }
  return group;
}

std::span<const NodeGroup> groups_in_use(const Cluster& cluster, int devices) {
  std::size_t groups = 0;
  for (int before = 0; groups < cluster.groups.size() && before < devices; ++groups)
    before += cluster.groups[groups].devices();
  return std::span(cluster.groups).first(groups);
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

std::uint64_t groups_of_stage(const Cluster& cluster, const DeviceMesh& mesh, int stage, int replica) {
  std::vector<int> ends;  // of the groups: behind the last device
  for (const NodeGroup& group : cluster.groups) ends.push_back((ends.empty() ? 0 : ends.back()) + group.devices());
  std::vector<int> ranks{stage * mesh.stride_of(Axis::pp) + replica * mesh.stride_of(Axis::dp)};
  for (const Axis axis : all_axes) {
    if (axis == Axis::pp || axis == Axis::dp || mesh.degree_of(axis) == 1) continue;
    const std::size_t before = ranks.size();
    for (int at = 1; at < mesh.degree_of(axis); ++at)
      for (std::size_t i = 0; i < before; ++i) ranks.push_back(ranks[i] + at * mesh.stride_of(axis));
  }
  std::uint64_t groups = 0;
  for (const int rank : ranks)
    groups |= std::uint64_t{1} << (std::ranges::upper_bound(ends, rank) - ends.begin());
  return groups;
}

Bytes memory_capacity(const Cluster& cluster, const DeviceMesh& mesh, int stage) {
  return memory_capacity(cluster, groups_of_stage(cluster, mesh, stage));
}

Bytes memory_capacity(const Cluster& cluster, std::uint64_t groups) {
  Bytes least(std::numeric_limits<std::int64_t>::max());
  for (std::size_t g = 0; g < cluster.groups.size(); ++g)
    if (groups >> g & 1u) least = std::min(least, cluster.groups[g].device.memory_capacity);
  return least;
}

Bytes usable_memory(Bytes capacity, double headroom) {
  return Bytes(static_cast<std::int64_t>(static_cast<double>(capacity.count) * (1.0 - headroom)));
}

Bytes usable_memory(const Cluster& cluster, const DeviceMesh& mesh, int stage) {
  return usable_memory(memory_capacity(cluster, mesh, stage), cluster.memory_headroom);
}

Bytes memory_overhead(const Cluster& cluster, int devices) {
  Bytes most;
  for (const NodeGroup& group : groups_in_use(cluster, devices)) most = std::max(most, group.device.memory_overhead);
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
