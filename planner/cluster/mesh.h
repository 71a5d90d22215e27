#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "planner/cluster/axis.h"
#include "planner/cluster/cluster.h"

namespace parplan {

// The devices of a job arranged along axes. `order` runs from the outermost axis (largest stride
// over device indices) to the innermost (neighbouring devices): "pp-dp-tp" keeps tensor groups
// inside a node.
struct DeviceMesh {
  Degrees degree;
  AxisOrder order;  // every axis of degree above 1 is in it, or has its place by it (AxisOrder)
  // Hybrid sharding: ZeRO shards over groups of so many consecutive ranks along replica_axes, whose
  // number it divides, and these groups are replicas of each other. 0: over all of them.
  int dp_shard = 0;
  // Hierarchical context parallelism: groups of so many consecutive ranks of the context axis,
  // whose number it divides, exchange tokens for heads, and meet the keys of the other groups. 1:
  // no groups.
  int cp_ulysses = 1;

  int size() const { return degree.product(); }
  int degree_of(Axis axis) const { return degree[axis]; }
  AxisOrder axes() const;  // the order with the context axis, where that has several ranks
  int stride_of(Axis axis) const;
  int batch_ranks() const;    // along batch_axes
  int replica_ranks() const;  // along replica_axes
  int shard_ranks() const { return dp_shard > 0 ? dp_shard : replica_ranks(); }  // that share out a bucket
  auto operator<=>(const DeviceMesh&) const = default;
};

using Coordinates = PerAxis<int>;
Coordinates coordinates_of(const DeviceMesh& mesh, int rank);
int rank_at(const DeviceMesh& mesh, Coordinates coordinates);
// Which of the `batch_ranks` shares of a batch is this rank's.
int batch_rank(const DeviceMesh& mesh, const Coordinates& coordinates);
// The same ranks with the context axis as a part of the data axis, in which it lies.
DeviceMesh with_replicas_along_data(const DeviceMesh& mesh);
// Which of the `replica_ranks` that hold the same parameters is this rank.
int replica_rank(const DeviceMesh& mesh, const Coordinates& coordinates);
// The ranks of each of an axis's groups, and what stands between neighbours in them.
int group_size(const DeviceMesh& mesh, Axis axis);
int group_stride(const DeviceMesh& mesh, Axis axis);
// The ranks that share every coordinate except `axis` with `rank`, ascending along it. The data
// axis's are all that hold the same parameters (replica_axes).
std::vector<int> group_of(const DeviceMesh& mesh, int rank, Axis axis);

// The groups of nodes that the first `devices` devices are of, at least one device each. What nodes
// a layout leaves out are like bears on none of its costs: facts that hold for all that a job runs
// on are taken over these.
std::span<const NodeGroup> groups_in_use(const Cluster& cluster, int devices);
// The kinds of device that hold ranks of a stage, as bits by their groups in the cluster.
std::uint64_t groups_of_stage(const Cluster& cluster, const DeviceMesh& mesh, int stage);
// The same of the replica at this coordinate of the data axis alone.
std::uint64_t groups_of_stage(const Cluster& cluster, const DeviceMesh& mesh, int stage, int replica);
// The least memory among the devices of a stage, or of such kinds.
Bytes memory_capacity(const Cluster& cluster, const DeviceMesh& mesh, int stage);
Bytes memory_capacity(const Cluster& cluster, std::uint64_t groups);
// What plans may use of it: all but the cluster's headroom.
Bytes usable_memory(const Cluster& cluster, const DeviceMesh& mesh, int stage);
Bytes usable_memory(Bytes capacity, double headroom);
// The most that libraries take on any of the first `devices` devices.
Bytes memory_overhead(const Cluster& cluster, int devices);
// The mean peak of the first `devices` devices.
FlopsPerSecond peak(const Cluster& cluster, int devices, DataType type);

}  // namespace parplan
