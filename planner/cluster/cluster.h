#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/base/units.h"
#include "planner/base/yaml.h"
#include "planner/cluster/device.h"

namespace parplan {

enum class VertexKind { device, nvswitch, pcie_switch, host_bridge, nic, memory, network };
const char* name(VertexKind kind);

struct Vertex {
  std::string name;  // "GPU0", "NIC3", "nvswitch"
  VertexKind kind{};
  bool operator==(const Vertex&) const = default;
};

// A full-duplex link (or a shared medium): `bandwidth` is what can be reached one way; two flows in
// one direction share it.
struct Link {
  int a = 0;  // vertices
  int b = 0;
  BytesPerSecond bandwidth;
  Seconds latency;
  std::string kind;  // "NV18", "PCIe", "NODE", "SYS", "network", "memory"
  bool operator==(const Link&) const = default;
};

// One kind of node: devices (in rank order), switches and NICs joined by links. Every NIC has a
// link to the one `network` vertex. Routes run over a Boost.Graph built from this in the .cpp.
struct NodeKind {
  std::string name;
  std::vector<Vertex> vertices;
  std::vector<Link> links;
  std::vector<int> devices;  // vertices of kind device, local device 0 first
  std::optional<int>
      devices_per_machine;   // in a row, where a node is several machines: trays of a rack in one NVLink domain
  int tiles_per_card = 1;    // so many devices in a row are tiles of one card: how Level Zero may number them
  bool operator==(const NodeKind&) const = default;
};

// Switches that join `nodes` nodes in a row into a block, or all. Blocks of one level are whole
// blocks of the level below; below the lowest are the nodes themselves.
struct FabricLevel {
  std::string name;               // "leaf"
  std::optional<int> nodes;       // without a number: all; only the highest level
  double oversubscription =
      1.0;  // >= 1: how far what a block of the level below reaches through this level falls short of its NICs' sum
  Seconds latency;                // one way, NIC to NIC, through this level
  bool operator==(const FabricLevel&) const = default;
};

// The fabric between nodes, beyond the NICs.
struct Network {
  Seconds latency;                  // one way, NIC to NIC
  double oversubscription =
      1.0;  // >= 1: how far the fabric's bisection falls short of the sum of NICs; where no levels are given
  std::vector<FabricLevel> levels;  // from the nodes up; empty: one for all nodes, of this latency and oversubscription
  bool rails =
      false;  // a block of the lowest level has a switch for each NIC of a node: NIC i of all its nodes is on switch i
  bool pxn = true;  // traffic that changes rails does so by NVLink inside the node, where there is NVLink (NCCL's PXN)
  bool operator==(const Network&) const = default;
};
// As given, or the one level that stands for them.
std::vector<FabricLevel> levels_of(const Network& network);

// What an hour of one device costs.
struct Price {
  double per_device_hour = 0.0;
  std::string currency;  // "USD"
  bool operator==(const Price&) const = default;
};

// Nodes of one kind, with one kind of device.
struct NodeGroup {
  NodeKind node;
  DeviceKind device;
  int nodes = 1;
  std::optional<Price> price;

  int devices_per_node() const { return static_cast<int>(node.devices.size()); }
  int devices() const { return nodes * devices_per_node(); }
  int devices_per_machine() const { return node.devices_per_machine.value_or(devices_per_node()); }
  int machines() const { return nodes * static_cast<int>(ceil_div(devices_per_node(), devices_per_machine())); }
  bool operator==(const NodeGroup&) const = default;
};

// Nodes of one or several kinds with a network between them. Devices are counted through: group by
// group, node by node, each node's in its own order. All groups have one backend.
struct Cluster {
  std::string name;
  std::vector<NodeGroup> groups = {NodeGroup{}};  // at least one
  Network network;
  // Of one node: the numbers that its devices have on their machine (by bus ids, as nvidia-smi
  // counts), where some were selected.
  std::vector<int> device_ids;
  std::optional<std::string> measured_on;  // date and host of a probe, where the numbers are one
  std::vector<std::string> notes;          // what the importer assumed or left out
  std::vector<std::string> sources;

  int nodes() const;
  int devices() const;
  BackendKind backend() const { return groups.front().device.backend; }
  // The group that device `device` (0 to devices() - 1) belongs to.
  const NodeGroup& group_of(int device) const;
  bool operator==(const Cluster&) const = default;
};

// "h100-sxm-80gb"; of unlike devices "a100-sxm4-80gb+v100-sxm2-32gb".
std::string device_name(const Cluster& cluster);
// "2 nodes of 8 x a100-sxm4-80gb, 1 node of 4 x v100-sxm2-32gb".
std::string describe_groups(const Cluster& cluster);
// "NVIDIA H100 SXM5 80 GB"; of unlike devices "A and B".
std::string device_title(const Cluster& cluster);
// Whether every device has units for it.
bool has_units(const Cluster& cluster, DataType type);
// The least memory of any device.
Bytes least_memory(const Cluster& cluster);
// "79.1 GiB"; of unlike devices from the least to the most, "31.8 GiB to 79.1 GiB".
std::string device_memory(const Cluster& cluster);

// "2.50 USD": an amount and a currency in three capital letters (ISO 4217). `parse_price` throws
// ConfigError.
Price parse_price(const std::string& text);
std::string write_price(const Price& price);

// The route between two local devices of a node, or from a device to the network (destination -1):
// of the paths of the best class the widest, of those the shortest, as link indices (routes.h says
// more). Infinite within a device. A device with several NICs has all their links and their rates
// together.
struct Route {
  std::vector<int> links;
  BytesPerSecond bandwidth;  // least over links
  Seconds latency;           // summed
  bool operator==(const Route&) const = default;
};
Route route(const NodeKind& node, int from_device, int to_device);

// The first that makes the cluster unusable, or nothing: a device that does not reach another, a
// NIC without the network, several nodes without a network between them.
std::optional<std::string> problem_with(const Cluster& cluster);

// Strict YAML (docs/cluster.md); `write_cluster` gives what `read_cluster` reads back to an equal
// cluster, with the device written out, so that the text needs no other file. Where a file names
// its device, `find_cluster` of catalog.h looks it up.
Cluster read_cluster(const YamlNode& document);
std::string write_cluster(const Cluster& cluster);

// A device kind file (configs/devices/NAME.yaml).
DeviceKind read_device(const YamlNode& document);
std::string write_device(const DeviceKind& device);
// With the rows that its fits were made from, which reading checks and leaves in the file.
std::string write_device(const DeviceKind& device, const Measurements& measurements);

}  // namespace parplan
