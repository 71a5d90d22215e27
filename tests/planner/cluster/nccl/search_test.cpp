#include "planner/cluster/nccl/search.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <span>

#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/cluster/find_cluster.h"
#include "planner/cluster/nccl/import.h"
#include "planner/cluster/nccl/paths.h"
#include "planner/cluster/node_layout.h"

using namespace parplan;

namespace {

const std::string source = PARPLAN_SOURCE_DIR;
const ClusterCatalog catalog{.devices_folder = source + "/configs/devices",
                             .clusters_folder = source + "/configs/clusters"};
const std::string captured = source + "/tests/data/topologies/";
const std::string recorded = source + "/tests/data/nccl/";

NcclTopology topology_at(const std::string& path) { return read_nccl_topology(read_file(path), path); }
std::vector<NcclGraph> graphs_at(const std::string& path) { return read_nccl_graphs(read_file(path), path); }

const NcclGraph& graph_of(const std::vector<NcclGraph>& graphs, NcclAlgorithm algorithm) {
  return *std::find_if(graphs.begin(), graphs.end(),
                       [&](const NcclGraph& graph) { return graph.algorithm == algorithm; });
}

std::string text_of(const NcclGraph& graph) {
  std::string text = fmt::format(
      "{}: pattern {}, crossnic {}, {} x {} inside, {} outside, latency {}, {}/{}, same {}\n", name(graph.algorithm),
      static_cast<int>(graph.pattern), graph.cross_nic, graph.channels.size(), graph.speed_intra, graph.speed_inter,
      graph.latency_inter, name(graph.type_intra), name(graph.type_inter), graph.same_channels);
  for (const NcclChannel& channel : graph.channels) {
    for (const int gpu : channel.gpus) text += fmt::format(" {}", gpu);
    for (const int net : channel.nets) text += fmt::format(" net {}", net);
    text += "\n";
  }
  return text;
}

void check_equal(const std::vector<NcclGraph>& found, const std::vector<NcclGraph>& expected) {
  REQUIRE(found.size() == expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    CHECK(found[i] == expected[i]);
    CHECK(text_of(found[i]) == text_of(expected[i]));
  }
}

// The topologies of tests/data/nccl, and of tests/data/topologies where NCCL's graphs were
// recorded.
std::vector<std::string> recorded_names() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(recorded)) {
    const std::string file = entry.path().filename().string();
    if (const auto at = file.find("-one-node-graph.xml"); at != std::string::npos) names.insert(file.substr(0, at));
  }
  return {names.begin(), names.end()};
}

NcclTopology recorded_topology(const std::string& name) {
  const std::string path = recorded + name + "-topo.xml";
  return topology_at(std::filesystem::exists(path) ? path : captured + "nccl-" + name + "-topo.xml");
}

NodeKind nvswitch_box(const char* kind, int devices, DeviceKind& device) {
  device = find_device(kind, catalog);
  return build_node(
      {.name = "box", .devices = devices, .intra = Intra::nvswitch, .bandwidth = {}, .latency = {}, .nics = {}},
      device);
}

}  // namespace

TEST_CASE("NCCL's search on an HGX H200 gives the graphs that NCCL 2.27.3 captured there, channel by channel") {
  const NcclSystem system = nccl_system(topology_at(captured + "nccl-hgx-h200-8gpu-topo.xml"));
  check_equal(nccl_graphs(system), graphs_at(captured + "nccl-hgx-h200-8gpu-graph.xml"));
}

TEST_CASE("NCCL's search gives what NCCL 2.30.7 finds, on every kind of machine, inside one node and for several") {
  const std::vector<std::string> names = recorded_names();
  CHECK(names.size() == 13);
  int compared = 0;
  for (const std::string& name : names)
    for (const bool several : {false, true}) {
      const std::string file = recorded + name + (several ? "-several-nodes-graph.xml" : "-one-node-graph.xml");
      if (!std::filesystem::exists(file)) continue;
      CAPTURE(file);
      NcclSystem system = nccl_system(recorded_topology(name));
      system.several_nodes = several;
      check_equal(nccl_graphs(system, {.collnet = true, .nvls = true}), graphs_at(file));
      ++compared;
    }
  CHECK(compared == 23);
}

TEST_CASE("the graphs that Azure ships for NCv4 are no outcome of NCCL's search but given to it") {
  // NCCL searches for trees with as many channels as it found rings.
  for (const std::string& name : recorded_names()) {
    CAPTURE(name);
    const std::vector<NcclGraph> graphs = nccl_graphs(nccl_system(recorded_topology(name)));
    CHECK(graph_of(graphs, NcclAlgorithm::tree).channels.size() ==
          graph_of(graphs, NcclAlgorithm::ring).channels.size());
  }
  const std::vector<NcclGraph> azure = graphs_at(captured + "nccl-azure-ncv4-graph.xml");
  REQUIRE(azure.size() == 3);
  const NcclGraph& ring = graph_of(azure, NcclAlgorithm::ring);
  const NcclGraph& tree = graph_of(azure, NcclAlgorithm::tree);
  CHECK(text_of(ring) ==
        "ring: pattern 4, crossnic 0, 2 x 12 inside, 12 outside, latency 0, SYS/PIX, same false\n 0 1 2 3\n 0 3 2 1\n");
  CHECK(text_of(tree) ==
        "tree: pattern 1, crossnic 0, 4 x 12 inside, 12 outside, latency 0, SYS/PIX, same false\n 0 1 2 3\n 1 0 3 2\n "
        "3 2 1 0\n 2 3 0 1\n");
  CHECK(graph_of(azure, NcclAlgorithm::collnet_chain).channels == tree.channels);
  // Its topology cannot hold two rings either: it states no PCIe speed, for which NCCL assumes 12
  // GB/s.
  const std::vector<NcclGraph> found = nccl_graphs(nccl_system(topology_at(captured + "nccl-azure-ncv4-topo.xml")));
  CHECK(text_of(graph_of(found, NcclAlgorithm::ring)) ==
        "ring: pattern 4, crossnic 0, 1 x 12 inside, 12 outside, latency 0, SYS/PIX, same true\n 0 1 2 3\n");
}

TEST_CASE("boxes of NVSwitch have the channels that divide their NVLinks best") {
  struct Row {
    const char* device;
    std::size_t channels;
    float speed;
  };
  // 12 x 20 = 6 channels of 40, 18 x 20.6 = 6 of 60, 18 x 40.1 = 8 of 90; then twice as many at
  // half the speed.
  for (const Row& row : {Row{"a100-sxm4-80gb", 12, 20.0F}, Row{"h100-sxm-80gb", 12, 30.0F},
                         Row{"h200-sxm-141gb", 12, 30.0F}, Row{"b200-sxm-180gb", 16, 45.0F}})
    for (const int devices : {4, 8, 16}) {
      CAPTURE(row.device);
      CAPTURE(devices);
      DeviceKind device;
      const NodeKind node = nvswitch_box(row.device, devices, device);
      const std::vector<NcclGraph> graphs = nccl_graphs(nccl_system(node, device));
      for (const NcclAlgorithm algorithm : {NcclAlgorithm::ring, NcclAlgorithm::tree}) {
        // Trees of few GPUs are faster: one GPU of four does not send.
        if (algorithm == NcclAlgorithm::tree && devices < 8) continue;
        const NcclGraph& graph = graph_of(graphs, algorithm);
        CHECK(graph.channels.size() == row.channels);
        CHECK(graph.speed_intra == row.speed);
        CHECK(graph.type_intra == NcclDistance::nvlink);
      }
      const double links = device.nvlinks * device.nvlink_per_link_reached.value / 1e9;
      CHECK(graph_of(graphs, NcclAlgorithm::ring).bandwidth_intra() <= links);
      CHECK(graph_of(graphs, NcclAlgorithm::ring).bandwidth_intra() > 0.95 * links);
    }
}

TEST_CASE("NVLS has a head for each GPU, and only from Hopper on") {
  DeviceKind device;
  const NodeKind hopper = nvswitch_box("h100-sxm-80gb", 8, device);
  const NcclGraph nvls = nccl_graphs(nccl_system(hopper, device)).back();
  REQUIRE(nvls.channels.size() == 8);
  for (int gpu = 0; gpu < 8; ++gpu) CHECK(nvls.channels[gpu].gpus == std::vector<int>{gpu});
  // Every GPU sends for eight heads, and twice for its own: nine times the speed over 370.8 GB/s.
  CHECK(nvls.speed_intra == 40.0F);
  CHECK(nccl_graphs(nccl_system(hopper, device), {.collnet = false, .nvls = false}).back().channels.empty());
  const NodeKind ampere = nvswitch_box("a100-sxm4-80gb", 8, device);
  CHECK(nccl_graphs(nccl_system(ampere, device)).back().channels.empty());
}

TEST_CASE("rings pass each GPU once and fit on the links") {
  for (const std::string& name : recorded_names())
    for (const bool several : {false, true}) {
      CAPTURE(name);
      NcclSystem system = nccl_system(recorded_topology(name));
      if (several && (system.nets.empty() || name.starts_with("hgx") || name.starts_with("azure"))) continue;
      system.several_nodes = several;
      const NcclPaths paths = nccl_paths(system);
      const NcclGraph ring = nccl_graphs(system).front();
      std::map<int, int> node_of;
      for (const int gpu : system.gpus) node_of[system.nodes[gpu].dev] = gpu;
      std::map<std::pair<int, int>, double> load;
      const auto add = [&](int from, int to, double speed) {
        for (const auto& step : paths.between(from, to).links) load[step] += speed;
      };
      const auto speed_intra = static_cast<double>(ring.speed_intra);
      for (const NcclChannel& channel : ring.channels) {
        std::vector<int> sorted = channel.gpus;
        std::sort(sorted.begin(), sorted.end());
        std::vector<int> all(system.gpus.size());
        std::iota(all.begin(), all.end(), 0);
        CHECK(sorted == all);
        const std::size_t hops = channel.gpus.size() - (several ? 1 : 0);
        for (std::size_t i = 0; i < hops; ++i)
          add(node_of.at(channel.gpus[i]), node_of.at(channel.gpus[(i + 1) % channel.gpus.size()]), speed_intra);
        if (!several) continue;
        REQUIRE(channel.nets.size() == 2);
        const auto net = [&](int dev) { return system.nets[dev]; };
        add(net(channel.nets[0]), node_of.at(channel.gpus.front()), static_cast<double>(ring.speed_inter));
        add(node_of.at(channel.gpus.back()), net(channel.nets[1]), static_cast<double>(ring.speed_inter));
      }
      for (const auto& [step, sum] : load) {
        CAPTURE(step.first);
        CHECK(sum <= static_cast<double>(system.nodes[step.first].links[step.second].bandwidth) + 0.01);
      }
    }
}

TEST_CASE("a node that parplan builds has the channels of the machine that it stands for") {
  // NCCL knows more about the machine (CPUs, the order of bus ids), which does not matter where
  // NVLink carries everything.
  const Cluster dgx = find_cluster("dgx-h100", catalog);
  NcclSystem system = nccl_system(dgx.groups.front().node, dgx.groups.front().device);
  const NcclGraph one = nccl_graphs(system).front();
  CHECK(one.bandwidth_intra() == doctest::Approx(360));
  system.several_nodes = true;
  const std::vector<NcclGraph> several = nccl_graphs(system);
  const std::vector<NcclGraph> machine = graphs_at(recorded + "h100-8gpu-8nic-several-nodes-graph.xml");
  CHECK(several.front().bandwidth_inter() == graph_of(machine, NcclAlgorithm::ring).bandwidth_inter());
  CHECK(several.front().channels.size() == 8);
  CHECK(several[1].bandwidth_inter() == graph_of(machine, NcclAlgorithm::tree).bandwidth_inter());
}

TEST_CASE("one GPU has rings at memory's speed") {
  DeviceKind device;
  const NodeKind node = first_devices(nvswitch_box("h100-sxm-80gb", 8, device), 1);
  const std::vector<NcclGraph> graphs = nccl_graphs(nccl_system(node, device));
  CHECK(graphs.front().channels.size() == 32);
  CHECK(graphs.back().channels.empty());
}

TEST_CASE("what NCCL cannot search is said") {
  DeviceKind device;
  NodeKind node = nvswitch_box("h100-sxm-80gb", 8, device);
  device.name = "mystery";
  CHECK_THROWS_WITH_AS(
      nccl_system(node, device),
      "error: the compute capability of device 'mystery' is not known, which NCCL's search starts from", ConfigError);
  device = find_device("h100-sxm-80gb", catalog);
  node = build_node({.name = "cores",
                     .devices = 2,
                     .intra = Intra::memory,
                     .bandwidth = BytesPerSecond(1e10),
                     .latency = {},
                     .nics = {}},
                    device);
  CHECK_THROWS_WITH_AS(nccl_system(node, device), "error: node 'cores' has no GPUs; NCCL's search is about GPUs",
                       ConfigError);
}
