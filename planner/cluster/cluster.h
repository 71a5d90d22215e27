#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/base/units.h"
#include "planner/base/yaml.h"
#include "planner/cluster/device.h"

namespace parplan {

struct Engine;  // planner/graph/engine.h

enum class VertexKind { device, nvswitch, pcie_switch, host_bridge, nic, memory, network };
const char* name(VertexKind kind);

struct Vertex {
  std::string name;  // "GPU0", "NIC3", "nvswitch"
  VertexKind kind{};
  bool operator==(const Vertex&) const = default;
};

// A full-duplex link (or a shared medium). `bandwidth` is the rate that can be reached one way; two
// flows in one direction share it.
struct Link {
  int a = 0;  // vertices
  int b = 0;
  BytesPerSecond bandwidth;
  Seconds latency;
  std::string kind;  // "NV18", "PCIe", "NODE", "SYS", "network", "memory"
  // Of a NIC whose file says what it reaches; others reach nic_reached_share of it (node_layout.h).
  std::optional<BytesPerSecond> line_rate = {};
  bool operator==(const Link&) const = default;
};

// One kind of node: devices (in rank order), switches and NICs joined by links. Every NIC has a
// link to the one `network` vertex. Routes run over a Boost.Graph built from this in the .cpp.
struct NodeKind {
  std::string name;
  std::vector<Vertex> vertices;
  std::vector<Link> links;
  std::vector<int> devices;  // vertices of kind device, local device 0 first
  // Consecutive devices in one machine, where a node is several machines: trays of a rack in one
  // NVLink domain.
  std::optional<int> devices_per_machine;
  int tiles_per_card = 1;  // number of consecutive devices that are tiles of one card, as Level Zero may number them
  bool operator==(const NodeKind&) const = default;
};

// Whether a link of the node ends at the network: a NIC's.
bool is_of_network(const NodeKind& node, const Link& link);

// Switches that join `nodes` consecutive nodes, or all of them, into a block. Blocks of one level
// consist of whole blocks of the level below; below the lowest level are the nodes themselves.
struct FabricLevel {
  std::string name;          // "leaf"
  std::optional<int> nodes;  // without a number: all; only for the highest level
  // At least 1: the sum of a block's NICs over the traffic that can leave a block of the level
  // below through this level.
  double oversubscription = 1.0;
  Seconds latency;                // one way, NIC to NIC, through this level
  bool operator==(const FabricLevel&) const = default;
};

// NCCL's protocols, by which a rank hands a chunk on (planner/cost/nccl_protocol.h).
struct Protocols {
  bool simple = true;
  bool low_latency = true;       // LL
  bool low_latency_128 = false;  // LL128
  bool operator==(const Protocols&) const = default;
};
std::vector<std::string> protocol_names(const Protocols& protocols);  // as in files: {"simple", "ll"}

// The fabric between nodes, beyond the NICs.
struct Network {
  Seconds latency;                  // one way, NIC to NIC
  // For how long a step of a ring keeps the CPU that posts it to the network and sees it done, as
  // measured; absent: by NCCL's model.
  std::optional<Seconds> post_overhead;
  // What NCCL takes of rings and trees over several nodes; of rings `simple` or `low_latency` at
  // least, which apply to all GPUs.
  Protocols ring_protocols{}, tree_protocols{};
  // In such parts a transfer from one device to another leaves the node (NCCL_P2P_NET_CHUNKSIZE).
  Bytes transfer_chunk{128 << 10};
  // At least 1: the sum of NICs over the fabric's bisection, where no levels are given.
  double oversubscription = 1.0;
  // from the nodes up; empty: one level for all nodes, with this latency and oversubscription
  std::vector<FabricLevel> levels;
  // Whether a block of the lowest level has a switch for each NIC of a node: NIC i of all its nodes
  // is on switch i.
  bool rails = false;
  // Whether traffic changes rails over NVLink inside the node, where there is NVLink (NCCL's PXN).
  bool pxn = true;
  // Whether the rings of a group of whole nodes are alike: all channels enter a node by the NIC of
  // its first device and leave it by that of the last. Else, and in other groups, each member's NIC
  // carries a channel in and out.
  bool one_ring = false;
  bool operator==(const Network&) const = default;
};
// The given levels, or the one level that stands for a network without any.
std::vector<FabricLevel> levels_of(const Network& network);

// The cost of one device for an hour.
struct Price {
  double per_device_hour = 0.0;
  std::string currency;  // "USD"
  bool operator==(const Price&) const = default;
};

// The host of a machine, whose memory plans may use beside that of its devices.
struct Host {
  std::optional<Bytes> memory;      // of a machine, that plans may take; absent: not checked
  BytesPerSecond memory_bandwidth;  // of a machine, with all channels, by the datasheet
  // Each device's rate to or from it while all of them copy; absent: by the node's links.
  std::optional<BytesPerSecond> link;
  bool operator==(const Host&) const = default;
};

// The NVMe drives of a machine on which plans may keep what its devices and its host do not.
struct Nvme {
  BytesPerSecond read, write;     // of a machine, by all of its drives together
  Seconds latency;                // of one read or write; absent in the file: not counted
  std::optional<Bytes> capacity;  // of a machine, that plans may take; absent: not checked
  bool operator==(const Nvme&) const = default;
};

// Whose processors hosts have, as far as NCCL's model of times tells them apart.
enum class ProcessorVendor { intel, amd };

// Nodes of one kind, with one kind of device.
struct NodeGroup {
  NodeKind node;
  DeviceKind device;
  int nodes = 1;
  std::optional<Price> price;
  std::optional<Host> host;
  std::optional<Nvme> nvme;
  std::optional<ProcessorVendor> processor;  // absent: another, or unknown

  int devices_per_node() const { return static_cast<int>(node.devices.size()); }
  int devices() const { return nodes * devices_per_node(); }
  int devices_per_machine() const { return node.devices_per_machine.value_or(devices_per_node()); }
  int machines() const { return nodes * static_cast<int>(ceil_div(devices_per_node(), devices_per_machine())); }
  bool operator==(const NodeGroup&) const = default;
};

// Nodes of one or several kinds with a network between them. Devices are numbered group by group
// and node by node, each node's in its own order. All groups have the same backend.
struct Cluster {
  std::string name;
  std::vector<NodeGroup> groups = {NodeGroup{}};  // at least one
  Network network;
  // The numbers that the devices of a cluster of one node have on their machine (by bus ids, as
  // nvidia-smi counts), where some were selected.
  std::vector<int> device_ids;
  // The share of each device's memory that plans leave free, for what predictions of memory miss.
  double memory_headroom = 0.0;
  std::optional<std::string> measured_on;  // date and host of the probe, where the numbers come from one
  std::optional<std::string> calibrated;   // by which steps, where some fitted the numbers (cluster_calibration.h)
  std::vector<std::string> notes;          // what the importer assumed or left out
  std::vector<std::string> sources;

  int nodes() const;
  int devices() const;
  BackendKind backend() const { return groups.front().device.backend; }
  // The group that device `device` (0 to devices() - 1) belongs to.
  const NodeGroup& group_of(int device) const;
  bool operator==(const Cluster&) const = default;
};

// The most that a cluster's file and --memory-headroom may ask for.
inline constexpr double most_headroom = 0.9;

// "h100-sxm-80gb"; for heterogeneous devices "a100-sxm4-80gb+v100-sxm2-32gb".
std::string device_name(const Cluster& cluster);
// "2 nodes of 8 x a100-sxm4-80gb, 1 node of 4 x v100-sxm2-32gb".
std::string describe_groups(const Cluster& cluster);
// "NVIDIA H100 SXM5 80 GB"; for heterogeneous devices "A and B".
std::string device_title(const Cluster& cluster);
// Whether every device has units for the type.
bool has_units(const Cluster& cluster, DataType type);
// Why nothing is multiplied in fp8 there, and what to do: the engine, or a device, has no such
// products. Else nothing.
std::optional<std::string> lacks_fp8(const Cluster& cluster, const Engine& engine);
// The names of the kinds of device of which it is not known what training steps sustain of products
// of that type (knows_sustained), each once.
std::vector<std::string> without_sustained(const Cluster& cluster, DataType type);
// The same in words: that predicted steps are too short there. Empty where there are none.
std::string rates_of_loops(const Cluster& cluster, DataType type);
// The least memory of any device.
Bytes least_memory(const Cluster& cluster);
// "79.1 GiB"; for heterogeneous devices from the least to the most, "31.8 GiB to 79.1 GiB".
std::string device_memory(const Cluster& cluster);

// Another engine runs other kernels than those that parplan measure timed: what was fitted to these
// (DeviceKind::measured) is dropped, and its plans are priced by the devices' rates.
void keep_kernels_of(const Engine& engine, Cluster& cluster);

// "2.50 USD": an amount and a currency in three capital letters (ISO 4217). `parse_price` throws
// ConfigError.
Price parse_price(const std::string& text);
std::string write_price(const Price& price);

// The first reason why the cluster is unusable, or nothing: a device that does not reach another, a
// NIC without the network, several nodes without a network between them.
std::optional<std::string> problem_with(const Cluster& cluster);

// Strict YAML (docs/cluster.md). `read_cluster` reads the text of `write_cluster` back to an equal
// cluster; it has the device written out and needs no other file. `find_cluster` looks up a device
// that a file gives by name.
Cluster read_cluster(const YamlNode& document);
std::string write_cluster(const Cluster& cluster);

}  // namespace parplan
