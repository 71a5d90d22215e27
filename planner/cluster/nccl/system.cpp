#include "planner/cluster/nccl/system.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "planner/base/error.h"
#include "planner/cluster/nccl/import.h"
#include "planner/cluster/node_layout.h"

// After NVIDIA/nccl src/graph/topo.cc at 5067397c.
namespace parplan {
namespace {

std::vector<int>& list_of(NcclSystem& system, NcclNodeType type) {
  switch (type) {
    case NcclNodeType::gpu: return system.gpus;
    case NcclNodeType::pcie_switch: return system.switches;
    case NcclNodeType::nvswitch: return system.nvswitches;
    case NcclNodeType::cpu: return system.cpus;
    case NcclNodeType::nic: return system.nics;
    case NcclNodeType::net: break;
  }
  return system.nets;
}

NcclNode& node_at(NcclSystem& system, int node) { return system.nodes[node]; }

int add_node(NcclSystem& system, NcclNodeType type, std::int64_t id) {
  const auto node = static_cast<int>(system.nodes.size());
  system.nodes.push_back({.type = type, .id = id, .links = {}});
  list_of(system, type).push_back(node);
  return node;
}

// Links between the same two nodes are merged into one with their sum. Wide ones come first, equal
// ones in order of appearance.
void connect(NcclSystem& system, int from, int to, NcclDistance type, float bandwidth) {
  std::vector<NcclLink>& links = node_at(system, from).links;
  auto link =
      std::find_if(links.begin(), links.end(), [&](const NcclLink& one) { return one.to == to && one.type == type; });
  if (link == links.end()) link = links.insert(link, NcclLink{.type = type, .bandwidth = 0.0F, .to = to});
  link->bandwidth += bandwidth;
  for (; link != links.begin() && std::prev(link)->bandwidth < link->bandwidth; --link)
    std::iter_swap(link, std::prev(link));
}

void connect_both(NcclSystem& system, int a, int b, NcclDistance type, float bandwidth) {
  connect(system, a, b, type, bandwidth);
  connect(system, b, a, type, bandwidth);
}

void flatten_switches(NcclSystem& system) {
  for (std::size_t s = 0; s < system.switches.size();) {
    const int top = system.switches[s];
    const int generation = broadcom_generation(node_at(system, top).device, 0);
    if (generation == 0) {
      ++s;
      continue;
    }
    std::vector<int> lower;
    std::erase_if(node_at(system, top).links, [&](const NcclLink& link) {
      const NcclNode& other = node_at(system, link.to);
      if (other.type != NcclNodeType::pcie_switch || broadcom_generation(other.device, 1) != generation) return false;
      lower.push_back(link.to);
      return true;
    });
    for (const int gone : lower) {
      for (const NcclLink& link : node_at(system, gone).links) {
        if (link.to == top) continue;
        node_at(system, top).links.push_back(link);
        for (NcclLink& back : node_at(system, link.to).links)
          if (back.to == gone) {
            back.to = top;
            break;
          }
      }
      node_at(system, gone).links.clear();
      std::erase(system.switches, gone);
    }
    node_at(system, top).device |= 0xffff;  // once
    s = 0;
  }
}

// The link up the PCIe tree comes last, so that links down are tried first. A node with two links
// up (possible in a NodeKind) is sorted once.
void sort_links(NcclSystem& system, int node, int up, std::vector<bool>& sorted) {
  if (sorted[node]) return;
  sorted[node] = true;
  std::vector<NcclLink>& links = node_at(system, node).links;
  const auto found = std::find_if(links.begin(), links.end(), [&](const NcclLink& link) { return link.to == up; });
  if (found != links.end()) std::rotate(found, found + 1, links.end());
  for (std::size_t i = 0; i < node_at(system, node).links.size(); ++i) {
    const NcclLink link = node_at(system, node).links[i];
    if (link.type == NcclDistance::one_switch && link.to != up) sort_links(system, link.to, node, sorted);
  }
}

// NCCL's own table: other spellings count as 8 GT/s, no width as 16 lanes.
float pcie_link_bandwidth(const NcclPci& pci) {
  struct Row {
    std::string_view speed;
    int per_80_lanes;
  };
  constexpr std::array<Row, 11> rows = {{{"2.5 GT/s", 15},
                                         {"5 GT/s", 30},
                                         {"8 GT/s", 60},
                                         {"16 GT/s", 120},
                                         {"32 GT/s", 240},
                                         {"2.5 GT/s PCIe", 15},
                                         {"5.0 GT/s PCIe", 30},
                                         {"8.0 GT/s PCIe", 60},
                                         {"16.0 GT/s PCIe", 120},
                                         {"32.0 GT/s PCIe", 240},
                                         {"64.0 GT/s PCIe", 480}}};
  const auto row = std::find_if(rows.begin(), rows.end(), [&](const Row& one) { return one.speed == pci.link_speed; });
  const int per_80_lanes = row == rows.end() ? 60 : row->per_80_lanes;
  return static_cast<float>((pci.link_width == 0 ? 16 : pci.link_width) * per_80_lanes / 80.0);
}

void add_nets(NcclSystem& system, const NcclPci& pci, int nic) {
  for (const NcclNet& from : pci.nets) {
    const int node = add_node(system, NcclNodeType::net, from.dev);
    NcclNode& net = node_at(system, node);
    net.dev = from.dev;
    net.asic = from.guid.value_or(static_cast<std::uint64_t>(from.dev));
    net.port = from.port;
    net.bandwidth = static_cast<float>((from.megabits > 0 ? from.megabits : 10000) / 8000.0);
    net.latency = from.latency;
    net.direct_rdma = from.direct_rdma;
    net.collectives = from.collectives;
    net.rail = from.rail;
    net.plane = from.plane;
    connect_both(system, nic, node, NcclDistance::network, net.bandwidth);
  }
}

bool is_ranked(const NcclPci& pci) { return pci.gpu && pci.gpu->rank; }

struct Placed {
  std::map<std::int64_t, int> nodes;  // by bus id
  std::map<int, int> cpu_of;          // by GPU
};

void add_pci(NcclSystem& system, const NcclPci& pci, int parent, int cpu, Placed& placed) {
  const float bandwidth = pcie_link_bandwidth(pci);
  if (pci.gpu) {
    if (!is_ranked(pci)) return;
    const int node = add_node(system, NcclNodeType::gpu, pci.bus_id);
    NcclNode& gpu = node_at(system, node);
    gpu.dev = pci.gpu->dev;
    gpu.rank = *pci.gpu->rank;
    gpu.compute_capability = pci.gpu->compute_capability;
    gpu.direct_rdma = pci.gpu->direct_rdma;
    placed.nodes[pci.bus_id] = node;
    placed.cpu_of[node] = cpu;
    connect_both(system, node, parent, NcclDistance::one_switch, bandwidth);
    return;
  }
  if (pci.has_nic) {
    const int node = add_node(system, NcclNodeType::nic, pci.bus_id);
    add_nets(system, pci, node);
    connect_both(system, node, parent, NcclDistance::one_switch, bandwidth);
    return;
  }
  const int high = pci.pci_class.value_or(0) >> 8;
  if (high == 0x0680 || pci.is_gpu() || pci.is_nic()) return;
  const int node = add_node(system, NcclNodeType::pcie_switch, pci.bus_id);
  node_at(system, node).device = pci.device;
  placed.nodes[pci.bus_id] = node;
  for (const NcclPci& child : pci.children) add_pci(system, child, node, cpu, placed);
  connect_both(system, node, parent, NcclDistance::one_switch, bandwidth);
}

int the_nvswitch(NcclSystem& system) {
  return system.nvswitches.empty() ? add_node(system, NcclNodeType::nvswitch, 0) : system.nvswitches.front();
}

void finish(NcclSystem& system, const std::function<float(int)>& inter_cpu) {
  for (const int a : system.cpus)
    for (const int b : system.cpus)
      if (a != b) connect(system, a, b, NcclDistance::sockets, inter_cpu(a));
  std::vector<bool> sorted(system.nodes.size());
  for (const int cpu : system.cpus) sort_links(system, cpu, -1, sorted);
}

}  // namespace

NcclSystem nccl_system(const NcclTopology& topology) {
  NcclSystem system;
  Placed placed;
  std::map<int, float> inter_cpu;
  for (const NcclCpu& from : topology.cpus) {
    const int cpu = add_node(system, NcclNodeType::cpu, from.numa);
    node_at(system, cpu).architecture = from.architecture;
    node_at(system, cpu).vendor = from.vendor;
    inter_cpu[cpu] = static_cast<float>(inter_cpu_bandwidth(from));
    std::optional<int> without_device;  // the parent of NICs that are no PCI devices
    for (const NcclPci& child : from.children) {
      if (!child.bus_name.empty()) {
        add_pci(system, child, cpu, cpu, placed);
        continue;
      }
      if (!without_device) {
        without_device = add_node(system, NcclNodeType::nic, 0);
        connect_both(system, cpu, *without_device, NcclDistance::one_switch, nccl_no_limit);
      }
      add_nets(system, child, *without_device);
    }
  }
  // In the order of the file, after all ends exist.
  const std::vector<const NcclPci*> all = pci_devices(topology);
  for (const NcclPci* pci : all) {
    if (!is_ranked(*pci)) continue;
    const int gpu = placed.nodes.at(pci->bus_id);
    const auto per_link = static_cast<float>(nvlink_bandwidth(pci->gpu->compute_capability));
    for (const NcclNvlink& link : pci->gpu->nvlinks) {
      const float bandwidth = static_cast<float>(link.count) * per_link;
      if (link.target_class >> 16 == 0x03) {
        const auto target = placed.nodes.find(link.target);
        if (target != placed.nodes.end()) connect(system, gpu, target->second, NcclDistance::nvlink, bandwidth);
      } else {
        const int target = link.target_class == 0x068001 ? placed.cpu_of.at(gpu) : the_nvswitch(system);
        connect_both(system, gpu, target, NcclDistance::nvlink, bandwidth);
      }
    }
  }
  for (const NcclPci* pci : all)
    if (is_ranked(*pci) && pci->gpu->c2c_bandwidth > 0.0) {
      const int gpu = placed.nodes.at(pci->bus_id);
      connect_both(system, gpu, placed.cpu_of.at(gpu), NcclDistance::chip_to_chip,
                   static_cast<float>(pci->gpu->c2c_bandwidth));
    }
  for (const NcclPci* pci : all)
    for (const std::int64_t peer : pci->peers) {
      const auto a = placed.nodes.find(pci->bus_id);
      const auto b = placed.nodes.find(peer);
      const auto is_switch = [&](auto place) {
        return place != placed.nodes.end() && node_at(system, place->second).type == NcclNodeType::pcie_switch;
      };
      if (is_switch(a) && is_switch(b)) connect(system, a->second, b->second, NcclDistance::local, nccl_no_limit);
    }
  flatten_switches(system);
  finish(system, [&](int cpu) { return inter_cpu.at(cpu); });
  return system;
}

NcclSystem nccl_system(const NodeKind& node, const DeviceKind& device) {
  const auto capability = compute_capability_of(device.name);
  if (!capability)
    throw ConfigError(fmt::format("the compute capability of device '{}' is not known, which NCCL's search starts from",
                                  device.name));
  NcclSystem system;
  const auto vertex = [&](int v) -> const Vertex& { return node.vertices[v]; };
  const auto count = static_cast<int>(node.vertices.size());
  const auto gigabytes = [](BytesPerSecond rate) { return static_cast<float>(rate.value / 1e9); };

  // Host bridges of one NUMA node are one CPU.
  std::vector<int> bridge(node.vertices.size());
  std::iota(bridge.begin(), bridge.end(), 0);
  const std::function<int(int)> of = [&](int v) { return bridge[v] == v ? v : of(bridge[v]); };
  const auto both_bridges = [&](const Link& link) {
    return vertex(link.a).kind == VertexKind::host_bridge && vertex(link.b).kind == VertexKind::host_bridge;
  };
  for (const Link& link : node.links)
    if (both_bridges(link) && link.kind == "NODE")
      bridge[std::max(of(link.a), of(link.b))] = std::min(of(link.a), of(link.b));

  std::vector<int> place(node.vertices.size(), -1);
  for (std::size_t i = 0; i < node.devices.size(); ++i) {
    const auto rank = static_cast<int>(i);
    place[node.devices[i]] = add_node(system, NcclNodeType::gpu, rank);
    NcclNode& gpu = system.nodes.back();
    gpu.dev = rank;
    gpu.rank = rank;
    gpu.compute_capability = *capability;
    gpu.direct_rdma = true;
  }
  for (int v = 0; v < count; ++v) {
    int& here = place[v];
    switch (vertex(v).kind) {
      case VertexKind::device: break;
      case VertexKind::nvswitch: here = the_nvswitch(system); break;
      case VertexKind::pcie_switch: here = add_node(system, NcclNodeType::pcie_switch, v); break;
      case VertexKind::host_bridge: here = of(v) == v ? add_node(system, NcclNodeType::cpu, v) : place[of(v)]; break;
      case VertexKind::nic: here = add_node(system, NcclNodeType::nic, v); break;
      case VertexKind::memory:
        throw ConfigError(fmt::format("node '{}' has no GPUs; NCCL's search is about GPUs", node.name));
      case VertexKind::network: break;
    }
  }
  const auto place_of = [&](int v) { return place[v]; };
  float sockets = nccl_no_limit;
  int nets = 0;
  for (const Link& link : node.links) {
    const bool nvlink = vertex(link.a).kind == VertexKind::nvswitch || vertex(link.b).kind == VertexKind::nvswitch ||
                        link.kind.starts_with("NV");
    if (vertex(link.a).kind == VertexKind::network || vertex(link.b).kind == VertexKind::network) {
      const int nic = place_of(vertex(link.a).kind == VertexKind::network ? link.b : link.a);
      const int net = add_node(system, NcclNodeType::net, nets);
      system.nodes.back().dev = nets;
      system.nodes.back().asic = static_cast<std::uint64_t>(nets);
      system.nodes.back().bandwidth = gigabytes(link.bandwidth * (1.0 / nic_reached_share));
      system.nodes.back().direct_rdma = true;
      ++nets;
      connect_both(system, nic, net, NcclDistance::network, node_at(system, net).bandwidth);
    } else if (both_bridges(link)) {
      if (link.kind != "NODE") sockets = std::min(sockets, gigabytes(link.bandwidth));
    } else {
      const NcclDistance type = nvlink               ? NcclDistance::nvlink
                                : link.kind == "C2C" ? NcclDistance::chip_to_chip
                                                     : NcclDistance::one_switch;
      connect_both(system, place_of(link.a), place_of(link.b), type, gigabytes(link.bandwidth));
    }
  }
  if (system.cpus.empty()) {
    // Each PCIe tree hangs from the CPU by its first switch; GPUs and NICs outside of trees hang
    // there by themselves.
    const int cpu = add_node(system, NcclNodeType::cpu, count);
    const float pcie = device.pcie_generation == 0
                           ? nccl_no_limit
                           : gigabytes(pcie_bandwidth(device.pcie_generation, device.pcie_lanes));
    std::vector<bool> reached(system.nodes.size());
    const std::function<void(int)> reach = [&](int from) {
      reached[from] = true;
      for (const NcclLink& link : node_at(system, from).links)
        if (link.type == NcclDistance::one_switch && !reached[link.to]) reach(link.to);
    };
    std::vector<int> roots = system.switches;
    roots.insert(roots.end(), system.gpus.begin(), system.gpus.end());
    roots.insert(roots.end(), system.nics.begin(), system.nics.end());
    for (const int root : roots) {
      if (reached[root]) continue;
      reach(root);
      connect_both(system, root, cpu, NcclDistance::one_switch, pcie);
      reached[cpu] = true;
    }
  }
  finish(system, [&](int) { return sockets; });
  return system;
}

}  // namespace parplan
