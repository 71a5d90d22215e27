#pragma once

#include <span>
#include <string_view>

#include "planner/cluster/device.h"
#include "planner/cluster/group_network.h"
#include "planner/program/program.h"

namespace parplan {

// How a group can carry out a communication: one file per algorithm, one row per variant. All of
// them use these letters:
//
//   S       bytes of the whole buffer (all-gather: what is gathered; reduce-scatter, all-to-all:
//           what goes in; gather, scatter: what the first rank has of all)
//   n       ranks of the group; N the nodes that it spans
//   B       ring_bandwidth of the GroupNetwork, T its tree_bandwidth
//   l, L    one hop inside a node, one hop between nodes
struct CommunicationAlgorithm {
  std::string_view name;
  bool (*applies)(InstructionKind kind, BackendKind backend) = nullptr;
  bool (*available)(const GroupNetwork& network) = nullptr;  // null: on every network
  // For groups of at least two ranks.
  Seconds (*time)(InstructionKind kind, Bytes bytes, const GroupNetwork& network) = nullptr;
  // Where that comes from, unless some of its constants were fitted to what such groups took.
  CommunicationOrigin origin = CommunicationOrigin::formula;
  bool (*fitted)(const GroupNetwork& network) = nullptr;  // null: nowhere
};
std::span<const CommunicationAlgorithm> communication_algorithms();

// The fastest algorithm that applies, as NCCL chooses (src/graph/tuning.cc); ties go to the first
// row. Null where the group has one rank: nothing is communicated.
const CommunicationAlgorithm* fastest_algorithm(InstructionKind kind, Bytes bytes, const GroupNetwork& network,
                                                BackendKind backend);
// The time of that algorithm, from when all ranks have arrived; 0 for a group of one rank. `bytes`
// is S above. `network` already accounts for links shared with sibling groups.
Seconds collective_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network, BackendKind backend);
// Where that time comes from. The group has at least two ranks.
CommunicationOrigin communication_origin(InstructionKind kind, Bytes bytes, const GroupNetwork& network,
                                         BackendKind backend);

}  // namespace parplan
