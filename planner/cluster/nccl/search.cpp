#include "planner/cluster/nccl/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <tuple>
#include <utility>

#include "planner/base/error.h"
#include "planner/cluster/nccl/paths.h"

// After NVIDIA/nccl src/graph/search.cc and init.cc at 5067397c, with its defaults (no NCCL_*
// variables set).
namespace parplan {
namespace {

constexpr int most_nvls_heads = 32;           // NCCL_MAX_NVLS_ARITY
constexpr int most_direct_heads = 8;          // NCCL_MAX_DIRECT_ARITY + 1
constexpr std::int64_t all_steps = 1 << 19;   // limit over all searches for one graph
constexpr int steps = 1 << 14;                // limit of one search
constexpr int steps_same_channels = 1 << 8;   // ... with equal channels
constexpr int steps_in_file_order = 1 << 10;  // ... with one channel in the order of the file
constexpr int perfect = -1;                   // marks the remaining steps when nothing better is possible

// Possible speeds of a channel, in GB/s, by the lowest compute capability: inside a node and
// between nodes.
constexpr std::array intra_speeds = {40.0F, 30.0F, 20.0F, 18.0F, 15.0F, 12.0F, 10.0F,
                                     9.0F,  7.0F,  6.0F,  5.0F,  4.0F,  3.0F};
constexpr std::array inter_speeds = {48.0F, 30.0F, 28.0F, 24.0F, 20.0F, 18.0F, 15.0F, 12.0F, 10.0F, 9.0F,
                                     7.0F,  6.0F,  5.0F,  4.0F,  3.0F,  2.4F,  1.2F,  0.24F, 0.12F};
constexpr std::array intra_speeds_90 = {60.0F, 50.0F, 40.0F, 30.0F, 24.0F, 20.0F, 15.0F, 12.0F, 11.0F, 6.0F, 3.0F};
constexpr std::array inter_speeds_90 = {48.0F, 45.0F, 42.0F, 40.0F, 30.0F, 24.0F, 22.0F, 20.0F, 17.5F,
                                        15.0F, 12.0F, 6.0F,  3.0F,  2.4F,  1.2F,  0.24F, 0.12F};
constexpr std::array intra_speeds_100 = {90.0F, 80.0F, 70.0F, 60.0F, 50.0F, 45.0F,
                                         40.0F, 30.0F, 24.0F, 20.0F, 19.0F, 18.0F};
constexpr std::array inter_speeds_100 = {96.0F, 86.0F, 80.0F, 48.0F, 45.1F, 42.0F, 40.0F, 30.0F, 24.0F, 22.0F,
                                         20.0F, 17.5F, 15.0F, 12.0F, 6.0F,  3.0F,  2.4F,  1.2F,  0.24F, 0.12F};

std::span<const float> speeds_of(int compute_capability, bool several_nodes) {
  if (compute_capability >= 100)
    return several_nodes ? std::span<const float>(inter_speeds_100) : std::span<const float>(intra_speeds_100);
  if (compute_capability >= 90)
    return several_nodes ? std::span<const float>(inter_speeds_90) : std::span<const float>(intra_speeds_90);
  return several_nodes ? std::span<const float>(inter_speeds) : std::span<const float>(intra_speeds);
}

NcclDistance one_farther(NcclDistance distance) { return static_cast<NcclDistance>(static_cast<int>(distance) + 1); }

// A graph during the search: channels one after another, GPUs and networks by their indices in the
// system's lists.
struct Candidate {
  NcclPattern pattern{};
  bool collnet = false;
  int cross_nic = 0;
  int fewest = 1;  // channels
  int most = 1;
  int channels = 0;
  float intra = 0.0F;  // speed of a channel
  float inter = 0.0F;
  float latency = 0.0F;
  NcclDistance type_intra{};
  NcclDistance type_inter{};
  bool same_channels = false;
  int hops = 0;
  std::vector<int> gpus;                          // [channel * GPUs + step]
  std::array<std::int64_t, 2 * nccl_most_channels> nets{};  // ids of the first and the last of each channel
};

// How the next GPUs are found.
enum class Order { searched, as_in_file, as_last_channel };

class Search {
 public:
  Search(NcclSystem& system, const NcclPaths& paths)
      : system_(system), paths_(paths), gpus_(static_cast<int>(system.gpus.size())), used_(system.gpus.size()) {
    set_limits();
  }

  Candidate find(NcclPattern pattern, bool collnet, int fewest, int most);

 private:
  NcclNode& node(int index) { return system_.nodes[index]; }
  NcclNode& net_at(int place) { return node(system_.nets[place]); }
  int gpu_node(int place) const { return system_.gpus[place]; }
  NcclLink& link_at(const std::pair<int, int>& step) { return node(step.first).links[step.second]; }
  int& gpu_of(Candidate& graph, int channel, int step) { return graph.gpus[channel * gpus_ + step]; }
  // Networks that share an id are one network to NCCL: the first.
  int place_of_net(std::int64_t id) {
    int place = 0;
    while (net_at(place).id != id) ++place;
    return place;
  }

  void set_limits();
  int walk(const NcclPath& path, int from, int most_steps, float speed);
  int counted_hops(const NcclPath& path, int from, int target);
  bool follow(int from, int target, float times);
  std::vector<int> next_gpus(int gpu, int toward_net);
  std::vector<int> nets_for(NcclDistance farthest, int gpu) const;
  bool may_return_by(int start_net, int net, int step);
  bool is_better() const;

  void place_channel();
  void try_gpu(int step, int back_to_net, int back_to_first, Order order, int from, int gpu);
  void at_gpu(int gpu, int step, int back_to_net, int back_to_first, Order order);
  void return_to_net(int gpu, int step, int back_to_first, Order order);
  void try_nvls(int gpu);
  void try_collnet_direct(int gpu);
  void start_from_net(int back_to_net, int back_to_first);
  void start_from_gpu(int back_to_first);

  std::pair<NcclDistance, NcclDistance> nearest_and_farthest(const std::vector<int>& targets) const;
  bool is_split() const;
  void double_channels(Candidate& graph, int compute_capability) const;
  void fall_back(Candidate& graph);

  NcclSystem& system_;
  const NcclPaths& paths_;
  int gpus_;
  std::vector<std::uint64_t> used_;  // [GPU]: a bit for each channel that contains it
  float widest_ = 0.0F;              // of any path
  float total_ = 0.0F;               // out of one GPU
  Candidate graph_;                  // being tried
  Candidate best_;
  int* left_ = nullptr;              // steps
};

void Search::set_limits() {
  if (!system_.several_nodes && gpus_ == 1) {
    widest_ = total_ = nccl_no_limit;
    return;
  }
  for (const int gpu : system_.gpus) {
    for (const int target : system_.several_nodes ? system_.nets : system_.gpus)
      if (const NcclPath& path = paths_.between(gpu, target); path.hops() > 0)
        widest_ = std::max(widest_, path.bandwidth);
    float nvlink = 0.0F;
    float pcie = 0.0F;
    for (const NcclLink& link : node(gpu).links) {
      if (link.type == NcclDistance::nvlink) nvlink += link.bandwidth;
      if (link.type == NcclDistance::one_switch) pcie = link.bandwidth;
    }
    total_ = std::max({total_, nvlink, pcie});
  }
}

// Takes `speed` from the links along the path, or gives it back where it is negative. Returns how
// many steps had enough.
int Search::walk(const NcclPath& path, int from, int most_steps, float speed) {
  const bool from_gpu = node(from).type == NcclNodeType::gpu;
  // Intel's root complexes cut traffic between GPUs into small packets.
  float pcie_speed = speed;
  for (const auto& step : path.links) {
    const NcclNode& next = node(link_at(step).to);
    if (next.type == NcclNodeType::cpu && path.type == NcclDistance::host_bridge && from_gpu &&
        next.architecture == CpuArchitecture::x86 && next.vendor == CpuVendor::intel)
      pcie_speed = speed * 6 / 5;
  }
  // Rounded to thousandths, lest rounding errors accumulate.
  const auto take = [](float& bandwidth, float amount) { bandwidth = std::round((bandwidth - amount) * 1000) / 1000; };
  for (int i = 0; i < most_steps; ++i) {
    const auto& step = path.links[i];
    NcclLink& link = link_at(step);
    const NcclNode& next = node(link.to);
    const float forth = link.type == NcclDistance::one_switch ? pcie_speed : speed;
    // Reads of GPUs before Ampere, and NVLink to POWER CPUs, load the reverse direction as well.
    float back = 0.0F;
    if (next.type == NcclNodeType::gpu && next.compute_capability < 80 && !from_gpu) back += forth / 8;
    if (next.type == NcclNodeType::cpu && next.architecture == CpuArchitecture::power &&
        link.type == NcclDistance::nvlink)
      back += forth;
    NcclLink* reverse = nullptr;
    if (back != 0.0F)
      for (NcclLink& one : node(link.to).links)
        if (one.to == step.first && one.type == link.type) {
          reverse = &one;
          break;
        }
    if (link.bandwidth < forth || (reverse != nullptr && reverse->bandwidth < back)) return i;
    take(link.bandwidth, forth);
    if (reverse != nullptr) take(reverse->bandwidth, back);
  }
  return most_steps;
}

// To NCCL a GPU is two nodes, the device and the rank's view of it: a path is longer by one at each
// end that is a GPU, and by two where it passes a GPU's memory. This only affects how NCCL rounds
// fractions of hops.
int Search::counted_hops(const NcclPath& path, int from, int target) {
  if (path.links.empty()) return 0;
  const auto is_gpu = [&](int end) { return node(end).type == NcclNodeType::gpu ? 1 : 0; };
  int passed = 0;
  if (path.type == NcclDistance::other_gpu)
    for (const auto& step : path.links) passed += step.first != from ? is_gpu(step.first) : 0;
  return path.hops() + is_gpu(from) + is_gpu(target) + 2 * passed;
}

// Whether the graph's speed, multiplied by `times`, is available from node `from` (-1: from
// nowhere) to `target`; if so, it is taken. Negative `times` give it back.
bool Search::follow(int from, int target, float times) {
  if (from == -1) return true;
  const auto is_inside = [&](int end) {
    return node(end).type == NcclNodeType::gpu || node(end).type == NcclNodeType::nvswitch;
  };
  const bool inside = is_inside(from) && is_inside(target);
  const NcclPath& path = paths_.between(from, target);
  const NcclDistance farthest = inside ? graph_.type_intra : graph_.type_inter;
  if (path.type >= NcclDistance::unreachable) return false;
  if (times == 1 && path.type > farthest) return false;
  const bool tree = graph_.pattern == NcclPattern::balanced_tree || graph_.pattern == NcclPattern::tree ||
                    graph_.pattern == NcclPattern::split_tree;
  if (times == 1 && tree && paths_.between(target, from).type > farthest) return false;
  const float speed = (inside ? graph_.intra : graph_.inter) * times;
  if (const int walked = walk(path, from, path.hops(), speed); walked < path.hops()) {
    walk(path, from, walked, -speed);
    return false;
  }
  graph_.hops =
      static_cast<int>(static_cast<float>(graph_.hops) + times * static_cast<float>(counted_hops(path, from, target)));
  return true;
}

// GPUs that may follow `gpu`, the most promising first. `toward_net`: 1 where the next one returns
// to the network, -1 where a later one does, 0 where none will.
std::vector<int> Search::next_gpus(int gpu, int toward_net) {
  const std::uint64_t channel = std::uint64_t{1} << graph_.channels;
  struct Score {
    // The most important criterion first; NCCL compares whole GB/s.
    int inter_bandwidth = 0;
    int inter_pcie = 0;
    int inter_hops = 0;
    int intra_bandwidth = 0;
    int intra_hops = 0;
    int distance = 0;  // in the list
    int gpu = 0;
    auto key() const {
      return std::tuple(-inter_bandwidth, -inter_pcie, inter_hops, -intra_bandwidth, intra_hops, distance);
    }
  };
  const auto pcie_of = [&](int place) {
    for (const NcclLink& up : node(gpu_node(place)).links) {
      if (up.type != NcclDistance::one_switch) continue;
      for (const NcclLink& down : node(up.to).links)
        if (down.to == gpu_node(place)) return static_cast<int>(std::min(up.bandwidth, down.bandwidth));
    }
    return -1;
  };
  std::vector<Score> scores;
  for (int i = 1; i < gpus_; ++i) {
    const int other = (gpu + i) % gpus_;
    const NcclPath& path = paths_.between(gpu_node(gpu), gpu_node(other));
    if (path.hops() == 0 || (used_[other] & channel) != 0) continue;
    Score score{
        .intra_bandwidth = static_cast<int>(path.bandwidth), .intra_hops = path.hops(), .distance = i, .gpu = other};
    if (toward_net != 0) {
      const int start = system_.nets[place_of_net(graph_.nets[graph_.channels * 2])];
      const NcclPath& from_net = paths_.between(start, gpu_node(other));
      score.inter_hops = from_net.hops();
      score.inter_pcie = pcie_of(other);
      score.inter_bandwidth = static_cast<int>(from_net.bandwidth);
    }
    scores.push_back(score);
  }
  std::sort(scores.begin(), scores.end(), [](const Score& a, const Score& b) { return a.key() < b.key(); });
  const bool alike = std::all_of(scores.begin(), scores.end(), [&](const Score& one) {
    return one.intra_bandwidth == scores.front().intra_bandwidth && one.intra_hops == scores.front().intra_hops;
  });
  std::vector<int> next;
  for (const Score& score : scores) next.push_back(score.gpu);
  // The GPUs nearest to the network are reserved for later.
  if (toward_net == -1 && alike) std::reverse(next.begin(), next.end());
  if (system_.nvswitches.empty()) return next;

  // NVSwitches prefer few peers: only neighbours.
  const int before = (gpu - 1 + gpus_) % gpus_;
  const int after = (gpu + 1) % gpus_;
  std::vector<int> first;
  if (graph_.pattern == NcclPattern::ring) first = {after, before};
  else if (graph_.pattern == NcclPattern::balanced_tree || graph_.pattern == NcclPattern::split_tree)
    first = {before, after};
  else first = {after};
  if (after == before) first.resize(1);
  std::vector<int> neighbours;
  for (const int one : first)
    if (std::find(next.begin(), next.end(), one) != next.end()) neighbours.insert(neighbours.begin(), one);
  return neighbours;
}

// Networks to try: first the GPU's own (with -1: any GPU's), then others up to a distance.
std::vector<int> Search::nets_for(NcclDistance farthest, int gpu) const {
  std::vector<int> nets;
  const auto add = [&](int net) {
    if (std::find(nets.begin(), nets.end(), net) == nets.end()) nets.push_back(net);
  };
  for (int g = 0; g < gpus_; ++g)
    if (gpu == -1 || gpu == g)
      for (const int net : paths_.nets_of[g]) add(net);
  for (int type = 0; type <= static_cast<int>(farthest); ++type)
    for (int g = 0; g < gpus_; ++g) {
      if (gpu != -1 && gpu != g) continue;
      for (std::size_t n = 0; n < system_.nets.size() && n < nccl_most_channels; ++n)
        if (paths_.between(gpu_node(g), system_.nets[n]).type == static_cast<NcclDistance>(type))
          add(static_cast<int>(n));
    }
  return nets;
}

bool Search::may_return_by(int start_net, int net_place, int step) {
  const NcclNode& start = net_at(start_net);
  const NcclNode& net = net_at(net_place);
  const auto channel = static_cast<std::size_t>(graph_.channels);
  if (net.plane && start.plane && net.plane != start.plane) return false;
  if (graph_.pattern == NcclPattern::tree && net.id != start.id) return false;
  if (graph_.pattern == NcclPattern::ring && graph_.cross_nic == 2) {
    if (channel % 2 == 1 && net.id != graph_.nets[(channel - 1) * 2]) return false;
  } else if (graph_.cross_nic == 0) {
    if (net.rail && start.rail ? net.rail != start.rail : net.asic != start.asic || net.port != start.port)
      return false;
  }
  return graph_.pattern != NcclPattern::balanced_tree || step == 0 || net.id == graph_.nets[channel * 2 + 1];
}

bool Search::is_better() const {
  if (graph_.channels < graph_.fewest) return false;
  const auto times = [](int channels, float speed) { return static_cast<float>(channels) * speed; };
  if (graph_.pattern == NcclPattern::nvls)  // its channels are GPUs that pull from the switch
    return (graph_.channels > best_.channels && graph_.channels <= gpus_) ||
           times(graph_.channels, graph_.inter) > times(best_.channels, best_.inter);
  const float now = times(graph_.channels, graph_.intra);
  const float before = times(best_.channels, best_.intra);
  if (now != before) return now > before;
  return graph_.pattern == best_.pattern && graph_.cross_nic == best_.cross_nic && graph_.hops < best_.hops;
}

// The next channel.
void Search::place_channel() {
  int back_to_net = -1;
  int back_to_first = -1;
  const bool ring = graph_.pattern == NcclPattern::ring;
  if (system_.several_nodes)
    back_to_net = ring ? gpus_ - 1 : graph_.pattern == NcclPattern::split_tree ? 1 : 0;
  else if (ring)
    back_to_first = gpus_ - 1;
  if (system_.several_nodes) start_from_net(back_to_net, back_to_first);
  else start_from_gpu(back_to_first);
}

void Search::try_gpu(int step, int back_to_net, int back_to_first, Order order, int from, int gpu) {
  if (!follow(from, gpu_node(gpu), 1)) return;
  const std::uint64_t channel = std::uint64_t{1} << graph_.channels;
  used_[gpu] ^= channel;
  at_gpu(gpu, step, back_to_net, back_to_first, order);
  used_[gpu] ^= channel;
  follow(from, gpu_node(gpu), -1);
}

void Search::at_gpu(int gpu, int step, int back_to_net, int back_to_first, Order order) {
  if (*left_ <= 0) return;
  --*left_;
  if (step == gpus_) {
    ++graph_.channels;
    if (is_better()) {
      best_ = graph_;
      if (graph_.channels == graph_.most) *left_ = perfect;
    }
    if (graph_.channels < graph_.most) place_channel();
    --graph_.channels;
    return;
  }
  gpu_of(graph_, graph_.channels, step) = gpu;
  if (step == back_to_net) {
    return_to_net(gpu, step, back_to_first, order);
  } else if (graph_.pattern == NcclPattern::nvls) {
    try_nvls(gpu);
  } else if (graph_.pattern == NcclPattern::collnet_direct) {
    try_collnet_direct(gpu);
  } else if (step < gpus_ - 1) {
    std::vector<int> next;
    if (order == Order::as_in_file) next = {step + 1};
    else if (order == Order::as_last_channel) next = {gpu_of(graph_, graph_.channels - 1, step + 1)};
    else next = next_gpus(gpu, back_to_net == -1 ? 0 : back_to_net == step + 1 ? 1 : -1);
    for (const int one : next) try_gpu(step + 1, back_to_net, back_to_first, order, gpu_node(gpu), one);
  } else if (step == back_to_first) {
    const int first = gpu_of(graph_, graph_.channels, 0);
    if (follow(gpu_node(gpu), gpu_node(first), 1)) {
      at_gpu(first, step + 1, back_to_net, -1, order);
      follow(gpu_node(gpu), gpu_node(first), -1);
    }
  } else {
    at_gpu(gpu, gpus_, -1, -1, order);
  }
}

void Search::return_to_net(int gpu, int step, int back_to_first, Order order) {
  const auto channel = static_cast<std::size_t>(graph_.channels);
  const int start = place_of_net(graph_.nets[channel * 2]);
  for (const int net : nets_for(graph_.type_inter, gpu)) {
    if (!may_return_by(start, net, step)) continue;
    // In a balanced tree the first two GPUs share the bandwidth out of the node.
    const float whole = graph_.inter;
    const bool balanced = graph_.pattern == NcclPattern::balanced_tree;
    const int target = system_.nets[net];
    if (balanced) graph_.inter /= 2;
    const bool enough = follow(gpu_node(gpu), target, 1);
    graph_.inter = whole;
    if (!enough) continue;
    graph_.nets[channel * 2 + 1] = net_at(net).id;
    at_gpu(gpu, step, balanced && step == 0 ? 1 : -1, back_to_first, order);
    if (balanced) graph_.inter /= 2;
    follow(gpu_node(gpu), target, -1);
    graph_.inter = whole;
  }
}

// Every GPU sends to the switch and receives from it; the head does so twice.
void Search::try_nvls(int gpu) {
  const int nvswitch = system_.nvswitches.front();
  const auto times = [&](int one) { return one == gpu ? 2.0F : 1.0F; };
  int received = 0;
  while (received < gpus_ && follow(nvswitch, gpu_node(received), times(received))) ++received;
  if (received == gpus_) {
    int sent = 0;
    while (sent < gpus_ && follow(gpu_node(sent), nvswitch, times(sent))) ++sent;
    if (sent == gpus_) at_gpu(gpu, gpus_, -1, -1, Order::searched);
    while (sent-- > 0) follow(gpu_node(sent), nvswitch, -times(sent));
  }
  while (received-- > 0) follow(nvswitch, gpu_node(received), -times(received));
}

// The head exchanges data with all others.
void Search::try_collnet_direct(int gpu) {
  const float share = static_cast<float>(1.0 / static_cast<double>(static_cast<float>(gpus_ - 1)));
  int sent = 0;
  while (sent < gpus_ && follow(gpu_node(gpu), gpu_node(sent), share)) ++sent;
  if (sent == gpus_) {
    int received = 0;
    while (received < gpus_ && follow(gpu_node(received), gpu_node(gpu), share)) ++received;
    if (received == gpus_) {
      int step = 1;
      for (int other = 0; other < gpus_; ++other)
        if (other != gpu) gpu_of(graph_, graph_.channels, step++) = other;
      at_gpu(gpu, gpus_, -1, -1, Order::searched);
    }
    while (received-- > 0) follow(gpu_node(received), gpu_node(gpu), -share);
  }
  while (sent-- > 0) follow(gpu_node(gpu), gpu_node(sent), -share);
}

void Search::start_from_net(int back_to_net, int back_to_first) {
  const auto speed = static_cast<int>(graph_.inter);  // whole GB/s, as NCCL counts here
  const bool heads = graph_.pattern == NcclPattern::nvls || graph_.pattern == NcclPattern::collnet_direct;
  const std::vector<int> nets = nets_for(graph_.type_inter, -1);
  const auto channel = static_cast<std::size_t>(graph_.channels);
  bool found = false;
  for (std::size_t i = 0; i < nets.size() && !(heads && found); ++i) {
    const int place = nets[(channel + i) % nets.size()];
    const int net_node = system_.nets[place];
    const NcclNode& net = net_at(place);
    if (graph_.collnet && !net.collectives) continue;
    if (net.bandwidth < static_cast<float>(speed)) continue;
    if (graph_.pattern == NcclPattern::ring && graph_.cross_nic == 2 && channel % 2 == 1 &&
        net.id != graph_.nets[(channel - 1) * 2 + 1])
      continue;
    graph_.nets[channel * 2] = net.id;
    graph_.latency = net.latency;
    // Ports of one adapter are one network.
    const auto spend = [&](int amount) {
      for (const int other : system_.nets)
        if (node(other).asic == net.asic && node(other).port == net.port)
          node(other).bandwidth -= static_cast<float>(amount);
    };
    spend(speed);
    const std::optional<int> near = paths_.gpu_of[place];
    if (heads) {
      bool taken = !near || graph_.channels >= static_cast<int>(nets.size());
      for (int c = 0; c < graph_.channels; ++c) taken = taken || gpu_of(graph_, c, 0) == near;
      if (!taken) {
        try_gpu(0, back_to_net, back_to_first, Order::searched, net_node, *near);
        found = true;
      }
    } else if (graph_.channels > 0 && graph_.same_channels) {
      try_gpu(0, back_to_net, back_to_first, Order::as_last_channel, net_node, gpu_of(graph_, graph_.channels - 1, 0));
    } else {
      if (graph_.channels == 0 && system_.nvswitches.empty()) {
        // A starting point that costs no steps.
        int few = steps_in_file_order;
        int* const before = std::exchange(left_, &few);
        try_gpu(0, back_to_net, back_to_first, Order::as_in_file, net_node, 0);
        left_ = before;
        if (few == perfect) *left_ = perfect;
      }
      if (near) try_gpu(0, back_to_net, back_to_first, Order::searched, net_node, *near);
      for (const int gpu : nccl_nearest(paths_, net_node, system_.gpus))
        if (gpu != near) try_gpu(0, back_to_net, back_to_first, Order::searched, net_node, gpu);
    }
    spend(-speed);
  }
}

void Search::start_from_gpu(int back_to_first) {
  if (graph_.pattern == NcclPattern::nvls) {
    try_gpu(0, -1, back_to_first, Order::searched, -1, graph_.channels);
    return;
  }
  if (graph_.channels == 0) try_gpu(0, -1, back_to_first, Order::as_in_file, -1, 0);
  else try_gpu(0, -1, back_to_first, Order::as_last_channel, -1, gpu_of(graph_, graph_.channels - 1, 0));
  if (graph_.same_channels && graph_.channels > 0) return;
  for (int gpu = 0; gpu < gpus_; ++gpu) try_gpu(0, -1, back_to_first, Order::searched, -1, gpu);
}

std::pair<NcclDistance, NcclDistance> Search::nearest_and_farthest(const std::vector<int>& targets) const {
  NcclDistance near = NcclDistance::sockets;
  NcclDistance far = NcclDistance::local;
  for (const int gpu : system_.gpus)
    for (const int target : targets) {
      if (gpu == target) continue;
      near = std::min(near, paths_.between(gpu, target).type);
      far = std::max(far, paths_.between(gpu, target).type);
    }
  return {near, far};
}

// Two groups of GPUs, each joined by NVLink inside, without NVLink between them.
bool Search::is_split() const {
  std::vector<int> domain(static_cast<std::size_t>(gpus_));
  for (int g = 0; g < gpus_; ++g) domain[g] = g;
  for (int g = 0; g < gpus_; ++g)
    for (int other = g + 1; other < gpus_; ++other)
      if (paths_.between(gpu_node(g), gpu_node(other)).type == NcclDistance::nvlink)
        domain[other] = domain[g];
  int large = 0;
  for (int g = 0; g < gpus_; ++g) large += std::count(domain.begin(), domain.end(), g) > 1;
  return large == 2;
}

// Fast channels are halved: a channel is a block of threads, and more of them reach more bandwidth.
void Search::double_channels(Candidate& graph, int compute_capability) const {
  if (graph.channels == 0 || graph.pattern == NcclPattern::nvls || graph.intra < 25.0F) return;
  if (compute_capability > 80 && graph.intra < 50.0F && graph.channels > 4) return;
  const int doubled = std::min(graph.channels * 2, graph.most);
  for (int c = graph.channels; c < doubled; ++c) {
    const int from = c - graph.channels;
    std::copy_n(graph.gpus.begin() + from * gpus_, gpus_, graph.gpus.begin() + c * gpus_);
    std::copy_n(graph.nets.begin() + from * 2, 2, graph.nets.begin() + c * 2);
  }
  const auto times = static_cast<float>((doubled + graph.channels - 1) / graph.channels);
  graph.intra /= times;
  graph.inter /= times;
  graph.channels = doubled;
}

// Without a channel at any speed: one slow channel in the order of the file.
void Search::fall_back(Candidate& graph) {
  for (int g = 0; g < gpus_; ++g) gpu_of(graph, 0, g) = g;
  graph.intra = 0.1F;
  graph.type_intra = NcclDistance::sockets;
  const auto first_net = [&](int gpu) {
    const std::vector<int>& nets = paths_.nets_of[gpu];
    return nets.empty() ? std::int64_t{-1} : net_at(nets.front()).id;
  };
  graph.nets[0] = system_.nets.empty() ? -1 : first_net(0);
  graph.nets[1] = system_.nets.empty() ? -1 : first_net(gpus_ - 1);
  const bool any = graph.nets[0] != -1 && graph.nets[1] != -1;
  graph.inter = any ? 0.1F : 0.0F;
  graph.type_inter = any ? NcclDistance::sockets : NcclDistance::unreachable;
  graph.channels = 1;
}

Candidate Search::find(NcclPattern pattern, bool collnet, int fewest, int most) {
  int capability = node(gpu_node(0)).compute_capability;
  for (const int gpu : system_.gpus) capability = std::min(capability, node(gpu).compute_capability);
  const bool inter = system_.several_nodes;
  best_ = Candidate{.pattern = pattern, .collnet = collnet, .fewest = fewest, .most = most, .gpus = {}};
  best_.gpus.assign(static_cast<std::size_t>(nccl_most_channels * gpus_), 0);
  const bool may_cross =
      system_.nets.size() > 1 &&
      (pattern == NcclPattern::ring || pattern == NcclPattern::balanced_tree || pattern == NcclPattern::split_tree);
  NcclDistance nearest_intra = NcclDistance::local;
  NcclDistance farthest_intra = NcclDistance::sockets;
  NcclDistance nearest_inter = NcclDistance::one_switch;
  NcclDistance farthest_inter = NcclDistance::sockets;
  if (gpus_ > 1) std::tie(nearest_intra, farthest_intra) = nearest_and_farthest(system_.gpus);
  if (inter) {
    std::tie(nearest_inter, farthest_inter) = nearest_and_farthest(system_.nets);
    farthest_intra = farthest_inter;
  }
  if (capability < 90) farthest_inter = NcclDistance::sockets;  // balanced trees may have to return that far
  best_.type_intra = nearest_intra;
  best_.type_inter = nearest_inter;
  const bool same_first = pattern != NcclPattern::nvls;
  best_.same_channels = same_first;
  const NcclNode& cpu = node(system_.cpus.front());
  const bool amd = cpu.architecture == CpuArchitecture::x86 && cpu.vendor == CpuVendor::amd;

  if (pattern == NcclPattern::nvls && (system_.nvswitches.empty() || capability < 90)) return best_;
  if (pattern == NcclPattern::nvls) best_.most = std::min(most_nvls_heads, gpus_);
  if (pattern == NcclPattern::collnet_direct) best_.most = std::min(most_direct_heads, gpus_);
  if (gpus_ == 1 && pattern != NcclPattern::ring) best_.pattern = NcclPattern::tree;
  if (!inter && best_.pattern == NcclPattern::nvls) best_.fewest = best_.most;  // pull evenly from all GPUs
  if (best_.pattern == NcclPattern::ring && is_split() && best_.most >= 2 && best_.fewest == 1)
    best_.fewest = 2;  // trees need two there

  const std::span<const float> speeds = speeds_of(capability, inter);
  const std::size_t slowest = speeds.size() - 1;
  float total = total_;
  if (gpus_ > 1 && best_.pattern != NcclPattern::ring)
    total = static_cast<float>(static_cast<double>(total) * (gpus_ * 1.0 / (gpus_ - 1)));
  std::size_t speed = 0;
  while (speed < slowest && (speeds[speed] > widest_ || speeds[speed] * static_cast<float>(best_.fewest) > total))
    ++speed;
  graph_ = best_;
  graph_.intra = graph_.inter = speeds[speed];
  std::int64_t left_in_all = all_steps;

  // What to relax next while nothing is good enough: different channels, a plain tree, farther
  // GPUs, farther NICs, different NICs for the two directions, slower channels.
  const auto relax = [&](int left) {
    if (graph_.same_channels && !(amd && graph_.type_intra == NcclDistance::sockets)) {
      graph_.same_channels = false;
      return true;
    }
    graph_.same_channels = same_first;
    left_in_all += left;
    if (left_in_all < 0 && best_.channels > 0) return false;
    if (capability >= 90 && graph_.pattern == NcclPattern::balanced_tree) {
      graph_.pattern = NcclPattern::tree;
      return true;
    }
    graph_.pattern = best_.pattern;
    if (graph_.type_intra < (inter ? graph_.type_inter : farthest_intra) &&
        (best_.channels == 0 || graph_.type_intra < best_.type_intra)) {
      graph_.type_intra = one_farther(graph_.type_intra);
      if (graph_.type_intra < NcclDistance::unreachable) return true;
    }
    graph_.type_intra = nearest_intra;
    if (inter && graph_.type_inter < farthest_inter &&
        (best_.channels == 0 || graph_.type_inter < best_.type_inter || graph_.type_inter < NcclDistance::other_gpu)) {
      graph_.type_inter = one_farther(graph_.type_inter);
      if (graph_.type_inter < NcclDistance::unreachable) return true;
    }
    graph_.type_inter = nearest_inter;
    if (may_cross && graph_.cross_nic == 0 &&
        (best_.pattern == NcclPattern::ring || best_.pattern == NcclPattern::balanced_tree)) {
      graph_.cross_nic = 2;
      return true;
    }
    graph_.cross_nic = 0;
    if (speed < slowest && (best_.channels == 0 || static_cast<double>(speeds[speed + 1] / best_.inter) > .49)) {
      graph_.intra = graph_.inter = speeds[++speed];
      return true;
    }
    return false;
  };
  // With channels found, whether they could be faster: whole rings, heads to the network, trees
  // inside the node.
  const auto raise = [&] {
    if (speed == 0) return false;
    if (best_.pattern == NcclPattern::ring) {
      graph_.intra = graph_.inter = speeds[--speed];
    } else if (best_.pattern == NcclPattern::nvls && graph_.inter == best_.inter && graph_.inter < graph_.intra * 2) {
      graph_.fewest = graph_.most = best_.channels;
      graph_.inter = speeds[--speed];
    } else if (graph_.intra == best_.intra && graph_.intra < graph_.inter * 2) {
      graph_.intra = speeds[--speed];
    } else {
      return false;
    }
    return true;
  };
  for (bool first_pass = true;;) {
    int left = graph_.same_channels ? steps_same_channels : steps;
    graph_.channels = 0;
    left_in_all -= left;
    left_ = &left;
    place_channel();
    const bool good = left == perfect || static_cast<float>(best_.channels) * best_.inter >= total_;
    if (first_pass) {
      if (!good && relax(left)) continue;
      first_pass = false;
      left = perfect;
      double_channels(best_, capability);
      graph_ = best_;
      speed = 0;
      while (speed < slowest && speeds[speed] > best_.inter) ++speed;
      graph_.intra = graph_.inter = speeds[speed];
      graph_.fewest = best_.channels;
    }
    if (left == 0 || !raise()) break;
  }
  if (best_.channels == 0 && !collnet && best_.pattern != NcclPattern::nvls) fall_back(best_);
  return best_;
}

}  // namespace

std::vector<NcclGraph> nccl_graphs(NcclSystem system, const NcclSearchOptions& options) {
  PARPLAN_ASSERT(!system.several_nodes || !system.nets.empty(), "several nodes without a network");
  const NcclPaths paths = nccl_paths(system);
  Search search(system, paths);
  const auto finished = [&](NcclAlgorithm algorithm, const Candidate& found) {
    NcclGraph graph{.algorithm = algorithm,
                    .pattern = found.pattern,
                    .cross_nic = found.cross_nic,
                    .speed_intra = found.intra,
                    .speed_inter = found.inter,
                    .latency_inter = found.latency,
                    .type_intra = found.type_intra,
                    .type_inter = found.type_inter,
                    .same_channels = found.same_channels,
                    .channels = {}};
    for (int c = 0; c < found.channels; ++c) {
      NcclChannel& channel = graph.channels.emplace_back();
      const int gpus = algorithm == NcclAlgorithm::nvls ? 1 : static_cast<int>(system.gpus.size());
      for (int step = 0; step < gpus; ++step) {
        const int place = found.gpus[static_cast<std::size_t>(c) * system.gpus.size() + static_cast<std::size_t>(step)];
        channel.gpus.push_back(system.nodes[system.gpus[place]].dev);
      }
      for (std::size_t end = 0; system.several_nodes && end < 2; ++end)
        channel.nets.push_back(static_cast<int>(found.nets[static_cast<std::size_t>(c) * 2 + end]));
    }
    return graph;
  };
  const Candidate ring = search.find(NcclPattern::ring, false, 1, nccl_most_channels / 2);
  const Candidate tree = search.find(NcclPattern::balanced_tree, false, ring.channels, ring.channels);
  Candidate chain{.pattern = NcclPattern::tree, .gpus = {}};
  Candidate direct{.pattern = NcclPattern::collnet_direct, .gpus = {}};
  Candidate nvls{.pattern = NcclPattern::nvls, .gpus = {}};
  if (options.collnet) {
    chain = search.find(NcclPattern::tree, true, ring.channels, ring.channels);
    direct = search.find(NcclPattern::collnet_direct, true, 1, nccl_most_channels);
  }
  if (options.nvls && system.gpus.size() > 1) nvls = search.find(NcclPattern::nvls, false, 1, nccl_most_channels);
  return {finished(NcclAlgorithm::ring, ring), finished(NcclAlgorithm::tree, tree),
          finished(NcclAlgorithm::collnet_direct, direct), finished(NcclAlgorithm::collnet_chain, chain),
          finished(NcclAlgorithm::nvls, nvls)};
}

}  // namespace parplan
