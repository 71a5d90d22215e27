#pragma once

#include "planner/base/units.h"
#include "planner/cluster/axis.h"
#include "planner/cluster/cluster.h"
#include "planner/cluster/mesh.h"

namespace parplan {

// The network that one group of devices sees when all its sibling groups (same axis, all other
// coordinates) communicate at once.
struct GroupNetwork {
  int ranks = 1;
  int nodes = 1;                  // nodes that the group spans
  BytesPerSecond ring_bandwidth;  // each rank's rate to its ring neighbour, links shared with sibling groups
  BytesPerSecond tree_bandwidth;  // per rank, double binary tree over nodes, chains inside nodes
  Seconds intra_latency;          // one hop inside a node
  Seconds inter_latency;          // one hop between nodes; 0 with one node
  bool nvlink = true;          // whether every hop inside a node is over NVLink, another direct link or shared memory
  int compute_capability = 0;  // the lowest of the job's GPUs, 80 for 8.0; 0 where unknown
  bool amd_hosts = false;      // whether the processors of all the job's hosts are AMD's
  // A rank's links to switches that add and broadcast (NVLink SHARP): NVSwitches that join all
  // members of a node, from compute capability 9.0 on. 0 where there are none.
  BytesPerSecond nvls_bandwidth{};
  // What the NICs of a node carry one way for one group; 0 within one node.
  BytesPerSecond uplink_bandwidth{};
  // What a ring's step over several nodes takes of a CPU's time, as measured; 0 where it is not.
  Seconds post_overhead{};
  // What rings and trees over several nodes take on their network.
  Protocols ring_protocols{}, tree_protocols{};
  Bytes transfer_chunk = Network().transfer_chunk;  // of a transfer from device to device between nodes
  bool operator==(const GroupNetwork&) const = default;
};
// It is computed from the links: rings of all sibling groups are laid over their routes, every link
// divides its bandwidth among the rings that cross it in one direction, and the slowest link
// decides. The result is the worst over the sibling groups. Rank r of the mesh is device r of the
// cluster.
GroupNetwork group_network(const Cluster& cluster, const DeviceMesh& mesh, Axis axis);
// The same of groups of `size` ranks of the mesh, `stride` from one member to the next.
GroupNetwork group_network(const Cluster& cluster, const DeviceMesh& mesh, int size, int stride);

// Whether NVSwitches of some node may reduce what its devices send (NVLink SHARP), for a job on
// some of the first devices.
bool has_nvlink_sharp(const Cluster& cluster);

// Point-to-point between two groups of neighbours along the pipeline axis: rank `from` to rank
// `to`, with all ranks of the two stages sending at once. `ranks` = 2.
GroupNetwork stage_network(const Cluster& cluster, const DeviceMesh& mesh, int from_stage, int to_stage);

}  // namespace parplan
