#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "planner/cluster/cluster.h"

namespace parplan {

// A link used in one direction: 2 * link when it runs from Link::a to Link::b, 2 * link + 1 back.
using Arc = int;
inline int link_of(Arc arc) { return arc / 2; }
inline Arc reversed(Arc arc) { return arc ^ 1; }

// The distance between two ends, best first, as NCCL orders them (src/graph/topo.h): NVLink or
// shared memory, PCIe switches, one host bridge, several host bridges of a socket, the link between
// sockets.
enum class PathClass { local, nvlink, pcie_switch, host_bridge, node, socket, unreachable };

struct Path {
  PathClass distance = PathClass::unreachable;
  std::vector<Arc> arcs;     // from the source to the destination
  BytesPerSecond bandwidth;  // least over links; infinite within a device
  Seconds latency;           // summed
};

// A device's path to the network: the NICs that it uses, with the share of its traffic that each
// carries.
struct Uplink {
  int nic = 0;         // vertex
  double share = 1.0;  // of the device's traffic
  Path path;           // device to NIC to network
};

// All routes of a node, found once.
//
// Between two ends the path of the best class is taken; among those the widest, then the one with
// the fewest links, then the one with the least latency. This is the order of NCCL's search
// (src/graph/paths.cc, ncclTopoSetPaths). Paths cross switches, host bridges and memory, never a
// third device or a NIC.
//
// A device uses the NICs nearest to it in that order. Where several devices are nearest to the same
// NICs, they take turns: the i-th of them uses NIC i modulo the number of NICs. Where there are
// more NICs than devices, each of d devices takes every d-th NIC and divides its traffic by their
// bandwidths. The totals of a node are therefore right.
struct NodeRoutes {
  NodeKind node;
  std::vector<std::vector<Path>> between;  // [from local device][to local device]
  bool nvlink_everywhere = true;           // between all devices; shared memory counts
  bool star = true;                        // each device has one link of the same rate to a middle that joins them all
  std::vector<std::vector<Uplink>> uplinks;  // [local device]; empty without a network
  std::vector<int> nics;                     // vertices of the NICs that have a way to the network
  std::vector<std::vector<Path>> to_nic;     // [local device][of `nics`]
  BytesPerSecond network_bandwidth;          // sum of the NICs that some device uses
};

// Remembers the last few nodes, since planning asks for the same node again and again; any thread
// may call it.
std::shared_ptr<const NodeRoutes> routes_of(const NodeKind& node);

// One route of them as link indices, between two local devices, or from a device to the network (no
// destination). It is infinitely fast within a device. A device with several NICs has the links and
// the rates of all of them together.
struct Route {
  std::vector<int> links;
  BytesPerSecond bandwidth;  // least over links
  Seconds latency;           // summed
  bool operator==(const Route&) const = default;
};
Route route(const NodeKind& node, int from_device, std::optional<int> to_device);

}  // namespace parplan
