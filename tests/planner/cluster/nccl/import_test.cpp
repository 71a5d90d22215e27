#include "planner/cluster/nccl/import.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/base/text.h"
#include "planner/cluster/group_network.h"
#include "planner/cluster/nccl/search.h"
#include "planner/cluster/routes.h"

using namespace parplan;

namespace {

const std::string source = PARPLAN_SOURCE_DIR;
const ClusterCatalog catalog{.devices_folder = source + "/configs/devices",
                             .clusters_folder = source + "/configs/clusters"};
const std::string topologies = source + "/tests/data/topologies/";

ClusterOptions options(std::optional<std::string> device, const char* network = "", std::optional<int> nodes = {}) {
  ClusterOptions result;
  result.device = std::move(device);
  if (*network != '\0') result.network = parse_bandwidth(network);
  result.nodes = nodes;
  return result;
}

Cluster import_file(const std::string& name, const ClusterOptions& asked) {
  return import_nccl_topology(read_file(topologies + name), topologies + name, catalog, asked);
}
Cluster import_text(const std::string& text, const ClusterOptions& asked) {
  return import_nccl_topology(text, "node.xml", catalog, asked);
}

std::string error_of(const std::string& text, const ClusterOptions& asked) {
  try {
    import_text(text, asked);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

// Every link by the kinds of its ends, then each device's NICs.
std::string shape(const Cluster& cluster) {
  const NodeKind& node = cluster.groups.front().node;
  std::map<std::string, int> links;
  for (const Link& link : node.links) {
    const auto end = [&](int v) { return std::string(name(node.vertices[v].kind)); };
    ++links[fmt::format("{}-{} {} {}", end(link.a), end(link.b), link.kind, format_bandwidth(link.bandwidth))];
  }
  std::string text;
  for (const auto& [link, count] : links) text += fmt::format("{} x {}\n", count, link);
  const auto routes = routes_of(node);
  for (std::size_t i = 0; i < routes->uplinks.size(); ++i)
    for (const Uplink& uplink : routes->uplinks[i])
      text += fmt::format("{} by {}\n", node.vertices[node.devices[i]].name, node.vertices[uplink.nic].name);
  return text;
}

double ring(const Cluster& cluster, int dp, int tp) {
  return group_network(cluster, {.degree = {.dp = dp, .tp = tp}, .order = parse_order("pp-dp-tp")},
                       tp > 1 ? Axis::tp : Axis::dp)
             .ring_bandwidth.value /
         1e9;
}

// A topology of one AMD CPU with this inside, in line 3.
std::string system_of(const std::string& inside) {
  return "<system version=\"1\">\n<cpu numaid=\"0\" arch=\"x86_64\" vendor=\"AuthenticAMD\">\n" + inside +
         "\n</cpu>\n</system>\n";
}
std::string gpu_of(int i, const std::string& inside = "",
                   const char* link = "link_speed=\"16.0 GT/s PCIe\" link_width=\"16\"", int sm = 80) {
  return fmt::format(
      "<pci busid=\"0000:0{}:00.0\" class=\"0x030200\" {}><gpu dev=\"{}\" sm=\"{}\" rank=\"{}\" "
      "gdr=\"1\">{}</gpu></pci>\n",
      i + 1, link, i, sm, i, inside);
}
constexpr const char* to_nvswitch = "<nvlink target=\"fffffff:ff:ff.0\" count=\"12\" tclass=\"0x068000\"/>";

}  // namespace

TEST_CASE("a dump of an HGX H200 names its card and is its node") {
  const Cluster cluster = import_file("nccl-hgx-h200-8gpu-topo.xml", options({}));
  CHECK(cluster.name == "nccl-hgx-h200-8gpu-topo");
  CHECK(cluster.groups.front().device == find_device("h200-sxm-141gb", catalog));
  CHECK(shape(cluster) ==
        "8 x device-nvswitch NV18 371 GB/s\n"
        "8 x device-pcie_switch PCIe 48.0 GB/s\n"
        "1 x host_bridge-host_bridge SYS 40.0 GB/s\n"
        "2 x host_bridge-nic PCIe 5.00 TB/s\n"
        "1 x nic-network network 1.20 GB/s\n"
        "8 x pcie_switch-host_bridge PCIe 48.0 GB/s\n"
        "GPU0 by eth0\nGPU1 by eth0\nGPU2 by eth0\nGPU3 by eth0\nGPU4 by eth0\nGPU5 by eth0\nGPU6 by eth0\nGPU7 by "
        "eth0\n");
  CHECK(cluster.notes ==
        std::vector<std::string>{"the card is h200-sxm-141gb, by its PCI device id 10de:2335",
                                 "NIC eth0 is listed at several CPUs: one NIC, joined to each",
                                 "links between sockets taken as 40.0 GB/s, NCCL's for this CPU (src/graph/topo.h)"});
  CHECK(ring(cluster, 1, 8) == doctest::Approx(370.8));
  CHECK(!problem_with(cluster));
  CHECK(read_cluster(YamlNode::parse(write_cluster(cluster), "written.yaml")) == cluster);
}

TEST_CASE("a dump of an HGX B200 has two GPUs a PCIe switch") {
  const Cluster cluster = import_file("nccl-hgx-b200-8gpu-topo.xml", options({}, "400 Gbit/s"));
  CHECK(cluster.groups.front().device.name == "b200-sxm-180gb");
  CHECK(shape(cluster) ==
        "8 x device-nvswitch NV18 722 GB/s\n"
        "8 x device-pcie_switch PCIe 48.0 GB/s\n"
        "1 x host_bridge-host_bridge SYS 40.0 GB/s\n"
        "2 x host_bridge-nic PCIe 5.00 TB/s\n"
        "1 x nic-network network 48.0 GB/s\n"
        "4 x pcie_switch-host_bridge PCIe 48.0 GB/s\n"
        "GPU0 by eth0\nGPU1 by eth0\nGPU2 by eth0\nGPU3 by eth0\nGPU4 by eth0\nGPU5 by eth0\nGPU6 by eth0\nGPU7 by "
        "eth0\n");
  CHECK(ring(cluster, 1, 8) == doctest::Approx(721.8));
}

TEST_CASE("Azure's NCv4 says no PCIe speed and has NVLinks to themselves") {
  const Cluster cluster = import_file("nccl-azure-ncv4-topo.xml", options({}));
  CHECK(cluster.groups.front().device.name == "a100-pcie-80gb");
  CHECK(shape(cluster) ==
        "4 x device-host_bridge PCIe 24.0 GB/s\n"
        "6 x host_bridge-host_bridge SYS 16.0 GB/s\n"
        "1 x host_bridge-nic PCIe 5.00 TB/s\n"
        "1 x nic-network network 12.0 GB/s\n"
        "GPU0 by eth0\nGPU1 by eth0\nGPU2 by eth0\nGPU3 by eth0\n");
  CHECK(cluster.notes ==
        std::vector<std::string>{"PCIe links of 4 GPUs not said: taken as generation 4 x16, the card's",
                                 "the card is a100-pcie-80gb, by its PCI device id 10de:20b5",
                                 "48 NVLinks from a GPU to itself are left out",
                                 "links between sockets taken as 16.0 GB/s, NCCL's for this CPU (src/graph/topo.h)"});
  CHECK(ring(cluster, 1, 4) == doctest::Approx(24.0));
}

TEST_CASE("AWS's p4d names the card and leaves NVLink and NICs to be filled in") {
  Cluster cluster = import_file("nccl-aws-p4d-24xl-topo.xml", options({}));
  CHECK(cluster.groups.front().device.name == "a100-sxm4-40gb");
  CHECK(cluster.notes ==
        std::vector<std::string>{
            "the file lists no <gpu>: its 8 PCI devices of class 0x03 in the order of their bus ids",
            "the file lists no NVLinks: each GPU's 12 taken to lead to NVSwitches",
            "4 NICs are left out, as their speed is not known: one node only; give --network for several",
            "the card is a100-sxm4-40gb, by its PCI device id 10de:20b0",
            "links between sockets taken as 10.0 GB/s, NCCL's for this CPU (src/graph/topo.h)"});
  cluster = import_file("nccl-aws-p4d-24xl-topo.xml", options({}, "100 Gbit/s", 2));
  CHECK(shape(cluster) ==
        "8 x device-nvswitch NV12 240 GB/s\n"
        "8 x device-pcie_switch PCIe 12.0 GB/s\n"
        "1 x host_bridge-host_bridge SYS 10.0 GB/s\n"
        "4 x nic-network network 12.0 GB/s\n"
        "4 x pcie_switch-host_bridge PCIe 12.0 GB/s\n"
        "4 x pcie_switch-nic PCIe 12.0 GB/s\n"
        "GPU0 by NIC0\nGPU1 by NIC0\nGPU2 by NIC1\nGPU3 by NIC1\nGPU4 by NIC2\nGPU5 by NIC2\nGPU6 by NIC3\nGPU7 by "
        "NIC3\n");
  CHECK(ring(cluster, 1, 8) == doctest::Approx(240));
}

TEST_CASE("Azure's NDv4 needs the card, and its GPUs are numbered by bus id, across NUMA nodes") {
  const std::string text = read_file(topologies + "nccl-azure-ndv4-topo.xml");
  CHECK(error_of(text, options({})) ==
        "node.xml: error: NCCL's topology file does not say the card (give --device with one of " +
            join(nvidia_card_names(catalog)) + ")");
  CHECK(error_of(text, options({}, "", 2)) ==
        "node.xml: error: NCCL's topology file does not say the card (give --device with one of " +
            join(nvidia_card_names(catalog)) +
            "), nor the speed of its NICs (give --network, such as --network '400 Gbit/s')");
  const Cluster cluster = import_file("nccl-azure-ndv4-topo.xml", options("a100-sxm4-40gb", "200 Gbit/s", 4));
  CHECK(shape(cluster) ==
        "8 x device-nvswitch NV12 240 GB/s\n"
        "8 x device-pcie_switch PCIe 24.0 GB/s\n"
        "6 x host_bridge-host_bridge SYS 16.0 GB/s\n"
        "8 x nic-network network 24.0 GB/s\n"
        "4 x pcie_switch-host_bridge PCIe 24.0 GB/s\n"
        "8 x pcie_switch-nic PCIe 24.0 GB/s\n"
        "GPU0 by NIC2\nGPU1 by NIC3\nGPU2 by NIC0\nGPU3 by NIC1\nGPU4 by NIC6\nGPU5 by NIC7\nGPU6 by NIC4\nGPU7 by "
        "NIC5\n");
}

TEST_CASE("the vendor of the processors is the first CPU's, of x86_64 alone") {
  const auto processor = [](const Cluster& cluster) { return cluster.groups.front().processor; };
  CHECK(processor(import_file("nccl-hgx-b200-8gpu-topo.xml", options({}))) == ProcessorVendor::intel);
  CHECK(processor(import_file("nccl-azure-ndv4-topo.xml", options("a100-sxm4-40gb"))) == ProcessorVendor::amd);
  const std::string text = read_file(topologies + "nccl-azure-ncv4-topo.xml");
  CHECK(processor(import_text(text, options({}))) == ProcessorVendor::amd);
  const std::string vendor = "vendor=\"AuthenticAMD\"", architecture = "arch=\"x86_64\"";
  const auto with_first = [&](const std::string& old, const std::string& instead) {
    std::string changed = text;
    changed.replace(changed.find(old), old.size(), instead);
    return processor(import_text(changed, options({})));
  };
  CHECK(with_first(vendor, "vendor=\"GenuineIntel\"") == ProcessorVendor::intel);
  CHECK(!with_first(vendor, "vendor=\"CentaurHauls\""));
  CHECK(!with_first(vendor, ""));
  CHECK(!with_first(architecture, "arch=\"arm64\""));
}

TEST_CASE("Azure's NDv2 cannot say how its V100 are joined") {
  const std::string text = read_file(topologies + "nccl-azure-ndv2-topo.xml");
  CHECK(error_of(text, options("v100-sxm2-32gb")) ==
        "node.xml: error: NCCL's topology file does not say how its 8 GPUs are joined by NVLink (give the text of "
        "nvidia-smi topo -m instead)");
  CHECK(error_of(text, options("v100-sxm2-32gb", "", 2)) ==
        "node.xml: error: NCCL's topology file does not say how its 8 GPUs are joined by NVLink (give the text of "
        "nvidia-smi topo -m instead), nor the speed of "
        "its NICs (give --network, such as --network '400 Gbit/s')");
}

TEST_CASE("AWS's g5 says of no device what it is") {
  CHECK(error_of(read_file(topologies + "nccl-aws-g5.48xl-topo.xml"), options("a10g", "100 Gbit/s")) ==
        "node.xml:14:5: error: the file does not say the class of 9 of its 9 PCI devices, so not which are GPUs; NCCL "
        "asks the machine that it runs on: let it "
        "write the whole topology there (NCCL_TOPO_DUMP_FILE=topology.xml), or give the text of nvidia-smi topo -m");
}

TEST_CASE("every card that is told by its PCI id has a kind, whose NVLinks are what NCCL counts on") {
  int known = 0;
  for (const std::string& kind : device_names(catalog)) {
    const auto capability = compute_capability_of(kind);
    if (!capability) continue;
    ++known;
    CAPTURE(kind);
    const DeviceKind device = find_device(kind, catalog);
    CHECK(device.backend == BackendKind::cuda);
    if (device.nvlinks > 0)
      CHECK(device.nvlink_per_link_reached.value / 1e9 == doctest::Approx(nvlink_bandwidth(*capability)));
  }
  CHECK(known == 28);
  CHECK(!compute_capability_of("mi300x-192gb"));
}

TEST_CASE("a card is told by its PCI device id, unless cards of several sizes have it") {
  const auto error_with = [](const char* id, const char* device) {
    return error_of(
        system_of(fmt::format("<pci busid=\"0000:01:00.0\" class=\"0x030200\" vendor=\"0x10de\" device=\"{}\"/>", id)),
        options(device));
  };
  for (const auto& [id, kind] :
       {std::pair{"0x2321", "h100-nvl-94gb"}, std::pair{"0x3182", "b300-sxm-288gb"}, std::pair{"0x2941", "gb200-186gb"},
        std::pair{"0x31c2", "gb300-288gb"}, std::pair{"0x26b9", "l40s"}})
    CHECK(error_with(id, "k80") ==
          fmt::format(
              "node.xml:3:1: error: --device k80: the GPU 0000:01:00.0 is a 10de:{}, which is {}; leave --device out",
              id + 2, kind));
  CHECK(error_with("0x2d04", "rtx-5060ti-16gb").empty());
  CHECK(error_of(system_of("<pci busid=\"0000:01:00.0\" class=\"0x030200\" vendor=\"0x10de\" device=\"0x2d04\"/>"),
                 options({}))
            .find("10de:2d04") != std::string::npos);
}

TEST_CASE("a file and the options must agree") {
  const std::string h200 = read_file(topologies + "nccl-hgx-h200-8gpu-topo.xml");
  CHECK(error_of(h200, options("h200-sxm-141gb")).empty());
  CHECK(error_of(h200, options("h100-sxm-80gb")) ==
        "node.xml:4:7: error: --device h100-sxm-80gb: the GPU 0000:83:00.0 is a 10de:2335, which is h200-sxm-141gb; "
        "leave --device out");
  CHECK(error_of(h200, options("h300")) ==
        "node.xml:4:7: error: --device h300: the GPU 0000:83:00.0 is a 10de:2335, which is h200-sxm-141gb; leave "
        "--device out");
  const std::string pair = system_of(gpu_of(0, to_nvswitch) + gpu_of(1, to_nvswitch));
  CHECK(error_of(pair, options("h100-sxm-80gb")) ==
        "node.xml:3:88: error: GPU0 has sm=\"80\", but device 'h100-sxm-80gb' is of compute capability 9.0; is "
        "--device right?");
  CHECK(error_of(system_of(gpu_of(0, to_nvswitch, "", 86)), options("a10g")) ==
        "node.xml:3:83: error: GPU0 has NVLinks, but device 'a10g' has none; is --device right?");
  CHECK(error_of(system_of(gpu_of(0, std::string(to_nvswitch) + to_nvswitch)), options("a100-sxm4-40gb")) ==
        "node.xml:3:189: error: GPU0 has 24 NVLinks or more, but device 'a100-sxm4-40gb' has 12; is --device right?");
  CHECK(error_of(pair, options("mi300x-192gb")) ==
        "error: --device mi300x-192gb: a topology of NCCL is of NVIDIA's cards, and 'mi300x-192gb' works by rocm; give "
        "one of " +
            join(nvidia_card_names(catalog)));
  CHECK(error_of(pair, options("a100-sxm4-40gb", "100 Gbit/s")) ==
        "error: --network: 'node.xml' lists no NICs, whose speed it is; leave it out for one node, or write a "
        "cluster.yaml whose node has 'nics' (docs/cluster.md)");
  CHECK(error_of(system_of("<nic><net dev=\"0\"/></nic>"), options("a10g")) ==
        "node.xml: error: the file has no GPUs (PCI devices of class 0x03)");
  CHECK(error_of(system_of("<pci busid=\"0000:01:00.0\" class=\"0x030200\" vendor=\"0x10de\" device=\"0x2335\"/>\n"
                           "<pci busid=\"0000:02:00.0\" class=\"0x030200\" vendor=\"0x10de\" device=\"0x2330\"/>"),
                 options({})) ==
        "node.xml:4:1: error: the GPU 0000:02:00.0 is a 10de:2330 and the GPU 0000:01:00.0 (line 3) a 10de:2335; "
        "parplan's nodes have GPUs of one kind");
  CHECK(error_of(system_of("<pci busid=\"0000:01:00.0\" class=\"0x030200\" vendor=\"0x10de\" device=\"0x9999\"/>"),
                 options({})) ==
        "node.xml: error: NCCL's topology file does not say the card, but that it is a 10de:9999 (give --device with "
        "one of " +
            join(nvidia_card_names(catalog)) + ")");
}

TEST_CASE("NVLinks of boards of four are pair by pair, and bridges are not assumed") {
  std::string four;
  for (int i = 0; i < 4; ++i) four += gpu_of(i);
  Cluster cluster = import_text(system_of(four), options("a100-sxm4-80gb"));
  CHECK(shape(cluster) == "6 x device-device NV4 80.0 GB/s\n4 x device-host_bridge PCIe 24.0 GB/s\n");
  CHECK(cluster.notes == std::vector<std::string>{
                             "the file lists no NVLinks: 4 of each GPU's 12 to each other GPU, as on boards of four"});
  cluster = import_text(system_of(four), options("a100-pcie-80gb"));
  CHECK(shape(cluster) == "4 x device-host_bridge PCIe 24.0 GB/s\n");
  CHECK(cluster.notes == std::vector<std::string>{"the file lists no NVLinks: no bridges between the cards"});
}

TEST_CASE("made-up switches, unknown links and odd widths") {
  const auto behind = [](const char* inside) {
    return system_of(
        std::string("<pci busid=\"0000:80:00.0\" class=\"0x060400\" link_speed=\"2.5 GT/s PCIe\" link_width=\"1\">\n") +
        inside + "</pci>");
  };
  // A hypervisor's switch is as wide as the devices behind it; a real link keeps its own width.
  Cluster cluster = import_text(behind(gpu_of(0, "", "link_speed=\"16.0 GT/s PCIe\" link_width=\"8\"").c_str()),
                                options("a100-pcie-80gb"));
  CHECK(shape(cluster) == "1 x device-pcie_switch PCIe 12.0 GB/s\n1 x pcie_switch-host_bridge PCIe 12.0 GB/s\n");
  CHECK(cluster.notes == std::vector<std::string>{
                             "1 PCIe switch of 2.5 GT/s x1 made up by a hypervisor, taken as wide as what is below"});
  cluster = import_text(behind(gpu_of(0, "", "link_speed=\"2.5 GT/s PCIe\" link_width=\"1\"").c_str()),
                        options("a100-pcie-80gb"));
  CHECK(shape(cluster) == "1 x device-pcie_switch PCIe 188 MB/s\n1 x pcie_switch-host_bridge PCIe 188 MB/s\n");
  // A GPU's unknown link is the card's; a NIC's is NCCL's default.
  const std::string nic =
      "<pci busid=\"0000:90:00.0\" class=\"0x020000\" link_speed=\"Unknown speed\" link_width=\"255\"><nic><net "
      "dev=\"0\" speed=\"-1\"/></nic></pci>\n";
  cluster = import_text(system_of(gpu_of(0, "", "link_speed=\"Unknown speed\" link_width=\"255\"") + nic),
                        options("a100-pcie-80gb"));
  CHECK(shape(cluster) ==
        "1 x device-host_bridge PCIe 24.0 GB/s\n1 x host_bridge-nic PCIe 12.0 GB/s\n1 x nic-network network 1.20 "
        "GB/s\nGPU0 by NIC0\n");
  CHECK(cluster.notes ==
        std::vector<std::string>{
            "PCIe links of 1 GPU not said: taken as generation 4 x16, the card's",
            "the speed of 1 NIC is not known, taken as 10 Gbit/s as NCCL does; --network gives another",
            "PCIe link of 1 device not known, taken as 8 GT/s x16 as NCCL does"});
}

TEST_CASE("ports of one adapter share its PCIe link, and Broadcom's two levels are one switch") {
  const std::string path = source + "/tests/data/nccl/pcie-8gpu-broadcom-4nic-topo.xml";
  const Cluster cluster = import_nccl_topology(read_file(path), path, catalog, options("a100-pcie-80gb"));
  CHECK(shape(cluster) ==
        "8 x device-pcie_switch PCIe 24.0 GB/s\n"
        "1 x host_bridge-host_bridge SYS 10.0 GB/s\n"
        "8 x nic-network network 12.0 GB/s\n"
        "2 x pcie_switch-host_bridge PCIe 24.0 GB/s\n"
        "8 x pcie_switch-nic PCIe 24.0 GB/s\n"
        "4 x pcie_switch-pcie_switch PCIe 24.0 GB/s\n"
        "GPU0 by mlx5_0\nGPU1 by mlx5_1\nGPU2 by mlx5_2\nGPU3 by mlx5_3\nGPU4 by mlx5_4\nGPU5 by mlx5_5\nGPU6 by "
        "mlx5_6\nGPU7 by mlx5_7\n");
}

TEST_CASE("C2C and NVLink to the CPU are links to the host bridge") {
  const std::string folder = source + "/tests/data/nccl/";
  const auto shape_of = [&](const char* name, const char* device) {
    return shape(import_nccl_topology(read_file(folder + name), folder + name, catalog, options(device)));
  };
  CHECK(shape_of("gh200-4gpu-c2c-4nic-topo.xml", "h100-sxm-80gb") ==
        "6 x device-device NV6 124 GB/s\n"
        "4 x device-host_bridge C2C 447 GB/s\n"
        "4 x device-host_bridge PCIe 48.0 GB/s\n"
        "6 x host_bridge-host_bridge SYS 6.00 GB/s\n"
        "4 x host_bridge-nic PCIe 48.0 GB/s\n"
        "4 x nic-network network 24.0 GB/s\n"
        "GPU0 by mlx5_0\nGPU1 by mlx5_1\nGPU2 by mlx5_2\nGPU3 by mlx5_3\n");
  CHECK(shape_of("v100-6gpu-power9-2nic-topo.xml", "v100-sxm2-32gb") ==
        "6 x device-device NV2 40.0 GB/s\n"
        "6 x device-host_bridge NV2 40.0 GB/s\n"
        "6 x device-host_bridge PCIe 12.0 GB/s\n"
        "1 x host_bridge-host_bridge SYS 32.0 GB/s\n"
        "4 x nic-network network 12.0 GB/s\n"
        "2 x pcie_switch-host_bridge PCIe 24.0 GB/s\n"
        "4 x pcie_switch-nic PCIe 24.0 GB/s\n"
        "GPU0 by mlx5_0\nGPU1 by mlx5_1\nGPU2 by mlx5_0\nGPU3 by mlx5_2\nGPU4 by mlx5_3\nGPU5 by mlx5_2\n");
}

TEST_CASE("GPUs outside of the job are left out with their NVLinks") {
  std::string text = gpu_of(0,
                            "<nvlink target=\"0000:02:00.0\" count=\"4\" tclass=\"0x030200\"/><nvlink "
                            "target=\"0000:09:00.0\" count=\"4\" tclass=\"0x030200\"/>") +
                     gpu_of(1, "<nvlink target=\"0000:01:00.0\" count=\"4\" tclass=\"0x030200\"/>") +
                     "<pci busid=\"0000:03:00.0\" class=\"0x030200\"><gpu dev=\"2\" sm=\"80\" gdr=\"1\"/></pci>\n";
  const Cluster cluster = import_text(system_of(text), options("a100-sxm4-40gb"));
  CHECK(shape(cluster) == "1 x device-device NV4 80.0 GB/s\n2 x device-host_bridge PCIe 24.0 GB/s\n");
  CHECK(cluster.notes == std::vector<std::string>{"1 GPU without a rank left out, as NCCL does",
                                                  "4 NVLinks to GPUs that the file leaves out are left out"});
}

TEST_CASE("the order of ranks is the order of devices") {
  std::string text = system_of(gpu_of(0) + gpu_of(1));
  const auto swap = [&](const char* from, const char* to) {
    text.replace(text.find(from), std::string(from).size(), to);
  };
  swap("rank=\"0\"", "rank=\"9\"");
  const NodeKind node = import_text(text, options("a100-pcie-80gb")).groups.front().node;
  REQUIRE(node.devices.size() == 2);
  CHECK(node.vertices[node.devices[0]].name == "GPU1");
  CHECK(node.vertices[node.devices[1]].name == "GPU0");
}

TEST_CASE("a completed partial file has the channels of the machine") {
  const std::string path = topologies + "nccl-aws-p4d-24xl-topo.xml";
  const NcclTopology topology = completed(read_nccl_topology(read_file(path), path),
                                          find_device("a100-sxm4-40gb", catalog), parse_bandwidth("100 Gbit/s"));
  NcclSystem system = nccl_system(topology);
  CHECK(nccl_graphs(system).front().bandwidth_intra() == doctest::Approx(240));
  system.several_nodes = true;
  // Four NICs of 12.5 GB/s behind PCIe of 12.
  CHECK(nccl_graphs(system).front().bandwidth_inter() == doctest::Approx(48));
}

TEST_CASE("cut and mangled topologies give a cluster or a ConfigError") {
  for (const auto& entry : std::filesystem::directory_iterator(topologies)) {
    const std::string path = entry.path().string();
    if (!path.ends_with(".xml")) continue;
    CAPTURE(path);
    const std::string text = read_file(path);
    const auto take = [&](const std::string& mangled) {
      bool any_device = true;
      try {
        any_device = !import_text(mangled, options({}, "100 Gbit/s")).groups.front().node.devices.empty();
      } catch (const ConfigError&) {
        return;
      }
      CHECK(any_device);
    };
    for (std::size_t length = 0; length < text.size(); length += text.size() / 50 + 1) take(text.substr(0, length));
    std::string mangled = text;
    for (std::size_t i = 0; i < 60; ++i) {
      mangled = text;
      mangled[(i * 7919) % mangled.size()] = static_cast<char>("\0<>\"0=/ "[i % 8]);
      take(mangled);
    }
  }
}
