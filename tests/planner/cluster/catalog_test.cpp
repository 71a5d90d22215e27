#include "planner/cluster/catalog.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>

#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/cluster/mesh.h"

using namespace parplan;

namespace {

const std::string source = PARPLAN_SOURCE_DIR;
const ClusterCatalog catalog{.devices_folder = source + "/configs/devices", .clusters_folder = source + "/configs/clusters"};

std::string error_of(const std::string& name, const ClusterOptions& options = {}) {
  try {
    find_cluster(name, catalog, options);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

ClusterOptions devices(int count) { return {.device = {}, .network = {}, .devices = count, .nodes = {}}; }
ClusterOptions nodes(int count) { return {.device = {}, .network = {}, .devices = {}, .nodes = count}; }

double ring(const Cluster& cluster, int dp, int tp, Axis axis) {
  return group_network(cluster, {.degree = {1, dp, tp}, .order = parse_order("pp-dp-tp")}, axis).ring_bandwidth.value / 1e9;
}

}  // namespace

TEST_CASE("every device of the catalog loads, is named as its file, and says where its numbers come from") {
  CHECK(device_names(catalog) == std::vector<std::string>{"a100-pcie-80gb", "a100-sxm4-40gb", "a100-sxm4-80gb", "b200-sxm-180gb", "h100-sxm-80gb",
                                                          "h200-sxm-141gb", "k80", "rtx-3090", "rtx-4090", "rtx-5060ti-16gb", "titan-rtx",
                                                          "v100-sxm2-32gb"});
  for (const std::string& name : device_names(catalog)) {
    INFO(name);
    const DeviceKind device = find_device(name, catalog);
    CHECK(device.name == name);
    CHECK(device.backend == BackendKind::cuda);
    CHECK(device.sources.size() >= 5);
    CHECK(device.rates.size() == 1);
    CHECK(device.rates[0].memory.value > 1e11);
    CHECK(read_device(YamlNode::parse(write_device(device), "written")) == device);
  }
}

TEST_CASE("every cluster of the catalog loads, is named as its file, says where its numbers come from, and is written and read back") {
  CHECK(cluster_names(catalog) == std::vector<std::string>{"dgx-a100", "dgx-h100", "hgx-h200", "titan-rtx-2", "titan-rtx-2-nvlink"});
  for (const std::string& name : cluster_names(catalog)) {
    INFO(name);
    const Cluster cluster = find_cluster(name, catalog);
    CHECK(cluster.name == name);
    CHECK(cluster.groups.front().nodes == 1);
    CHECK(!cluster.sources.empty());
    CHECK(read_cluster(YamlNode::parse(write_cluster(cluster), "written")) == cluster);
    CHECK(write_cluster(read_cluster(YamlNode::parse(write_cluster(cluster), "written"))) == write_cluster(cluster));
  }
}

TEST_CASE("named clusters reach what was measured on them") {
  // All-reduce bus bandwidths: 232 and 370 GB/s inside a node, 192 and 370 over several (NVIDIA GTC 2024).
  const Cluster a100 = find_cluster("dgx-a100", catalog, devices(32));
  CHECK(ring(a100, 4, 8, Axis::tp) == doctest::Approx(240));
  CHECK(ring(a100, 32, 1, Axis::dp) == doctest::Approx(192));
  CHECK(ring(a100, 4, 8, Axis::dp) == doctest::Approx(24));
  const Cluster h100 = find_cluster("dgx-h100", catalog, devices(32));
  CHECK(ring(h100, 4, 8, Axis::tp) == doctest::Approx(370.8));
  CHECK(ring(h100, 32, 1, Axis::dp) == doctest::Approx(384));
  CHECK(ring(h100, 4, 8, Axis::dp) == doctest::Approx(48));
  CHECK(ring(find_cluster("titan-rtx-2", catalog), 2, 1, Axis::dp) == doctest::Approx(12));
  CHECK(ring(find_cluster("titan-rtx-2-nvlink", catalog), 2, 1, Axis::dp) == doctest::Approx(40));
}

TEST_CASE("a hop between nodes takes what NCCL counts for it") {
  const Cluster cluster = find_cluster("dgx-h100", catalog, devices(16));
  const GroupNetwork network = group_network(cluster, {.degree = {1, 2, 8}, .order = parse_order("pp-dp-tp")}, Axis::dp);
  CHECK(network.inter_latency.value == doctest::Approx(2.7e-6));
}

TEST_CASE("any number of whole nodes, or a part of one, of a named cluster") {
  CHECK(find_cluster("dgx-a100", catalog, devices(64)).nodes == 8);
  CHECK(find_cluster("dgx-a100", catalog, nodes(3)).devices() == 24);
  CHECK(find_cluster("dgx-a100", catalog, {.device = {}, .network = {}, .devices = 16, .nodes = 2}).devices() == 16);
  const Cluster part = find_cluster("dgx-a100", catalog, devices(3));
  CHECK(part.nodes == 1);
  CHECK(part.devices_per_node() == 3);
  CHECK(part.node.vertices[static_cast<std::size_t>(part.node.devices[2])].name == "GPU2");
  CHECK(ring(part, 3, 1, Axis::dp) == doctest::Approx(240));
}

TEST_CASE("numbers of devices that there are not are refused with those that there are") {
  CHECK(error_of("dgx-a100", devices(12)) ==
        "error: --devices 12: cluster 'dgx-a100' has 8 devices a node and any number of nodes; allowed are 1 to 8 devices and multiples of 8");
  CHECK(error_of("dgx-a100", devices(0)) ==
        "error: --devices 0: cluster 'dgx-a100' has 8 devices a node and any number of nodes; allowed are 1 to 8 devices and multiples of 8");
  CHECK(error_of("dgx-a100", {.device = {}, .network = {}, .devices = 16, .nodes = 4}) ==
        "error: --devices 16 with --nodes 4: cluster 'dgx-a100' has 8 devices a node and any number of nodes; allowed are 1 to 8 devices and multiples of 8");
  CHECK(error_of("titan-rtx-2", nodes(2)) ==
        "error: --nodes 2: cluster 'titan-rtx-2' has 2 devices a node and no network, so it is one node; allowed are 1 to 2 devices");
}

TEST_CASE("a file that says how many nodes it has gives no more") {
  const std::string path = (std::filesystem::temp_directory_path() / "parplan_catalog_test_two_nodes.yaml").string();
  std::ofstream(path) << "name: mine\ndevice: a100-sxm4-80gb\nnode: {devices: 8, intra: nvswitch, nics: {count: 8, line_rate: 200 Gbit/s}}\n"
                         "network: {latency: 1 us}\nnodes: 2\n";
  CHECK(find_cluster(path, catalog).devices() == 16);
  CHECK(find_cluster(path, catalog, devices(8)).devices() == 8);
  CHECK(error_of(path, devices(24)) ==
        "error: --devices 24: cluster 'mine' has 8 devices a node and 2 nodes; allowed are 1 to 8 devices and multiples of 8 up to 16");
}

TEST_CASE("unknown names list the known ones") {
  CHECK(error_of("dgx-a10") ==
        "error: unknown cluster 'dgx-a10'; expected a file or one of dgx-a100, dgx-h100, hgx-h200, titan-rtx-2, titan-rtx-2-nvlink; did you mean 'dgx-a100'?");
  CHECK_THROWS_WITH_AS(find_device("h100-sxm-80", catalog),
                       "error: unknown device 'h100-sxm-80'; known are a100-pcie-80gb, a100-sxm4-40gb, a100-sxm4-80gb, b200-sxm-180gb, h100-sxm-80gb, "
                       "h200-sxm-141gb, k80, rtx-3090, rtx-4090, rtx-5060ti-16gb, titan-rtx, v100-sxm2-32gb; did you mean 'h100-sxm-80gb'?",
                       ConfigError);
  CHECK(error_of("no/such/file.yaml") == "error: cannot read 'no/such/file.yaml': No such file or directory");
}

TEST_CASE("what a cluster already says cannot be said again") {
  CHECK(error_of("dgx-a100", {.device = "h100-sxm-80gb", .network = {}, .devices = {}, .nodes = {}}) ==
        "error: --device h100-sxm-80gb: cluster 'dgx-a100' already says its device, a100-sxm4-80gb; --device is for texts of nvidia-smi topo -m");
  CHECK(error_of("titan-rtx-2", {.device = {}, .network = BytesPerSecond(1e9), .devices = {}, .nodes = {}}) ==
        "error: --network: cluster 'titan-rtx-2' has no NICs");
}

TEST_CASE("another network takes the place of a named cluster's") {
  const Cluster cluster = find_cluster("dgx-a100", catalog, {.device = {}, .network = parse_bandwidth("100 Gbit/s"), .devices = 16, .nodes = {}});
  CHECK(ring(cluster, 2, 8, Axis::dp) == doctest::Approx(12));
}

TEST_CASE("an NCCL topology file is told apart") {
  const std::string path = source + "/tests/data/topologies/nccl-hgx-h200-8gpu-topo.xml";
  CHECK(error_of(path) == path + ": error: found XML; expected a cluster.yaml or the text of nvidia-smi topo -m");
}

TEST_CASE("a cluster is described in a few lines") {
  CHECK(describe(find_cluster("dgx-a100", catalog, devices(2))) ==
        "dgx-a100: 1 node of 2 x NVIDIA A100 SXM4 80 GB (a100-sxm4-80gb)\n"
        "  memory    79.1 GiB, 1.00 GiB of it for libraries; 1.79 TB/s reached\n"
        "  fp32      14.6 TFLOP/s reached of 19.5 TFLOP/s\n"
        "  half      268 TFLOP/s reached of 312 TFLOP/s\n"
        "  tf32      134 TFLOP/s reached of 156 TFLOP/s\n"
        "  NV12      240 GB/s, 600 ns: GPU0-GPU1\n"
        "  network   48.0 GB/s a node, 700 ns, oversubscription 1: GPU0 by NIC0, GPU1 by NIC1\n");
}

TEST_CASE("the examples of docs/cluster.md are clusters") {
  const std::string page = read_file(source + "/docs/cluster.md");
  int examples = 0;
  for (auto at = page.find("```yaml\n"); at != std::string::npos; at = page.find("```yaml\n", at)) {
    at += 8;
    const Cluster cluster = read_cluster(YamlNode::parse(page.substr(at, page.find("```", at) - at), "docs/cluster.md"), catalog);
    CHECK(read_cluster(YamlNode::parse(write_cluster(cluster), "written")) == cluster);
    ++examples;
  }
  CHECK(examples == 2);
}
