#include "planner/cluster/write_topology.h"

#include <doctest/doctest.h>

#include <cstdlib>
#include <map>
#include <regex>
#include <set>

#include "planner/base/file.h"
#include "planner/cluster/find_cluster.h"
#include "planner/cluster/node_layout.h"
#include "tests/temporary_folder.h"

using namespace parplan;

namespace {

const std::string source = PARPLAN_SOURCE_DIR;
const ClusterCatalog catalog{.devices_folder = source + "/configs/devices",
                             .clusters_folder = source + "/configs/clusters"};

ClusterOptions card(const std::string& name) { return {.device = name, .network = {}, .devices = {}, .nodes = {}}; }

const std::string device_text =
    "{name: d, title: D, backend: cuda, memory: {capacity: 10 GiB, overhead: 1 GiB}, peak: {fp32: 2 TFLOP/s}, "
    "kernel_launch: 2 us, pcie: {generation: 3, lanes: 16}, "
    "rates: [{active: 1, matrix_fp32: 1 TFLOP/s, vector: 1 TFLOP/s, memory: 1 TB/s}]}";

Cluster read(const std::string& text) { return read_cluster(YamlNode::parse(text, "c.yaml")); }

Cluster two_kinds() {
  return read("name: two kinds\ngroups:\n  - device: " + device_text +
              "\n    node: {devices: 2, intra: nvswitch, bandwidth: 100 GB/s, nics: {count: 2, line_rate: 80 "
              "Gbit/s}}\n    nodes: 2\n    price: 2.5 USD\n  - device: " +
              device_text +
              "\n    node: {devices: 1, intra: pcie, nics: {count: 1, line_rate: 80 Gbit/s}}\n"
              "network: {latency: 1 us, rails: true, levels: [{name: leaf, nodes: 1}, {name: spine, oversubscription: "
              "2, latency: 3 us}]}\n");
}

// A DOT text, parsed as far as parplan uses the language: declared names, names in edges, braces.
struct Dot {
  std::set<std::string> declared;
  std::vector<std::pair<std::string, std::string>> edges;
  int open_braces = 0;
};
Dot parse_dot(const std::string& text) {
  // Strings first: their contents are not part of the language.
  std::string bare;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '"') {
      bare += text[i];
      continue;
    }
    for (++i; i < text.size() && text[i] != '"'; ++i) {
      CHECK(text[i] != '\n');
      if (text[i] == '\\') {
        ++i;
        CHECK(std::string("\\\"n").find(text[i]) != std::string::npos);
      }
    }
    REQUIRE(i < text.size());  // closed
    bare += "S";
  }
  Dot dot;
  const std::regex node_line("([a-z0-9]+) \\[label=S, shape=[a-z0-9]+\\];");
  const std::regex edge_line("([a-z0-9]+) -- ([a-z0-9]+)( \\[label=S\\])?;");
  std::istringstream lines(bare);
  for (std::string line; std::getline(lines, line);) {
    line.erase(0, line.find_first_not_of(' '));
    std::smatch match;
    if (std::regex_match(line, match, node_line)) {
      CHECK(dot.declared.insert(match[1]).second);
    } else if (std::regex_match(line, match, edge_line)) {
      dot.edges.emplace_back(match[1], match[2]);
    } else if (line.ends_with('{')) {
      ++dot.open_braces;
    } else if (line == "}") {
      --dot.open_braces;
    } else {
      CHECK(std::regex_match(line, std::regex("(label=S|(node|edge) \\[fontsize=[0-9]+\\]);")));
    }
  }
  return dot;
}

}  // namespace

TEST_CASE("a node's matrix is that of nvidia-smi, with rates and stars at the NICs in use") {
  const std::string text = describe(find_cluster(source + "/tests/data/topologies/smi-4x-a100pcie-bridge-pairs.txt",
                                                 catalog, card("a100-pcie-80gb")));
  const std::string smi = read_file(source + "/tests/data/topologies/smi-4x-a100pcie-bridge-pairs.txt");
  INFO(text);
  // Row by row the words of the file, without the added rates.
  const std::regex rates(" [0-9.]+[kMGT]\\*?");
  std::size_t rows = 0;
  std::istringstream ours(text);
  for (std::string line; std::getline(ours, line);) {
    if (!line.starts_with("  GPU")) continue;
    std::istringstream words(std::regex_replace(line, rates, ""));
    std::string name;
    words >> name;
    std::istringstream theirs(smi.substr(smi.find("\n" + name) + 1));
    std::string skipped;
    theirs >> skipped;
    for (int c = 0; c < 4; ++c) {
      std::string our_word;
      std::string their_word;
      words >> our_word;
      theirs >> their_word;
      CHECK(our_word == their_word);
    }
    ++rows;
  }
  CHECK(rows == 4);
}

TEST_CASE("unlike nodes are described one kind after the other, then the network's levels") {
  CHECK(describe(two_kinds()) ==
        "two kinds: 5 devices on 3 nodes of 2 kinds\n"
        "devices 0 to 3: 2 nodes of 2 x D (d)\n"
        "  memory    10.0 GiB, 1.00 GiB of it for libraries; 1.00 TB/s reached\n"
        "  fp32      1.00 TFLOP/s reached of 2.00 TFLOP/s\n"
        "  price     2.5 USD an hour and device\n"
        "  NVLink    100 GB/s, 600 ns: GPU0-GPU1\n"
        "  B/s       GPU0         GPU1         NIC0        NIC1\n"
        "  GPU0      X            NVLink 100G  PIX 12.0G*  -\n"
        "  GPU1      NVLink 100G  X            -           PIX 12.0G*\n"
        "  network   19.2 GB/s a node: GPU0 by NIC0, GPU1 by NIC1\n"
        "devices 4 to 4: 1 node of 1 x D (d)\n"
        "  memory    10.0 GiB, 1.00 GiB of it for libraries; 1.00 TB/s reached\n"
        "  fp32      1.00 TFLOP/s reached of 2.00 TFLOP/s\n"
        "  network   9.60 GB/s a node: GPU0 by NIC0\n"
        "  leaf      blocks of 1 node, 1.00 us, oversubscription 1\n"
        "  spine     all nodes, 3.00 us, oversubscription 2\n"
        "  rails     a switch for each NIC of a node; traffic changes rails inside nodes where there is NVLink\n");
}

TEST_CASE("NICs of many devices are said by number where each has its own") {
  const auto network_of = [](const char* name) {
    const std::string text = describe(find_cluster(name, catalog, {}));
    const std::size_t begin = text.find("  network ");
    return text.substr(begin, text.find('\n', begin) - begin);
  };
  CHECK(network_of("gb200-nvl72").ends_with(": GPUi by NICi, i from 0 to 71"));
  CHECK(network_of("dgx-h100").ends_with(": GPUi by NICi, i from 0 to 7"));
}

TEST_CASE("what a network says of NCCL is described, and nothing where it says nothing") {
  const auto nccl_of = [](const Cluster& cluster) {
    const std::string text = describe(cluster);
    const std::size_t begin = text.find("  NCCL ");
    return begin == std::string::npos ? "" : text.substr(begin, text.find('\n', begin) - begin);
  };
  CHECK(nccl_of(find_cluster("aws-p5", catalog)) ==
        "  NCCL      a ring's step keeps a CPU 8.00 us; rings between nodes in simple, ll, ll128; trees between nodes "
        "in ll, ll128; transfers in parts of 512 KiB");
  CHECK(nccl_of(find_cluster("dgx-h100", catalog)).empty());
  Cluster cluster = two_kinds();
  cluster.network.tree_protocols = {.simple = false, .low_latency = false};
  cluster.network.one_ring = true;
  CHECK(nccl_of(cluster) ==
        "  NCCL      no trees between nodes; all rings enter a node by one NIC and leave it by another");
}

TEST_CASE("devices that were selected are named by their numbers on the machine") {
  ClusterOptions options;
  options.device_ids = {5, 2};
  const std::string text = describe(find_cluster("dgx-a100", catalog, options));
  CHECK(text.find("  selected  devices 5, 2 of their machine, in this order\n") != std::string::npos);
}

TEST_CASE("every cluster of the catalog is drawn as valid DOT with all its vertices and links") {
  for (const std::string& name : cluster_names(catalog)) {
    INFO(name);
    const Cluster cluster = find_cluster(name, catalog);
    const NodeKind& node = cluster.groups.front().node;
    const Dot dot = parse_dot(draw_graphviz(cluster));
    CHECK(dot.open_braces == 0);
    const bool network =
        std::ranges::any_of(node.vertices, [](const Vertex& vertex) { return vertex.kind == VertexKind::network; });
    CHECK(dot.declared.size() == node.vertices.size());  // a level stands for the network
    CHECK(dot.edges.size() == node.links.size());
    for (const auto& [a, b] : dot.edges) CHECK((dot.declared.contains(a) && dot.declared.contains(b)));
    CHECK(dot.declared.contains("level0") == network);
  }
}

TEST_CASE("rails and levels are drawn, one switch a rail") {
  const Dot dot = parse_dot(draw_graphviz(two_kinds()));
  for (const char* vertex : {"level0rail0", "level0rail1", "level1", "g0v0", "g1v0"})
    CHECK(dot.declared.contains(vertex));
  CHECK(!dot.declared.contains("level0"));
  std::map<std::string, int> ends;
  for (const auto& [a, b] : dot.edges) {
    CHECK((dot.declared.contains(a) && dot.declared.contains(b)));
    ++ends[b];
  }
  CHECK(ends["level0rail0"] == 2);  // NIC 0 of both kinds of nodes
  CHECK(ends["level0rail1"] == 1);
  CHECK(ends["level1"] == 2);
}

TEST_CASE("names with quotes, backslashes and line ends stay within their strings") {
  Cluster cluster = two_kinds();
  cluster.name = "a \"b\" \\ c\nd";
  cluster.groups.front().node.vertices.front().name = "\\\"";
  const std::string text = draw_graphviz(cluster);
  CHECK(text.starts_with("graph \"a \\\"b\\\" \\\\ c\\nd\" {\n"));
  CHECK(parse_dot(text).open_braces == 0);
}

TEST_CASE("Graphviz draws what is drawn, where it is installed") {
  if (std::system("command -v dot > /dev/null 2>&1") != 0) {
    MESSAGE("Graphviz is not installed");
    return;
  }
  const testing::TemporaryFolder folder;
  for (const Cluster& cluster : {two_kinds(), find_cluster("dgx-h100", catalog)}) {
    const std::string file = folder.write("cluster.dot", draw_graphviz(cluster));
    CHECK(std::system(("dot -Tsvg '" + file + "' > /dev/null").c_str()) == 0);
  }
}

TEST_CASE("the JSON of a cluster has every pair's path and every level") {
  const Json json = topology_json(two_kinds(), "1.2.3");
  CHECK(json["schema"] == "parplan.topology/1");
  CHECK(json["devices"] == 5);
  CHECK(json["nodes"] == 3);
  CHECK(json["groups"].size() == 2);
  const Json& group = json["groups"][0];
  CHECK(group["devices"] == Json({"GPU0", "GPU1"}));
  CHECK(group["between_devices"][0][0].is_null());
  CHECK(group["between_devices"][0][1] == Json({{"class", "nvlink"},
                                                {"label", "NVLink"},
                                                {"bandwidth_bytes_per_s", 100e9},
                                                {"latency_s", nvlink_hop_latency.value}}));
  CHECK(group["to_nics"][0][1].is_null());
  CHECK(group["nics_used"] == Json::array({Json::array({"NIC0"}), Json::array({"NIC1"})}));
  CHECK(json["network"]["rails"] == true);
  CHECK(json["network"]["post_overhead_s"].is_null());
  CHECK(json["network"]["ring_protocols"] == Json({"simple", "ll"}));
  CHECK(json["network"]["transfer_chunk_bytes"] == 131072);
  CHECK(json["network"]["one_ring"] == false);
  CHECK(json["network"]["levels"][0]["nodes"] == 1);
  CHECK(json["network"]["levels"][1] ==
        Json({{"name", "spine"}, {"nodes", nullptr}, {"oversubscription", 2.0}, {"latency_s", 3e-6}}));
  CHECK(topology_json(find_cluster("titan-rtx-2", catalog), "1")["network"].is_null());
  const Json aws = topology_json(find_cluster("aws-p5", catalog), "1")["network"];
  CHECK(aws["post_overhead_s"] == 8e-6);
  CHECK(aws["ring_protocols"] == Json({"simple", "ll", "ll128"}));
  CHECK(aws["tree_protocols"] == Json({"ll", "ll128"}));
}
