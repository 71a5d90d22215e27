#include "planner/cluster/nccl/paths.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "planner/base/error.h"

// After NVIDIA/nccl src/graph/paths.cc and topo.cc at 5067397c, with its defaults (no NCCL_*
// variables set).
namespace parplan {
namespace {

const NcclNode& node_at(const NcclSystem& system, int node) { return system.nodes[node]; }

// The distance of a path extended by `link` at `node`, seen from its target.
NcclDistance prolonged(const NcclSystem& system, const NcclPath& path, int node, const NcclLink& link, bool from_gpu) {
  const NcclNodeType here = node_at(system, node).type;
  const NcclNodeType there = node_at(system, link.to).type;
  NcclDistance type = link.type == NcclDistance::network ? NcclDistance::local : link.type;
  if (here == NcclNodeType::pcie_switch && there == NcclNodeType::pcie_switch) type = NcclDistance::switches;
  if (link.type == NcclDistance::one_switch && (here == NcclNodeType::cpu || there == NcclNodeType::cpu))
    type = NcclDistance::host_bridge;
  // A second NVLink out of a GPU: a detour.
  if (from_gpu && path.type == NcclDistance::nvlink && type == NcclDistance::nvlink && path.hops() == 1)
    type = NcclDistance::nvlink_bridge;
  return std::max(path.type, type);
}

// From all nodes to `target`, breadth first.
std::vector<NcclPath> paths_to(const NcclSystem& system, int target) {
  std::vector<NcclPath> paths(system.nodes.size());
  const auto path_of = [&](int node) -> NcclPath& { return paths[node]; };
  path_of(target) = {.links = {}, .bandwidth = nccl_no_limit, .type = NcclDistance::local};
  std::vector<int> level = {target};
  while (!level.empty()) {
    std::vector<int> next;
    for (const int node : level) {
      const bool through_gpu = node != target && node_at(system, node).type == NcclNodeType::gpu;
      for (const NcclLink& link : node_at(system, node).links) {
        const NcclPath& path = path_of(node);
        NcclPath& other = path_of(link.to);
        // Through a GPU only from GPU to GPU over NVLink, and through one GPU only.
        if (through_gpu && (link.type != NcclDistance::nvlink || node_at(system, link.to).type != NcclNodeType::gpu ||
                            path.hops() > 1))
          continue;
        const float bandwidth = std::min(path.bandwidth, link.bandwidth);
        const NcclDistance type = prolonged(system, path, node, link, node_at(system, node).type == NcclNodeType::gpu);
        const bool better = type < other.type || (type == other.type && other.bandwidth < bandwidth) ||
                            (type == other.type && other.bandwidth == bandwidth && other.hops() > path.hops() + 1);
        if (!better) continue;
        const std::vector<NcclLink>& back = node_at(system, link.to).links;
        const auto reverse = std::find_if(back.begin(), back.end(),
                                          [&](const NcclLink& one) { return one.to == node && one.type == link.type; });
        PARPLAN_ASSERT(reverse != back.end(), fmt::format("no link back from node {} to {}", link.to, node));
        std::vector<std::pair<int, int>> links = {{link.to, static_cast<int>(reverse - back.begin())}};
        links.insert(links.end(), path.links.begin(), path.links.end());
        other = {.links = std::move(links), .bandwidth = bandwidth, .type = type};
        if (std::find(next.begin(), next.end(), link.to) == next.end()) next.push_back(link.to);
      }
    }
    level = std::move(next);
  }
  return paths;
}

// C2C to the CPU with PCIe from there is a class of its own.
NcclDistance joined(NcclDistance a, NcclDistance b) {
  if (std::max(a, b) == NcclDistance::host_bridge && std::min(a, b) == NcclDistance::chip_to_chip)
    return NcclDistance::chip_and_pcie;
  return std::max(a, b);
}

class Paths {
 public:
  explicit Paths(const NcclSystem& system) : system_(system) {
    paths_.to.resize(system.nodes.size());
    for (const std::vector<int>* targets : {&system.cpus, &system.gpus, &system.nets, &system.nvswitches})
      for (const int target : *targets) paths_.to[target] = paths_to(system, target);
    for (const int to : system.gpus)
      for (const int from : system.gpus)
        if (!reaches_directly(from, to)) divert(from, local_cpu(to), to);
    for (const int gpu : system.gpus) take_chip_to_chip(gpu);
    for (std::size_t n = 0; n < system.nets.size(); ++n)
      for (const int gpu : system.gpus) adapt(gpu, static_cast<int>(n));
    for (std::size_t g = 0; g < system.gpus.size(); ++g) paths_.nets_of.push_back(nets_of(static_cast<int>(g)));
    for (std::size_t n = 0; n < system.nets.size(); ++n) paths_.gpu_of.push_back(gpu_of(static_cast<int>(n)));
  }
  NcclPaths take() { return std::move(paths_); }

 private:
  NcclPath& path(int from, int target) { return paths_.to[target][from]; }
  int gpu_at(int place) const { return system_.gpus[place]; }

  // PCIe peer-to-peer: within PCIe switches, and anywhere on AMD machines of one or two GPUs.
  bool reaches_directly(int from, int to) {
    const NcclNode& cpu = node_at(system_, system_.cpus.front());
    const bool amd_pair =
        cpu.architecture == CpuArchitecture::x86 && cpu.vendor == CpuVendor::amd && system_.gpus.size() <= 2;
    return path(from, to).type <= (amd_pair ? NcclDistance::sockets : NcclDistance::switches);
  }

  int local_cpu(int gpu) {
    const std::vector<int> near = nccl_nearest(paths_, gpu, system_.cpus);
    PARPLAN_ASSERT(!near.empty(), fmt::format("GPU {} reaches no CPU", gpu));
    const auto hops = [&](int place) { return path(gpu, system_.cpus[place]).hops(); };
    return system_.cpus[*std::min_element(near.begin(), near.end(), [&](int a, int b) { return hops(a) < hops(b); })];
  }

  void divert(int from, int over, int to) {
    const NcclPath first = path(from, over);
    const NcclPath second = path(over, to);
    NcclPath& whole = path(from, to);
    whole.links = first.links;
    whole.links.insert(whole.links.end(), second.links.begin(), second.links.end());
    whole.type =
        node_at(system_, over).type == NcclNodeType::gpu ? NcclDistance::other_gpu : joined(first.type, second.type);
    whole.bandwidth = std::min(first.bandwidth, second.bandwidth);
  }

  void take_chip_to_chip(int gpu) {
    const int cpu = local_cpu(gpu);
    for (const int place : nccl_nearest(paths_, gpu, system_.nets)) {
      const int net = system_.nets[place];
      if (joined(path(gpu, cpu).type, path(net, cpu).type) != NcclDistance::chip_and_pcie) continue;
      path(gpu, net).type = std::min(NcclDistance::chip_and_pcie, path(gpu, net).type);
      path(net, gpu).type = std::min(NcclDistance::chip_and_pcie, path(net, gpu).type);
    }
  }

  // Whether GPU and network exchange data without the CPU's memory.
  bool direct_rdma(int gpu, int net, bool read) {
    if (!node_at(system_, net).direct_rdma || !node_at(system_, gpu).direct_rdma) return false;
    if (read && node_at(system_, gpu).compute_capability < 80 && system_.gpus.size() > 1) {
      // Before Ampere, reads disturb other PCIe traffic: only where that has NVLink.
      const bool nvlink = std::any_of(system_.gpus.begin(), system_.gpus.end(), [&](int other) {
        return other != gpu && path(gpu, other).type == NcclDistance::nvlink;
      });
      if (!nvlink) return false;
    }
    NcclDistance distance = path(gpu, net).type;
    if (distance == NcclDistance::other_gpu) {
      for (const auto& [node, place] : path(gpu, net).links) {
        const int next = node_at(system_, node).links[place].to;
        if (node_at(system_, next).type == NcclNodeType::nvswitch) continue;
        distance = path(next, net).type;
        break;
      }
    }
    return distance <= NcclDistance::chip_and_pcie;
  }

  void adapt(int gpu, int net_place) {
    const int net = system_.nets[net_place];
    const std::optional<int> nearest_gpu = gpu_of(net_place);
    if (nearest_gpu && gpu_at(*nearest_gpu) != gpu) {
      const int peer = gpu_at(*nearest_gpu);
      if (path(peer, net).type <= NcclDistance::chip_and_pcie && direct_rdma(peer, net, true) &&
          path(peer, gpu).type <= NcclDistance::nvlink &&
          (path(peer, net).bandwidth > path(gpu, net).bandwidth || path(gpu, net).type > NcclDistance::other_gpu))
        divert(gpu, peer, net);
    }
    if (path(gpu, net).type < NcclDistance::host_bridge && !direct_rdma(gpu, net, false)) {
      const int cpu = local_cpu(gpu);
      divert(net, cpu, gpu);
      divert(gpu, cpu, net);
    }
  }

  // Networks that share an id are one network to NCCL.
  int first_of_id(int net_place) const {
    const auto id_of = [&](int place) { return node_at(system_, system_.nets[place]).id; };
    int first = 0;
    while (id_of(first) != id_of(net_place)) ++first;
    return first;
  }

  // The nets nearest to a GPU are distributed among the GPUs nearest to them.
  std::vector<int> nets_of(int gpu_place) const {
    const int gpu = gpu_at(gpu_place);
    const std::vector<int> nets = nccl_nearest(paths_, gpu, system_.nets);
    if (nets.empty()) return {};
    const std::vector<int> gpus = nccl_nearest(paths_, system_.nets[nets.front()], system_.gpus);
    if (gpus.empty()) return {};
    const auto each = (nets.size() + gpus.size() - 1) / gpus.size();
    auto first = static_cast<unsigned>(node_at(system_, gpu).dev) % static_cast<unsigned>(gpus.size());
    if (std::has_single_bit(nets.size())) {
      unsigned mirrored = 0;
      for (unsigned bit = 1, mirror = static_cast<unsigned>(nets.size()) >> 1; bit < nets.size();
           bit <<= 1, mirror >>= 1)
        if (first & bit) mirrored |= mirror;
      first = mirrored;
    }
    std::vector<int> turn;
    for (std::size_t i = 0; i < std::min(each, static_cast<std::size_t>(nccl_most_channels)); ++i) {
      const int net = first_of_id(nets[(first + i) % nets.size()]);
      if (!turn.empty() && net == turn.front()) break;
      turn.push_back(net);
    }
    return turn;
  }

  std::optional<int> gpu_of(int net_place) const {
    const std::vector<int> gpus = nccl_nearest(paths_, system_.nets[net_place], system_.gpus);
    std::vector<std::vector<int>> turns;
    for (const int gpu : gpus) turns.push_back(nets_of(gpu));
    for (std::size_t channel = 0; channel < nccl_most_channels; ++channel)
      for (std::size_t g = 0; g < gpus.size(); ++g)
        if (!turns[g].empty() && turns[g][channel % turns[g].size()] == first_of_id(net_place)) return gpus[g];
    return std::nullopt;
  }

  const NcclSystem& system_;
  NcclPaths paths_;
};

}  // namespace

NcclPaths nccl_paths(const NcclSystem& system) {
  PARPLAN_ASSERT(!system.cpus.empty() && !system.gpus.empty(),
                 fmt::format("{} CPUs, {} GPUs", system.cpus.size(), system.gpus.size()));
  return Paths(system).take();
}

std::vector<int> nccl_nearest(const NcclPaths& paths, int from, const std::vector<int>& candidates) {
  std::vector<int> near;
  NcclDistance type = NcclDistance::unreachable;
  float bandwidth = 0.0F;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const NcclPath& path = paths.between(from, candidates[i]);
    if (path.bandwidth > bandwidth || (path.bandwidth == bandwidth && path.type < type)) {
      bandwidth = path.bandwidth;
      type = path.type;
      near.clear();
    }
    if (path.bandwidth == bandwidth && path.type == type) near.push_back(static_cast<int>(i));
  }
  return near;
}

}  // namespace parplan
