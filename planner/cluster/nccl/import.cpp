#include "planner/cluster/nccl/import.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "planner/base/error.h"
#include "planner/base/text.h"
#include "planner/cluster/node_layout.h"

namespace parplan {
namespace {

// How the NVLinks of a card are wired: by bridges that are fitted or not; on a baseboard, with the
// other modules or by NVSwitch; always by NVSwitch.
enum class Board { slot, module, switched };

struct Card {
  int pci_device;  // of vendor 10de; 0 where several kinds share an id, or it is unknown
  int compute_capability;
  std::string_view kind;  // configs/devices
  Board board;
};

// PCI device ids: pci.ids of 2026-08-22 (pciutils/pciids at c1c1254); from Turing on also the names
// beside them in NVIDIA/open-gpu-kernel-modules 595.45.04, README.md; H200 and B200 also as NCCL
// captured them (tests/data/topologies/nccl-hgx-*). NVIDIA lists one id, 2d04, for the RTX 5060 Ti,
// which is sold with 8 and with 16 GB. Compute capabilities: NVIDIA, "CUDA GPU Compute Capability".
constexpr std::array<Card, 28> card_rows = {{
    {0x102d, 37, "k80", Board::slot},
    {0x1db1, 70, "v100-sxm2-16gb", Board::module},
    {0x1db4, 70, "v100-pcie-16gb", Board::slot},
    {0x1db5, 70, "v100-sxm2-32gb", Board::module},
    {0x1db6, 70, "v100-pcie-32gb", Board::slot},
    {0x1db8, 70, "v100-sxm3-32gb", Board::switched},
    {0x1e02, 75, "titan-rtx", Board::slot},
    {0x1eb8, 75, "t4", Board::slot},
    {0x20b0, 80, "a100-sxm4-40gb", Board::module},
    {0x20b2, 80, "a100-sxm4-80gb", Board::module},
    {0x20b5, 80, "a100-pcie-80gb", Board::slot},
    {0x20f1, 80, "a100-pcie-40gb", Board::slot},
    {0x2204, 86, "rtx-3090", Board::slot},
    {0x2230, 86, "rtx-a6000", Board::slot},
    {0x2237, 86, "a10g", Board::slot},
    {0x2684, 89, "rtx-4090", Board::slot},
    {0x26b1, 89, "rtx-6000-ada", Board::slot},
    {0x26b9, 89, "l40s", Board::slot},
    {0x2330, 90, "h100-sxm-80gb", Board::module},
    {0x2331, 90, "h100-pcie-80gb", Board::slot},
    {0x2321, 90, "h100-nvl-94gb", Board::slot},
    {0x2335, 90, "h200-sxm-141gb", Board::module},
    {0x2901, 100, "b200-sxm-180gb", Board::module},
    {0x3182, 103, "b300-sxm-288gb", Board::module},
    {0x2941, 100, "gb200-186gb", Board::switched},
    {0x31c2, 103, "gb300-288gb", Board::switched},
    {0, 120, "rtx-5060ti-16gb", Board::slot},
    {0, 90, "h100-sxm-96gb-500w", Board::module},
}};

const Card* card_of_kind(const std::string& kind) {
  const auto found = std::ranges::find(card_rows, kind, &Card::kind);
  return found == card_rows.end() ? nullptr : &*found;
}

std::string name_of(const NcclPci& pci) { return fmt::format("the GPU {}", pci.bus_name); }

// The GPUs that NCCL uses, in the order of ranks; in files without ranks, of NVML's numbers; in
// files without <gpu>, of bus ids, which is how NVML numbers them.
template <typename Pci>
std::vector<Pci*> gpus_of(std::vector<Pci*> all) {
  std::erase_if(all, [](const Pci* pci) { return !pci->is_gpu(); });
  const bool any_rank = std::any_of(all.begin(), all.end(), [](const Pci* pci) { return pci->gpu && pci->gpu->rank; });
  const bool any_gpu = std::any_of(all.begin(), all.end(), [](const Pci* pci) { return pci->gpu.has_value(); });
  if (any_gpu) std::erase_if(all, [&](const Pci* pci) { return !pci->gpu || (any_rank && !pci->gpu->rank); });
  const auto key = [&](const Pci* pci) -> std::int64_t {
    return any_rank ? *pci->gpu->rank : any_gpu ? pci->gpu->dev : pci->bus_id;
  };
  std::sort(all.begin(), all.end(), [&](const Pci* a, const Pci* b) { return key(a) < key(b); });
  return all;
}

bool any_nvlink(const std::vector<const NcclPci*>& gpus) {
  return std::any_of(gpus.begin(), gpus.end(),
                     [](const NcclPci* pci) { return pci->gpu && !pci->gpu->nvlinks.empty(); });
}

// How NVLinks are wired that the file does not list.
enum class Wiring { none, unknown, pairs, nvswitch };

// Four modules of an HGX A100 or H100 board are joined pair by pair, eight and more by NVSwitch
// (NVIDIA HGX A100 and H100 datasheets). Boards of older modules were wired in several ways.
Wiring assumed_wiring(const std::vector<const NcclPci*>& gpus, const DeviceKind& device) {
  if (device.nvlinks == 0 || gpus.size() < 2 || any_nvlink(gpus)) return Wiring::none;
  const Card* card = card_of_kind(device.name);
  if (card == nullptr) return Wiring::unknown;
  if (card->board == Board::slot) return Wiring::none;
  if (card->board == Board::switched) return Wiring::nvswitch;
  if (card->compute_capability >= 80 && gpus.size() == 4 && device.nvlinks % 3 == 0) return Wiring::pairs;
  return card->compute_capability >= 80 && gpus.size() >= 8 ? Wiring::nvswitch : Wiring::unknown;
}

std::string times(std::size_t count, const std::string& what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

constexpr std::array<const char*, 6> speed_texts = {"2.5 GT/s PCIe",  "5.0 GT/s PCIe",  "8.0 GT/s PCIe",
                                                    "16.0 GT/s PCIe", "32.0 GT/s PCIe", "64.0 GT/s PCIe"};
constexpr int unknown_width = 255;  // Linux's PCI_LNK_WIDTH_UNKNOWN

bool knows_link(const NcclPci& pci) {
  return pcie_generation(pci.link_speed) && pci.link_width != 0 && pci.link_width != unknown_width;
}
// NCCL assumes 8 GT/s and 16 lanes where it does not know.
BytesPerSecond link_bandwidth(const NcclPci& pci) {
  const bool width = pci.link_width != 0 && pci.link_width != unknown_width;
  return pcie_bandwidth(pcie_generation(pci.link_speed).value_or(3), width ? pci.link_width : 16);
}

// A hypervisor's virtual switches claim 2.5 GT/s x1 whatever is behind them: they get the widest
// link below.
int widen_made_up_switches(std::vector<NcclPci>& children) {
  int widened = 0;
  for (NcclPci& pci : children) {
    widened += widen_made_up_switches(pci.children);
    if (pci.children.empty() || pci.link_width != 1 || pcie_generation(pci.link_speed) != 1) continue;
    const auto widest =
        std::max_element(pci.children.begin(), pci.children.end(),
                         [](const NcclPci& a, const NcclPci& b) { return link_bandwidth(a) < link_bandwidth(b); });
    if (link_bandwidth(*widest) <= link_bandwidth(pci)) continue;
    pci.link_speed = widest->link_speed;
    pci.link_width = widest->link_width;
    ++widened;
  }
  return widened;
}

// What NCCL takes for the vendor of a node, the first CPU's (ncclTopoCpuType in src/graph/topo.cc).
std::optional<ProcessorVendor> vendor_of(const NcclCpu& cpu) {
  if (cpu.architecture != CpuArchitecture::x86) return std::nullopt;
  if (cpu.vendor == CpuVendor::intel) return ProcessorVendor::intel;
  if (cpu.vendor == CpuVendor::amd) return ProcessorVendor::amd;
  return std::nullopt;
}

// A node built vertex by vertex from a completed topology.
class Builder {
 public:
  Builder(const NcclTopology& topology, const DeviceKind& device, std::string name)
      : topology_(topology), device_(device) {
    cluster_.name = name;
    cluster_.notes = topology.notes;
    cluster_.sources = {
        "NCCL's topology file",
        "speeds: the file, the device kind and NCCL's constants (planner/cluster/node_layout.h, nccl_xml.cpp)"};
    NodeGroup& group = cluster_.groups.front();
    group.device = device;
    group.node.name = std::move(name);
    group.processor = vendor_of(topology.cpus.front());
  }

  Cluster build() {
    const std::vector<const NcclPci*> gpus = gpus_of(pci_devices(topology_));
    for (const NcclPci* pci : gpus)
      gpu_vertex_[pci->bus_id] = add_vertex(node(), fmt::format("GPU{}", pci->gpu->dev), VertexKind::device);
    add_nvlinks(gpus);
    std::vector<std::pair<const NcclCpu*, int>> bridges;
    for (const NcclCpu& cpu : topology_.cpus) {
      if (std::none_of(cpu.children.begin(), cpu.children.end(),
                       [&](const NcclPci& child) { return is_useful(child); }))
        continue;
      bridges.emplace_back(&cpu,
                           add_vertex(node(), fmt::format("host bridge {}", bridges.size()), VertexKind::host_bridge));
      bridge_ = bridges.back().second;
      for (const NcclPci& child : cpu.children) add_pci(child, bridge_, 0);
    }
    join_cpus(bridges);
    join_peers();
    add_network();
    if (unknown_links_ > 0)
      cluster_.notes.push_back(fmt::format("PCIe link{} of {} not known, taken as 8 GT/s x16 as NCCL does",
                                           unknown_links_ == 1 ? "" : "s",
                                           times(static_cast<std::size_t>(unknown_links_), "device")));
    return std::move(cluster_);
  }

 private:
  NodeKind& node() { return cluster_.groups.front().node; }

  bool is_useful(const NcclPci& pci) const {
    return (!pci.bus_name.empty() && gpu_vertex_.contains(pci.bus_id)) || !pci.nets.empty() ||
           std::any_of(pci.children.begin(), pci.children.end(),
                       [&](const NcclPci& child) { return is_useful(child); });
  }

  void add_nvlinks(const std::vector<const NcclPci*>& gpus) {
    std::size_t elsewhere = 0;
    std::size_t to_itself = 0;
    std::optional<int> nvswitch;
    for (const NcclPci* pci : gpus) {
      const int gpu = gpu_vertex_.at(pci->bus_id);
      int used = 0;
      int to_switch = 0;
      std::map<std::int64_t, int> to_gpus;
      for (const NcclNvlink& link : pci->gpu->nvlinks) {
        const bool to_gpu = link.target_class >> 16 == 0x03;
        if (to_gpu && link.target == pci->bus_id) to_itself += static_cast<std::size_t>(link.count);
        else if (to_gpu && !gpu_vertex_.contains(link.target)) elsewhere += static_cast<std::size_t>(link.count);
        else if (to_gpu) to_gpus[link.target] += link.count;
        else if (link.target_class == 0x068001) to_cpu_[pci->bus_id] += link.count;
        else to_switch += link.count;
        used += link.count;
        if (used > device_.nvlinks)
          throw ConfigError(
              link.where, device_.nvlinks == 0
                              ? fmt::format("GPU{} has NVLinks, but device '{}' has none; is --device right?",
                                            pci->gpu->dev, device_.name)
                              : fmt::format("GPU{} has {} NVLinks or more, but device '{}' has {}; is --device right?",
                                            pci->gpu->dev, used, device_.name, device_.nvlinks));
      }
      if (to_switch > 0) {
        if (!nvswitch) nvswitch = add_vertex(node(), "NVSwitch", VertexKind::nvswitch);
        add_link(node(), gpu, *nvswitch, device_.nvlink_per_link_reached * to_switch, nvlink_hop_latency / 2.0,
                 fmt::format("NV{}", to_switch));
      }
      for (const auto& [target, count] : to_gpus)
        if (const int other = gpu_vertex_.at(target); gpu < other)
          add_link(node(), gpu, other, device_.nvlink_per_link_reached * count, nvlink_hop_latency,
                   fmt::format("NV{}", count));
    }
    if (elsewhere > 0)
      cluster_.notes.push_back(
          fmt::format("{} to GPUs that the file leaves out are left out", times(elsewhere, "NVLink")));
    if (to_itself > 0)
      cluster_.notes.push_back(fmt::format("{} from a GPU to itself are left out", times(to_itself, "NVLink")));
  }

  BytesPerSecond bandwidth_of(const NcclPci& pci) {
    if (!knows_link(pci)) ++unknown_links_;
    return link_bandwidth(pci);
  }

  // `merged` is the generation of the Broadcom switch `parent`, whose second level is part of it.
  void add_pci(const NcclPci& pci, int parent, int merged) {
    if (!is_useful(pci)) return;
    if (const auto gpu = gpu_vertex_.find(pci.bus_id); gpu != gpu_vertex_.end() && !pci.bus_name.empty()) {
      add_link(node(), gpu->second, parent, bandwidth_of(pci), pcie_link_latency, "PCIe");
      if (const auto links = to_cpu_.find(pci.bus_id); links != to_cpu_.end())
        add_link(node(), gpu->second, bridge_, device_.nvlink_per_link_reached * links->second, nvlink_hop_latency,
                 fmt::format("NV{}", links->second));
      if (pci.gpu->c2c_bandwidth > 0.0)
        add_link(node(), gpu->second, bridge_, BytesPerSecond(pci.gpu->c2c_bandwidth * 1e9), pcie_link_latency, "C2C");
      return;
    }
    if (!pci.nets.empty()) {
      add_nic(pci, parent);
      return;
    }
    int place = parent;
    if (merged == 0 || broadcom_generation(pci.device, 1) != merged) {
      place = add_vertex(node(), fmt::format("PCIe switch {}", switches_++), VertexKind::pcie_switch);
      add_link(node(), place, parent, bandwidth_of(pci), pcie_link_latency, "PCIe");
      merged = broadcom_generation(pci.device, 0);
    } else {
      merged = 0;
    }
    switch_vertex_[pci.bus_id] = place;
    for (const NcclPci& child : pci.children) add_pci(child, place, merged);
  }

  // Networks of one adapter share its PCIe link. A network without a PCI device is at the CPU
  // without a limit, perhaps at several CPUs.
  void add_nic(const NcclPci& pci, int parent) {
    const bool adapter = !pci.bus_name.empty();
    const BytesPerSecond bandwidth = adapter ? bandwidth_of(pci) : within_socket_bandwidth;
    int place = parent;
    if (adapter && pci.nets.size() > 1) {
      place = add_vertex(node(), fmt::format("NIC card {}", adapters_++), VertexKind::pcie_switch);
      add_link(node(), place, parent, bandwidth, pcie_link_latency, "PCIe");
    }
    for (const NcclNet& net : pci.nets) {
      const auto known = net_vertex_.find(net.dev);
      const bool again = known != net_vertex_.end();
      const int nic = again ? known->second : add_vertex(node(), nic_name(net), VertexKind::nic);
      add_link(node(), place, nic, bandwidth, place == parent ? pcie_link_latency : Seconds(0.0), "PCIe");
      if (again) {
        cluster_.notes.push_back(
            fmt::format("NIC {} is listed at several CPUs: one NIC, joined to each", node().vertices[nic].name));
        continue;
      }
      net_vertex_[net.dev] = nic;
      nets_.emplace_back(nic, &net);
    }
  }

  std::string nic_name(const NcclNet& net) {
    const auto taken = [&](const std::string& name) {
      return std::any_of(node().vertices.begin(), node().vertices.end(),
                         [&](const Vertex& vertex) { return vertex.name == name; });
    };
    // Other vertices have names with spaces, or already use this name.
    const bool plain = !net.name.empty() && std::all_of(net.name.begin(), net.name.end(), [](unsigned char c) {
      return std::isalnum(c) || c == '_' || c == '-';
    });
    if (plain && net.name != "network" && !taken(net.name)) return net.name;
    std::string name = fmt::format("NIC{}", net.dev);
    while (taken(name)) name += "'";
    return name;
  }

  void join_cpus(const std::vector<std::pair<const NcclCpu*, int>>& bridges) {
    std::set<double> rates;
    bool unknown = false;
    for (std::size_t i = 0; i < bridges.size(); ++i)
      for (std::size_t j = i + 1; j < bridges.size(); ++j) {
        BytesPerSecond rate = within_socket_bandwidth;
        for (const NcclCpu* cpu : {bridges[i].first, bridges[j].first}) {
          const BytesPerSecond one(inter_cpu_bandwidth(*cpu) * 1e9);
          const bool limited = one < within_socket_bandwidth;
          unknown = unknown || !limited;
          rate = std::min(rate, limited ? one : socket_bandwidth);
        }
        rates.insert(rate.value);
        add_link(node(), bridges[i].second, bridges[j].second, rate, Seconds(0.0), "SYS");
      }
    if (unknown)
      cluster_.notes.push_back(
          "the file names no CPU: links between sockets taken as 16 GB/s, NCCL's for AMD (src/graph/topo.h)");
    else if (!rates.empty())
      cluster_.notes.push_back(fmt::format("links between sockets taken as {}, NCCL's for this CPU (src/graph/topo.h)",
                                           format_bandwidth(BytesPerSecond(*rates.begin()))));
  }

  void join_peers() {
    std::set<std::pair<int, int>> joined;
    for (const NcclPci* pci : pci_devices(topology_))
      for (const std::int64_t peer : pci->peers) {
        const auto a = switch_vertex_.find(pci->bus_id);
        const auto b = switch_vertex_.find(peer);
        if (a == switch_vertex_.end() || b == switch_vertex_.end() || a->second == b->second) continue;
        const auto ends = std::minmax(a->second, b->second);
        if (joined.insert(ends).second)
          add_link(node(), ends.first, ends.second, within_socket_bandwidth, Seconds(0.0), "PCIe");
      }
  }

  void add_network() {
    if (nets_.empty()) return;
    cluster_.network.latency = network_latency;
    const int fabric = add_vertex(node(), "network", VertexKind::network);
    int unknown = 0;
    for (const auto& [nic, net] : nets_) {
      if (net->megabits == 0) ++unknown;
      const BytesPerSecond line_rate((net->megabits > 0 ? net->megabits : 10000) * 1e6 / 8.0);
      add_link(node(), nic, fabric, line_rate * nic_reached_share, Seconds(0.0), "network");
    }
    if (unknown > 0)
      cluster_.notes.push_back(
          fmt::format("the speed of {} is not known, taken as 10 Gbit/s as NCCL does; --network gives another",
                      times(static_cast<std::size_t>(unknown), "NIC")));
  }

  const NcclTopology& topology_;
  const DeviceKind& device_;
  Cluster cluster_;
  std::map<std::int64_t, int> gpu_vertex_;  // by bus id
  std::map<std::int64_t, int> switch_vertex_;
  std::map<std::int64_t, int> to_cpu_;  // NVLinks
  std::map<int, int> net_vertex_;       // by dev
  std::vector<std::pair<int, const NcclNet*>> nets_;
  int bridge_ = 0;  // of the CPU whose devices are being added
  int switches_ = 0;
  int adapters_ = 0;
  int unknown_links_ = 0;
};

}  // namespace

std::optional<int> compute_capability_of(const std::string& device_kind) {
  const Card* card = card_of_kind(device_kind);
  if (card == nullptr) return std::nullopt;
  return card->compute_capability;
}

std::optional<std::string> device_kind_of(const NcclTopology& topology) {
  const NcclPci* first = nullptr;
  for (const NcclPci* pci : gpus_of(pci_devices(topology))) {
    if (pci->device_id() == 0) return std::nullopt;
    if (first == nullptr) first = pci;
    if (pci->vendor_id() != first->vendor_id() || pci->device_id() != first->device_id())
      throw ConfigError(
          pci->where,
          fmt::format("{} is a {:04x}:{:04x} and {} (line {}) a {:04x}:{:04x}; parplan's nodes have GPUs of one kind",
                      name_of(*pci), pci->vendor_id(), pci->device_id(), name_of(*first), first->where.line,
                      first->vendor_id(), first->device_id()));
  }
  if (first == nullptr || first->vendor_id() != 0x10de) return std::nullopt;
  const auto card = std::ranges::find(card_rows, first->device_id(), &Card::pci_device);
  if (card == card_rows.end()) return std::nullopt;
  return std::string(card->kind);
}

NcclTopology completed(NcclTopology topology, const DeviceKind& device, std::optional<BytesPerSecond> network) {
  const std::vector<NcclPci*> all = pci_devices(topology);
  const std::vector<NcclPci*> gpus = gpus_of(all);
  const std::vector<const NcclPci*> known(gpus.begin(), gpus.end());
  const auto left_out = static_cast<std::size_t>(
                            std::count_if(all.begin(), all.end(), [](const NcclPci* pci) { return pci->is_gpu(); })) -
                        gpus.size();
  if (left_out > 0)
    topology.notes.push_back(fmt::format("{} without a rank left out, as NCCL does", times(left_out, "GPU")));
  if (const auto unclassed = std::count_if(all.begin(), all.end(), [](const NcclPci* pci) { return !pci->pci_class; });
      unclassed > 0)
    topology.notes.push_back(
        fmt::format("{} without a class left out", times(static_cast<std::size_t>(unclassed), "PCI device")));

  const Wiring wiring = assumed_wiring(known, device);
  std::size_t links_filled = 0;
  if (std::none_of(gpus.begin(), gpus.end(), [](const NcclPci* pci) { return pci->gpu.has_value(); }))
    topology.notes.push_back(fmt::format("the file lists no <gpu>: its {} of class 0x03 in the order of their bus ids",
                                         times(gpus.size(), "PCI device")));
  for (std::size_t i = 0; i < gpus.size(); ++i) {
    NcclPci& pci = *gpus[i];
    if (!pci.gpu)
      pci.gpu = NcclGpu{.dev = static_cast<int>(i),
                        .rank = {},
                        .compute_capability = compute_capability_of(device.name).value_or(0),
                        .direct_rdma = true,
                        .nvlinks = {},
                        .where = pci.where};
    if (!pci.gpu->rank) pci.gpu->rank = static_cast<int>(i);
    if (!knows_link(pci) && device.pcie_generation > 0) {
      pci.link_speed = speed_texts[device.pcie_generation - 1];
      pci.link_width = device.pcie_lanes;
      ++links_filled;
    }
    for (std::size_t j = 0; wiring == Wiring::pairs && j < gpus.size(); ++j)
      if (i != j)
        pci.gpu->nvlinks.push_back({.target = gpus[j]->bus_id,
                                    .target_name = gpus[j]->bus_name,
                                    .target_class = 0x030200,
                                    .count = device.nvlinks / static_cast<int>(gpus.size() - 1),
                                    .where = pci.where});
    if (wiring == Wiring::nvswitch)
      pci.gpu->nvlinks.push_back({.target = -1,
                                  .target_name = "NVSwitch",
                                  .target_class = 0x068000,
                                  .count = device.nvlinks,
                                  .where = pci.where});
  }
  if (links_filled > 0)
    topology.notes.push_back(fmt::format("PCIe links of {} not said: taken as generation {} x{}, the card's",
                                         times(links_filled, "GPU"), device.pcie_generation, device.pcie_lanes));
  if (wiring == Wiring::pairs)
    topology.notes.push_back(
        fmt::format("the file lists no NVLinks: {} of each GPU's {} to each other GPU, as on boards of four",
                    device.nvlinks / 3, device.nvlinks));
  if (wiring == Wiring::nvswitch)
    topology.notes.push_back(
        fmt::format("the file lists no NVLinks: each GPU's {} taken to lead to NVSwitches", device.nvlinks));
  if (wiring == Wiring::none && device.nvlinks > 0 && gpus.size() > 1 && !any_nvlink(known))
    topology.notes.push_back("the file lists no NVLinks: no bridges between the cards");

  int widened = 0;
  for (NcclCpu& cpu : topology.cpus) widened += widen_made_up_switches(cpu.children);
  if (widened > 0)
    topology.notes.push_back(fmt::format("{} of 2.5 GT/s x1 made up by a hypervisor, taken as wide as what is below",
                                         times(static_cast<std::size_t>(widened), "PCIe switch")));

  std::set<int> devs;
  std::vector<NcclNet*> nets;
  std::vector<NcclPci*> without;
  const std::function<void(std::vector<NcclPci>&)> visit = [&](std::vector<NcclPci>& children) {
    for (NcclPci& pci : children) {
      for (NcclNet& net : pci.nets) {
        nets.push_back(&net);
        devs.insert(net.dev);
      }
      if (pci.is_nic() && pci.nets.empty() && !pci.bus_name.empty()) without.push_back(&pci);
      visit(pci.children);
    }
  };
  for (NcclCpu& cpu : topology.cpus) visit(cpu.children);
  if (network) {
    // Faster than anything, but still a whole number.
    const int megabits = static_cast<int>(std::clamp(std::round(network->value * 8.0 / 1e6), 1.0, 1e9));
    for (NcclNet* net : nets) net->megabits = megabits;
    int dev = 0;
    for (NcclPci* pci : without) {
      while (devs.contains(dev)) ++dev;
      devs.insert(dev);
      pci->has_nic = true;
      pci->nets.push_back({.name = {},
                           .dev = dev,
                           .megabits = megabits,
                           .guid = {},
                           .direct_rdma = true,
                           .rail = {},
                           .plane = {},
                           .where = pci->where});
    }
    if (nets.empty() && without.empty())
      throw ConfigError(
          fmt::format("--network: '{}' lists no NICs, whose speed it is; leave it out for one node, or write a "
                      "cluster.yaml whose node has 'nics' (docs/cluster.md)",
                      topology.file));
  } else if (!without.empty() && nets.empty()) {
    topology.notes.push_back(fmt::format(
        "{} {} left out, as {} speed is not known: one node only; give --network for several",
        times(without.size(), "NIC"), without.size() == 1 ? "is" : "are", without.size() == 1 ? "its" : "their"));
  } else if (!without.empty()) {
    topology.notes.push_back(fmt::format("{} without <net> {} left out, as by NCCL", times(without.size(), "NIC"),
                                         without.size() == 1 ? "is" : "are"));
  }
  return topology;
}

Cluster import_nccl_topology(const std::string& text, const std::string& file_name, const ClusterCatalog& catalog,
                             const ClusterOptions& options) {
  const NcclTopology topology = read_nccl_topology(text, file_name);
  const Location file{.file = file_name};
  const std::vector<const NcclPci*> all = pci_devices(topology);
  const std::vector<const NcclPci*> gpus = gpus_of(all);
  if (gpus.empty()) {
    const auto unclassed = std::find_if(all.begin(), all.end(), [](const NcclPci* pci) { return !pci->pci_class; });
    if (unclassed != all.end())
      throw ConfigError(
          (*unclassed)->where,
          fmt::format("the file does not say the class of {} of its {} PCI devices, so not which are GPUs; NCCL asks "
                      "the machine that it runs on: "
                      "let it write the whole topology there (NCCL_TOPO_DUMP_FILE=topology.xml), or give the text of "
                      "nvidia-smi topo -m",
                      std::count_if(all.begin(), all.end(), [](const NcclPci* pci) { return !pci->pci_class; }),
                      all.size()));
    throw ConfigError(file, "the file has no GPUs (PCI devices of class 0x03)");
  }

  const std::vector<std::string> kinds = device_names(catalog);
  std::optional<std::string> kind = device_kind_of(topology);
  if (kind && std::find(kinds.begin(), kinds.end(), *kind) == kinds.end()) kind.reset();
  const bool told = kind.has_value();
  if (options.device && kind && *options.device != *kind)
    throw ConfigError(gpus.front()->where,
                      fmt::format("--device {}: {} is a 10de:{:04x}, which is {}; leave --device out", *options.device,
                                  name_of(*gpus.front()), gpus.front()->device_id(), *kind));
  if (options.device) kind = options.device;

  std::vector<std::string> missing;
  std::optional<DeviceKind> device;
  if (kind) {
    device = find_nvidia_card(*kind, "a topology of NCCL", catalog);
    if (assumed_wiring(gpus, *device) == Wiring::unknown)
      missing.push_back(fmt::format(
          "how its {} GPUs are joined by NVLink (give the text of nvidia-smi topo -m instead)", gpus.size()));
  } else {
    const int id = gpus.front()->device_id();
    missing.push_back(
        fmt::format("the card{} (give --device with one of {})",
                    id == 0 ? "" : fmt::format(", but that it is a {:04x}:{:04x}", gpus.front()->vendor_id(), id),
                    join(nvidia_card_names(catalog))));
  }
  const bool any_net = std::any_of(topology.cpus.begin(), topology.cpus.end(), [](const NcclCpu& cpu) {
    const std::function<bool(const NcclPci&)> has_net = [&](const NcclPci& pci) {
      return !pci.nets.empty() || std::any_of(pci.children.begin(), pci.children.end(), has_net);
    };
    return std::any_of(cpu.children.begin(), cpu.children.end(), has_net);
  });
  const bool any_nic = std::any_of(all.begin(), all.end(), [](const NcclPci* pci) { return pci->is_nic(); });
  const bool several_nodes =
      options.nodes.value_or(1) > 1 || options.devices.value_or(1) > static_cast<int>(gpus.size());
  if (several_nodes && !options.network && !any_net && any_nic)
    missing.push_back("the speed of its NICs (give --network, such as --network '400 Gbit/s')");
  if (!missing.empty()) throw ConfigError(file, "NCCL's topology file does not say " + join(missing, ", nor "));

  const auto capability = compute_capability_of(device->name);
  for (const NcclPci* pci : gpus)
    if (pci->gpu && capability && pci->gpu->compute_capability != *capability)
      throw ConfigError(
          pci->gpu->where,
          fmt::format("GPU{} has sm=\"{}\", but device '{}' is of compute capability {}.{}; is --device right?",
                      pci->gpu->dev, pci->gpu->compute_capability, device->name, *capability / 10, *capability % 10));
  NcclTopology whole = completed(topology, *device, options.network);
  if (told)
    whole.notes.push_back(
        fmt::format("the card is {}, by its PCI device id 10de:{:04x}", device->name, gpus.front()->device_id()));
  return Builder(whole, *device, std::filesystem::path(file_name).stem().string()).build();
}

}  // namespace parplan
