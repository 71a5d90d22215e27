#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/cluster/mesh.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/schedule.h"

namespace parplan {

// By replica, its coordinate on the data axis: the first replica whose stages are on the same kinds
// of device.
std::vector<int> kinds_of_replicas(const Cluster& cluster, const DeviceMesh& mesh);
// The replicas whose ranks do unlike work or do it on unlike devices, by their coordinates on the
// data axis: the first of each kind, or with hybrid sharding each. The first alone where all have
// equal numbers of micro-batches: their stages count as slow as the slowest device.
std::vector<int> unlike_replicas(const Cluster& cluster, const ParallelSpec& spec);

// Why replicas with unlike numbers of micro-batches cannot share an order of actions that each of
// them could run by itself: they reduce gradients with the last backward of each, which are all
// whole or all in two parts. Nothing where they can.
std::optional<std::string> unlike_last_backwards(const Schedule& schedule, const ParallelSpec& spec);

}  // namespace parplan
