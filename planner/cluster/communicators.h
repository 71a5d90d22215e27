#pragma once

#include "planner/base/units.h"
#include "planner/cluster/axis.h"
#include "planner/cluster/cluster.h"
#include "planner/cluster/mesh.h"
#include "planner/graph/engine.h"

namespace parplan {

// The channels over which NCCL lays a group's rings; `members` of the group are on one node,
// `inside` which all of it may be.
int collective_channels(bool nvlink, int members, bool inside);

// What NCCL's communicators take on a rank, by the groups and the neighbours, in the pipeline and
// around the rings of other axes, that it talks to (the context axis has one or the other, and one
// group more where it has such that exchange tokens for heads): connections of each channel, with
// buffers at the receiver, and over the network at the sender, too; twice for neighbours in a
// pipeline whose stages go down the ranks and back (`rings.pp`), which meet on channels for each
// way. Counted as if the mesh were in the default order, tensor groups inside nodes and the
// pipeline outermost, so that all orders of a layout take the same memory. Nothing on CPUs.
Bytes communicator_memory(const Cluster& cluster, const DeviceMesh& mesh, const PerAxis<bool>& rings = {});

// The part of a device's memory_overhead that stands for NCCL (configs/devices).
inline constexpr Bytes assumed_communicators{std::int64_t{512} << 20};

// What the context, NCCL and other libraries take on a rank of any stage: the device's
// memory_overhead or the engine's libraries, and communicators beyond those that the device's
// counts. Never less than memory_overhead(cluster, mesh.size()).
Bytes memory_overhead(const Cluster& cluster, const Engine& engine, const DeviceMesh& mesh,
                      const PerAxis<bool>& rings = {});

}  // namespace parplan
