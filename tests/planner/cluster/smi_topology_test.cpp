#include "planner/cluster/smi_topology.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <filesystem>
#include <map>
#include <set>

#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/base/text.h"
#include "planner/cluster/find_cluster.h"
#include "planner/cluster/routes.h"
#include "tests/temporary_folder.h"

using namespace parplan;

namespace {

const std::string source = PARPLAN_SOURCE_DIR;
const ClusterCatalog catalog{.devices_folder = source + "/configs/devices",
                             .clusters_folder = source + "/configs/clusters"};
const std::string topologies = source + "/tests/data/topologies/";

// Every link by the kinds of its ends, then each device's NICs: "8 x device-nvswitch NV18 371
// GB/s".
std::string shape(const Cluster& cluster) {
  const NodeKind& node = cluster.groups.front().node;
  std::map<std::string, int> links;
  for (const Link& link : node.links) {
    const auto end = [&](int v) { return std::string(name(node.vertices[v].kind)); };
    ++links[fmt::format("{}-{} {} {}", end(link.a), end(link.b), link.kind, format_bandwidth(link.bandwidth))];
  }
  std::string text = fmt::format("{} devices\n", cluster.groups.front().devices_per_node());
  for (const auto& [link, count] : links) text += fmt::format("{} x {}\n", count, link);
  const auto routes = routes_of(node);
  for (std::size_t i = 0; i < routes->uplinks.size(); ++i)
    for (const Uplink& uplink : routes->uplinks[i])
      text += fmt::format("{} by {}\n", node.vertices[node.devices[i]].name, node.vertices[uplink.nic].name);
  return text;
}

struct Case {
  const char* file;
  const char* device;
  const char* network;
  const char* shape;
  std::vector<std::string> notes;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> rows = {
      {"smi-2x-rtx3090-nvlink",
       "rtx-3090",
       "",
       "2 devices\n"
       "1 x device-device NV4 48.0 GB/s\n",
       {}},
      {"smi-2xk80-legacy-soc-legend",
       "k80",
       "40 Gbit/s",
       "4 devices\n"
       "4 x device-pcie_switch PCIe 12.0 GB/s\n"
       "1 x nic-host_bridge PCIe 12.0 GB/s\n"
       "1 x nic-network network 4.80 GB/s\n"
       "2 x pcie_switch-host_bridge PCIe 12.0 GB/s\n"
       "GPU0 by mlx4_0\n"
       "GPU1 by mlx4_0\n"
       "GPU2 by mlx4_0\n"
       "GPU3 by mlx4_0\n",
       {"PCIe links taken as generation 3 x16, the card's"}},
      {"smi-4x-a100pcie-bridge-pairs",
       "a100-pcie-80gb",
       "",
       "4 devices\n"
       "2 x device-device NV12 240 GB/s\n"
       "4 x device-host_bridge PCIe 24.0 GB/s\n"
       "4 x host_bridge-host_bridge NODE 5.00 TB/s\n"
       "1 x host_bridge-host_bridge SYS 16.0 GB/s\n",
       {"PCIe links taken as generation 4 x16, the card's",
        "links between sockets taken as 16 GB/s, NCCL's for AMD (src/graph/topo.h)"}},
      {"smi-4x-rtx5060ti-phb",
       "rtx-5060ti-16gb",
       "",
       "4 devices\n"
       "4 x device-host_bridge PCIe 24.0 GB/s\n",
       {"PCIe links taken as generation 5 x8, the card's"}},
      {"smi-8x-rtx4090-sys",
       "rtx-4090",
       "100 Gbit/s",
       "8 devices\n"
       "8 x device-host_bridge PCIe 24.0 GB/s\n"
       "9 x host_bridge-host_bridge SYS 16.0 GB/s\n"
       "2 x nic-network network 12.0 GB/s\n"
       "2 x nic-pcie_switch PCIe 24.0 GB/s\n"
       "1 x pcie_switch-host_bridge PCIe 24.0 GB/s\n"
       "GPU0 by NIC0\n"
       "GPU1 by NIC1\n"
       "GPU2 by NIC0\n"
       "GPU3 by NIC1\n"
       "GPU4 by NIC0\n"
       "GPU5 by NIC1\n"
       "GPU6 by NIC0\n"
       "GPU7 by NIC1\n",
       {"PCIe links taken as generation 4 x16, the card's",
        "links between sockets taken as 16 GB/s, NCCL's for AMD (src/graph/topo.h)"}},
      {"smi-dgx-h100-8gpu-12nic-truncated",
       "h100-sxm-80gb",
       "400 Gbit/s",
       "8 devices\n"
       "8 x device-nvswitch NV18 371 GB/s\n"
       "8 x device-pcie_switch PCIe 48.0 GB/s\n"
       "11 x host_bridge-host_bridge NODE 5.00 TB/s\n"
       "1 x host_bridge-host_bridge SYS 16.0 GB/s\n"
       "2 x nic-host_bridge PCIe 48.0 GB/s\n"
       "12 x nic-network network 48.0 GB/s\n"
       "10 x nic-pcie_switch PCIe 48.0 GB/s\n"
       "9 x pcie_switch-host_bridge PCIe 48.0 GB/s\n"
       "GPU0 by NIC0\n"
       "GPU1 by NIC3\n"
       "GPU2 by NIC4\n"
       "GPU3 by NIC5\n"
       "GPU4 by NIC6\n"
       "GPU5 by NIC9\n"
       "GPU6 by NIC10\n"
       "GPU7 by NIC11\n",
       {"rows NIC6, NIC7, NIC8, NIC9, NIC10, NIC11 missing in the text; read from the other half of the matrix, where "
        "it has them",
        "PCIe links taken as generation 5 x16, the card's",
        "links between sockets taken as 16 GB/s, NCCL's for AMD (src/graph/topo.h)"}},
      {"smi-hgx-a100-8gpu-10nic-wrapped",
       "a100-sxm4-80gb",
       "200 Gbit/s",
       "8 devices\n"
       "8 x device-nvswitch NV12 240 GB/s\n"
       "8 x device-pcie_switch PCIe 24.0 GB/s\n"
       "15 x host_bridge-host_bridge SYS 16.0 GB/s\n"
       "2 x nic-host_bridge PCIe 24.0 GB/s\n"
       "10 x nic-network network 24.0 GB/s\n"
       "8 x nic-pcie_switch PCIe 24.0 GB/s\n"
       "4 x pcie_switch-host_bridge PCIe 24.0 GB/s\n"
       "GPU0 by NIC0\n"
       "GPU1 by NIC1\n"
       "GPU2 by NIC2\n"
       "GPU3 by NIC3\n"
       "GPU4 by NIC4\n"
       "GPU5 by NIC5\n"
       "GPU6 by NIC6\n"
       "GPU7 by NIC7\n",
       {"rows NIC0, NIC1, NIC2, NIC3, NIC4, NIC5, NIC6, NIC7, NIC8, NIC9 missing in the text; read from the other half "
        "of the matrix, where it has them",
        "PCIe links taken as generation 4 x16, the card's",
        "links between sockets taken as 16 GB/s, NCCL's for AMD (src/graph/topo.h)"}},
      {"smi-hgx-a100-8gpu-epyc7763-1nic",
       "a100-sxm4-80gb",
       "200 Gbit/s",
       "8 devices\n"
       "6 x device-host_bridge PCIe 24.0 GB/s\n"
       "8 x device-nvswitch NV12 240 GB/s\n"
       "2 x device-pcie_switch PCIe 24.0 GB/s\n"
       "6 x host_bridge-host_bridge NODE 5.00 TB/s\n"
       "6 x host_bridge-host_bridge SYS 16.0 GB/s\n"
       "1 x nic-network network 24.0 GB/s\n"
       "1 x nic-pcie_switch PCIe 24.0 GB/s\n"
       "1 x pcie_switch-host_bridge PCIe 24.0 GB/s\n"
       "GPU0 by mlx5_0\n"
       "GPU1 by mlx5_0\n"
       "GPU2 by mlx5_0\n"
       "GPU3 by mlx5_0\n"
       "GPU4 by mlx5_0\n"
       "GPU5 by mlx5_0\n"
       "GPU6 by mlx5_0\n"
       "GPU7 by mlx5_0\n",
       {"PCIe links taken as generation 4 x16, the card's",
        "links between sockets taken as 16 GB/s, NCCL's for AMD (src/graph/topo.h)"}},
      {"smi-hgx-b200-8gpu-nonic",
       "b200-sxm-180gb",
       "",
       "8 devices\n"
       "8 x device-nvswitch NV18 722 GB/s\n",
       {}},
      {"smi-hgx-h200-8gpu-8nic",
       "h200-sxm-141gb",
       "400 Gbit/s",
       "8 devices\n"
       "8 x device-nvswitch NV18 371 GB/s\n"
       "8 x device-pcie_switch PCIe 48.0 GB/s\n"
       "8 x host_bridge-host_bridge NODE 5.00 TB/s\n"
       "1 x host_bridge-host_bridge SYS 16.0 GB/s\n"
       "8 x nic-network network 48.0 GB/s\n"
       "8 x nic-pcie_switch PCIe 48.0 GB/s\n"
       "8 x pcie_switch-host_bridge PCIe 48.0 GB/s\n"
       "GPU0 by NIC0\n"
       "GPU1 by NIC1\n"
       "GPU2 by NIC2\n"
       "GPU3 by NIC3\n"
       "GPU4 by NIC4\n"
       "GPU5 by NIC5\n"
       "GPU6 by NIC6\n"
       "GPU7 by NIC7\n",
       {"PCIe links taken as generation 5 x16, the card's",
        "links between sockets taken as 16 GB/s, NCCL's for AMD (src/graph/topo.h)"}},
      {"smi-perlmutter-4xa100-nv4",
       "a100-sxm4-40gb",
       "",
       "4 devices\n"
       "6 x device-device NV4 80.0 GB/s\n",
       {}},
  };
  return rows;
}

std::string error_of(const std::string& text) {
  try {
    read_smi_topology(text, "t");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("every published topology is read to its devices, links and NICs") {
  std::set<std::string> tested;
  for (const Case& row : cases()) {
    INFO(row.file);
    ClusterOptions options{.device = row.device, .network = {}, .devices = {}, .nodes = {}};
    if (*row.network) options.network = parse_bandwidth(row.network);
    const Cluster cluster = find_cluster(topologies + row.file + ".txt", catalog, options);
    CHECK(cluster.name == row.file);
    CHECK(cluster.groups.front().nodes == 1);
    CHECK(shape(cluster) == row.shape);
    CHECK(cluster.notes == row.notes);
    CHECK(read_cluster(YamlNode::parse(write_cluster(cluster), "written")) == cluster);
    tested.insert(row.file);
  }
  for (const auto& entry : std::filesystem::directory_iterator(topologies))
    if (entry.path().filename().string().starts_with("smi-"))
      CHECK_MESSAGE(tested.contains(entry.path().stem().string()), entry.path().string());
}

TEST_CASE("every published topology without its card names what is missing") {
  for (const Case& row : cases())
    CHECK_THROWS_WITH_AS(
        find_cluster(topologies + row.file + ".txt", catalog),
        (topologies + row.file + ".txt: error: nvidia-smi topo -m does not say the card (give --device with one of " +
         join(nvidia_card_names(catalog)) + ")")
            .c_str(),
        ConfigError);
}

TEST_CASE("several nodes need the speed of the NICs") {
  const std::string file = topologies + "smi-hgx-h200-8gpu-8nic.txt";
  CHECK_THROWS_WITH_AS(
      find_cluster(file, catalog, {.device = "h200-sxm-141gb", .network = {}, .devices = 16, .nodes = {}}),
      (file + ": error: nvidia-smi topo -m does not say the speed of its NICs (give --network, such as --network '400 "
              "Gbit/s')")
          .c_str(),
      ConfigError);
  const Cluster cluster =
      find_cluster(file, catalog,
                   {.device = "h200-sxm-141gb", .network = parse_bandwidth("400 Gbit/s"), .devices = 16, .nodes = {}});
  CHECK(cluster.groups.front().nodes == 2);
  CHECK(cluster.devices() == 16);
}

TEST_CASE("on one node NICs of unknown speed are left out, and the cluster says so") {
  const Cluster cluster = find_cluster(topologies + "smi-hgx-h200-8gpu-8nic.txt", catalog,
                                       {.device = "h200-sxm-141gb", .network = {}, .devices = {}, .nodes = {}});
  CHECK(shape(cluster) == "8 devices\n8 x device-nvswitch NV18 371 GB/s\n");
  CHECK(cluster.notes ==
        std::vector<std::string>{
            "8 NICs are left out, as their speed is not known: one node only; give --network for several"});
}

TEST_CASE("a card that cannot have the links is refused") {
  const auto refused = [](const char* file, const char* device) {
    try {
      find_cluster(topologies + file, catalog, {.device = device, .network = {}, .devices = {}, .nodes = {}});
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(refused("smi-hgx-h200-8gpu-8nic.txt", "a100-sxm4-80gb") ==
        "error: GPU0 and GPU1 are connected by NV18, but device 'a100-sxm4-80gb' has 12 NVLinks; is --device right?");
  CHECK(refused("smi-perlmutter-4xa100-nv4.txt", "rtx-4090") ==
        "error: GPU0 and GPU1 are connected by NV4, but device 'rtx-4090' has 0 NVLinks; is --device right?");
}

TEST_CASE("a card that has more links than it can is refused, whichever row it is in") {
  const testing::TemporaryFolder folder;
  for (const char* const matrix : {"\tGPU0\tGPU1\tGPU2\n"
                                   "GPU0\t X \tNV12\tNV12\n"
                                   "GPU1\tNV12\t X \tSYS\n"
                                   "GPU2\tNV12\tSYS\t X \n",
                                   "\tGPU0\tGPU1\tGPU2\n"
                                   "GPU0\t X \tSYS\tNV12\n"
                                   "GPU1\tSYS\t X \tNV12\n"
                                   "GPU2\tNV12\tNV12\t X \n"}) {
    const std::string file = folder.write("smi.txt", matrix);
    std::string message;
    try {
      find_cluster(file, catalog, {.device = "a100-sxm4-80gb", .network = {}, .devices = {}, .nodes = {}});
    } catch (const ConfigError& error) {
      message = error.what();
    }
    CHECK(message.find("has 24 NVLinks to other GPUs, but device 'a100-sxm4-80gb' has 12") != std::string::npos);
  }
}

TEST_CASE("a network for GPUs without NICs is refused") {
  CHECK_THROWS_WITH_AS(
      find_cluster(topologies + "smi-hgx-b200-8gpu-nonic.txt", catalog,
                   {.device = "b200-sxm-180gb", .network = parse_bandwidth("400 Gbit/s"), .devices = {}, .nodes = {}}),
      "error: --network: 'smi-hgx-b200-8gpu-nonic' lists no NICs, whose speed it is; leave it out for one node, or "
      "write a cluster.yaml whose node has 'nics' (docs/cluster.md)",
      ConfigError);
  CHECK_THROWS_WITH_AS(find_cluster(topologies + "smi-hgx-b200-8gpu-nonic.txt", catalog,
                                    {.device = "b200-sxm-180gb", .network = {}, .devices = {}, .nodes = 2}),
                       "error: --nodes 2: cluster 'smi-hgx-b200-8gpu-nonic' has 8 devices a node and no network, so it "
                       "is one node; allowed are 1 to 8 devices",
                       ConfigError);
}

TEST_CASE("escapes, prompts, carriage returns and columns that ran together are read through") {
  const SmiTopology plain = read_smi_topology("\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\n"
                                              "GPU0\t X \tNV4\tPXB\t0-7\t0\n"
                                              "GPU1\tNV4\t X \tSYS\t8-15\t1\n"
                                              "NIC0\tPXB\tSYS\t X \t\t\n", "t");
  CHECK(plain.gpus == std::vector<std::string>{"GPU0", "GPU1"});
  CHECK(plain.nics == std::vector<std::string>{"NIC0"});
  CHECK(plain.connection ==
        std::vector<std::vector<std::string>>{{"X", "NV4", "PXB"}, {"NV4", "X", "SYS"}, {"PXB", "SYS", "X"}});
  CHECK(plain.numa == std::vector<std::optional<std::string>>{"0", "1"});
  CHECK(plain.notes.empty());
  CHECK(read_smi_topology("$ nvidia-smi topo -m\r\n"
                          "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\r\n"
                          "GPU0\t X \tNV4\tPXB\t0-7\t0\r\n\r\n"
                          "GPU1\tNV4\t X \tSYS\t8-15\t1\r\n"
                          "NIC0\tPXB\tSYS\t X \t\t\r\n"
                          "\r\nLegend:\r\n  X = Self\r\n", "t") == plain);
  CHECK(read_smi_topology("       GPU0  GPU1NIC0  CPU Affinity  NUMA Affinity\n"
                          "GPU0    X   NV4PXB   0-7   0\n"
                          "GPU1   NV4  X SYS   8-15  1\n"
                          "NIC0   PXBSYS X\n"
                          "root@host:~# exit\n", "t") == plain);
}

TEST_CASE("characters in names that act on a terminal are written out") {
  const SmiTopology topology = read_smi_topology("\tGPU0\tm\xe2\x80\xaelx\x07\nGPU0\t X \tPHB\n", "t");
  CHECK(topology.nics == std::vector<std::string>{"m\\u202elx\\u0007"});
  CHECK(topology.notes ==
        std::vector<std::string>{
            "row m\\u202elx\\u0007 missing in the text; read from the other half of the matrix, where it has them"});
}

TEST_CASE("what a cut row lacks is read from the other half") {
  const SmiTopology topology =
      read_smi_topology("\tGPU0\tGPU1\tGPU2\nGPU0\t X \tPIX\tPHB\nGPU1\tPIX\t X \tPHB\nGPU2\tPHB\t\t X\n", "t");
  CHECK(topology.connection[2] == std::vector<std::string>{"PHB", "PHB", "X"});
  CHECK(topology.notes == std::vector<std::string>{"1 empty cells read from the other half of the matrix"});
  CHECK(read_smi_topology("\tGPU0\tGPU1\nGPU0\t X \tPIX\n", "t").notes ==
        std::vector<std::string>{
            "row GPU1 missing in the text; read from the other half of the matrix, where it has them"});
}

TEST_CASE("one GPU is a topology too") {
  const SmiTopology topology = read_smi_topology("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\tN/A\n", "t");
  CHECK(topology.devices() == 1);
  CHECK(topology.numa == std::vector<std::optional<std::string>>{std::nullopt});
}

TEST_CASE("what makes a matrix unreadable is named with its line") {
  CHECK(error_of("hello\n") == "t: error: found no header of nvidia-smi topo -m (a line of GPU0, GPU1, ...)");
  CHECK(
      error_of("\tGPU0\tGPU1\nGPU0\t X \tFOO\n") ==
      "t:2: error: unknown connection 'FOO' between GPU0 and GPU1; known are X, NV#, PIX, PXB, PHB, NODE, SYS and SOC");
  CHECK(error_of("\tGPU0\tGPU1\tGPU1\n") == "t:1: error: column 'GPU1' appears twice in the header");
  CHECK(error_of("\tGPU0\tGPU1\nGPU0\t X \tPIX\nGPU0\t X \tPIX\n") ==
        "t:3: error: a second row 'GPU0'; the first is line 2");
  CHECK(error_of("\tGPU0\tGPU1\nGPU0\t X \tPIX\nGPU7\tPIX\t X\n") ==
        "t:3: error: row 'GPU7' has no column; the columns are GPU0, GPU1");
  CHECK(error_of("\tGPU0\tGPU1\nGPU0\t X \tPIX\tPIX\n") ==
        "t:2: error: row GPU0 has more connections than the header's 2 columns");
  CHECK(error_of("\tGPU0\tGPU1\nGPU0\tPIX\t X \n") ==
        "t:2: error: row GPU0 has 'PIX' in column GPU0; X stands where a row meets its own column");
  CHECK(error_of("\tGPU0\tGPU1\nGPU0\t X \tPIX\nGPU1\tSYS\t X \n") ==
        "t:3: error: GPU0 and GPU1 are PIX apart in row GPU0 (line 2) but SYS in row GPU1 (line 3)");
  CHECK(error_of("# cut\n\tGPU0\tGPU1\tGPU2\tGPU3\nGPU0\t X \tPIX\tPHB\tPHB\nGPU1\tPIX\t X \n") ==
        "t:2: error: no connection between GPU1 and GPU2: row GPU1 (line 4) has 2 of 4 cells and row GPU2 is missing; "
        "3 pairs are lacking in all");
  CHECK(error_of("\tGPU0\tGPU1\nGPU0\t X \tNV1000\n") ==
        "t:2: error: unknown connection 'NV1000' between GPU0 and GPU1; known are X, NV#, PIX, PXB, PHB, NODE, SYS and "
        "SOC");
}

TEST_CASE("words of one field behind a full row are affinities, whatever they say") {
  const SmiTopology topology = read_smi_topology("\tGPU0\tGPU1\nGPU0\t X \tPIX what else\nGPU1\tPIX\t X \n", "t");
  CHECK(topology.connection == std::vector<std::vector<std::string>>{{"X", "PIX"}, {"PIX", "X"}});
}

TEST_CASE("a line of a million digits is refused like a short one") {
  const std::string digits(1'000'000, '0');
  for (const std::string& text : {"\tGPU0\tGPU" + digits, "\tGPU0\tGPU1\nGPU0\tX\tNV" + digits,
                                  "\tGPU0\tGPU1\n[" + digits, "mlx5_" + digits + "\n"})
    CHECK_THROWS_AS(read_smi_topology(text, "t"), ConfigError);
}

TEST_CASE("a topology cut off anywhere is read or refused, never worse") {
  int read = 0;
  int refused = 0;
  for (const Case& row : cases()) {
    const std::string text = read_file(topologies + row.file + ".txt");
    const DeviceKind device = find_device(row.device, catalog);
    for (std::size_t end = 0; end < text.size(); end += 7) {
      try {
        const SmiTopology topology = read_smi_topology(text.substr(0, end), "cut");
        const Cluster cluster = cluster_of(topology, "cut", device,
                                           topology.nics.empty() ? std::nullopt : std::optional(BytesPerSecond(1e9)));
        CHECK(!problem_with(cluster));
        ++read;
      } catch (const ConfigError&) {
        ++refused;
      }
    }
  }
  CHECK(read > 100);
  CHECK(refused > 100);
}
