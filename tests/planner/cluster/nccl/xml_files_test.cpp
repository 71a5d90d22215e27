#include "planner/cluster/nccl/xml_files.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <filesystem>

#include "planner/base/error.h"
#include "planner/base/file.h"

using namespace parplan;

namespace {

const std::string source = PARPLAN_SOURCE_DIR;
const std::string topologies = source + "/tests/data/topologies/";

std::string error_of(const std::string& text) {
  try {
    read_nccl_topology(text, "node.xml");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

std::string graphs_error_of(const std::string& text) {
  try {
    read_nccl_graphs(text, "graphs.xml");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

// A topology of one CPU with this inside, in line 3.
std::string system_of(const std::string& inside) {
  return "<system version=\"1\">\n<cpu numaid=\"0\">\n" + inside + "\n</cpu>\n</system>\n";
}
std::string gpu_of(const std::string& bus, int dev, const std::string& inside = "") {
  return fmt::format(
      "<pci busid=\"{}\" class=\"0x030200\" link_speed=\"16.0 GT/s PCIe\" link_width=\"16\"><gpu dev=\"{}\" sm=\"80\" "
      "rank=\"{}\" gdr=\"1\">{}</gpu></pci>",
      bus, dev, dev, inside);
}

}  // namespace

TEST_CASE("NCCL's topology of an HGX H200 is read as it stands") {
  const std::string path = topologies + "nccl-hgx-h200-8gpu-topo.xml";
  const NcclTopology topology = read_nccl_topology(read_file(path), path);
  CHECK(topology.notes.empty());
  REQUIRE(topology.cpus.size() == 2);
  const NcclCpu& cpu = topology.cpus[1];
  CHECK(cpu.numa == 1);
  CHECK(cpu.host == 0x50209f10baa0faf1U);
  CHECK(cpu.vendor == CpuVendor::intel);
  CHECK(inter_cpu_bandwidth(cpu) == 40.0);
  REQUIRE(cpu.children.size() == 5);
  const NcclPci& bridge = cpu.children[0];
  CHECK(bridge.bus_id == 0xa1000);
  CHECK(bridge.pci_class == 0x060400);
  CHECK(bridge.where == Location{path, 48, 5});
  REQUIRE(bridge.children.size() == 1);
  const NcclPci& pci = bridge.children[0];
  CHECK(pci.is_gpu());
  CHECK(pci.vendor_id() == 0x10de);
  CHECK(pci.device_id() == 0x2335);
  CHECK(pcie_generation(pci.link_speed) == 5);
  CHECK(pci.link_width == 16);
  REQUIRE(pci.gpu);
  CHECK(pci.gpu->dev == 4);
  CHECK(pci.gpu->rank == 4);
  CHECK(pci.gpu->compute_capability == 90);
  REQUIRE(pci.gpu->nvlinks.size() == 4);
  CHECK(pci.gpu->nvlinks[0].target == 0xc4000);
  CHECK(pci.gpu->nvlinks[0].count == 5);
  CHECK(pci.gpu->nvlinks[0].target_class == 0x068000);
  REQUIRE(cpu.children[1].nets.size() == 1);
  CHECK(cpu.children[1].nets[0].name == "eth0");
  CHECK(cpu.children[1].nets[0].megabits == 10000);
  CHECK(pci_devices(topology).size() == 16);
}

TEST_CASE("every topology file reads, and every graph file") {
  int files = 0;
  for (const char* folder : {"/tests/data/topologies", "/tests/data/nccl"})
    for (const auto& entry : std::filesystem::directory_iterator(source + folder)) {
      const std::string path = entry.path().string();
      CAPTURE(path);
      if (path.ends_with("-topo.xml")) CHECK(!read_nccl_topology(read_file(path), path).cpus.empty());
      else if (path.ends_with("-graph.xml")) CHECK(read_nccl_graphs(read_file(path), path).size() >= 3);
      else continue;
      ++files;
    }
  CHECK(files == 42);
}

TEST_CASE("other XML is told by its name") {
  constexpr const char* wanted =
      "expected NCCL's topology (<system>), which NCCL writes to the file named by NCCL_TOPO_DUMP_FILE";
  CHECK(error_of("<graphs version=\"1\"/>") ==
        fmt::format("node.xml:1:1: error: found NCCL's graphs (<graphs>: rings and trees); {}", wanted));
  CHECK(error_of("<?xml version=\"1.0\"?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n<topology version=\"2.0\"/>") ==
        fmt::format("node.xml:3:1: error: found hwloc's topology (<topology>); {}", wanted));
  CHECK(error_of("<html/>") == fmt::format("node.xml:1:1: error: found <html>; {}", wanted));
  CHECK(graphs_error_of("<system version=\"1\"/>") ==
        "graphs.xml:1:1: error: found <system>; expected NCCL's graphs (<graphs>), which NCCL writes to the file named "
        "by NCCL_GRAPH_DUMP_FILE");
  CHECK(is_xml("\xEF\xBB\xBF\n <system/>"));
  CHECK(!is_xml("name: pair"));
  CHECK(!is_xml(""));
}

TEST_CASE("malformed XML is refused with its place") {
  CHECK(error_of("<system version=\"1\">\n<cpu numaid=\"0\">\n</system>") ==
        "node.xml:3:3: error: malformed XML: start-end tags mismatch");
  CHECK(error_of("<system version=1>") == "node.xml:1:17: error: malformed XML: error parsing element attribute");
  CHECK(error_of("<system") == "node.xml:1:7: error: malformed XML: error parsing start element tag");
  CHECK(error_of("<!-- nothing -->") == "node.xml:1:17: error: malformed XML: no document element found");
  CHECK(error_of("<system version=\"1\"><cpu numaid=\"0\">GPU</cpu></system>") ==
        "node.xml:1:37: error: text inside <cpu>: 'GPU'; expected elements only");
  CHECK(error_of("<system version=\"1\" version=\"1\"/>") == "node.xml:1:1: error: <system> has 'version' twice");
  CHECK(error_of("<system version=\"1\"/>\n<system version=\"1\"/>") ==
        "node.xml:2:1: error: a second <system> after the first element; expected one");
  std::string deep = "<system version=\"1\"><cpu numaid=\"0\">";
  for (int i = 0; i < 5000; ++i) deep += "<pci busid=\"0000:01:00.0\">";
  for (int i = 0; i < 5000; ++i) deep += "</pci>";
  CHECK(error_of(deep + "</cpu></system>") == "node.xml:1:843: error: <pci> is nested deeper than 32 elements");
  std::string many = "<system version=\"1\">";
  for (int i = 0; i < 5000; ++i) many += "<cpu/>";
  CHECK(error_of(many + "</system>") == "node.xml:1:6159: error: more than 1024 elements");
  many = "<system version=\"1\">";
  for (int i = 0; i < 65; ++i) many += fmt::format("\n<cpu numaid=\"{}\"/>", i);
  CHECK(error_of(many + "</system>") == "node.xml:66:1: error: more than 64 <cpu>");
}

TEST_CASE("what an element needs and what it may hold is said") {
  CHECK(error_of("<system/>") == "node.xml:1:1: error: <system> needs 'version'");
  CHECK(error_of("<system version=\"2\"/>") ==
        "node.xml:1:1: error: <system> has version=\"2\"; NCCL and parplan read version 1");
  CHECK(error_of("<system version=\"1\"/>") == "node.xml:1:1: error: <system> has no <cpu>; expected NCCL's topology");
  CHECK(error_of("<system version=\"1\"><cpu/></system>") == "node.xml:1:21: error: <cpu> needs 'numaid'");
  CHECK(error_of("<system version=\"1\"><cpu numaid=\"first\"/></system>") ==
        "node.xml:1:21: error: <cpu> has numaid=\"first\"; expected a whole number from -1 to 65536");
  CHECK(error_of("<system version=\"1\"><cpu numaid=\"0\" host_hash=\"0x123456789abcdef01\"/></system>") ==
        "node.xml:1:21: error: <cpu> has host_hash=\"0x123456789abcdef01\"; expected a hexadecimal number of at most "
        "64 bits");
  CHECK(error_of(system_of("<pci/>")) == "node.xml:3:1: error: <pci> needs 'busid'");
  CHECK(error_of(system_of("<pci busid=\"left slot\"/>")) ==
        "node.xml:3:1: error: <pci> has busid=\"left slot\"; expected a PCI bus id such as 0000:83:00.0");
  CHECK(error_of(system_of("<pci busid=\"0000:01:00.0\" class=\"display\"/>")) ==
        "node.xml:3:1: error: <pci> has class=\"display\"; expected a PCI class such as 0x030200");
  CHECK(error_of(system_of("<pci busid=\"0000:01:00.0\" device=\"0x12345\"/>")) ==
        "node.xml:3:1: error: <pci> has device=\"0x12345\"; expected at most 0xffff");
  CHECK(error_of(system_of("<pci busid=\"0000:01:00.0\" link_width=\"1000000\"/>")) ==
        "node.xml:3:1: error: <pci> has link_width=\"1000000\"; expected a whole number from 0 to 255");
  CHECK(error_of(system_of("<pci busid=\"0000:01:00.0\" link_width=\"7\"/>")) ==
        "node.xml:3:1: error: <pci> has link_width=\"7\"; PCIe links have 1, 2, 4, 8, 12, 16 or 32 lanes, 0 where not "
        "known");
  CHECK(error_of(system_of("<pci busid=\"0000:01:00.0\" link_speed=\"fast\"/>")) ==
        "node.xml:3:1: error: <pci> has link_speed=\"fast\"; expected 2.5, 5, 8, 16, 32 or 64 GT/s, such as \"16.0 "
        "GT/s PCIe\", or \"\" where not known");
  CHECK(error_of(system_of("<pci busid=\"0000:01:00.0\" class=\"0x030200\"><gpu dev=\"0\" rank=\"0\"/></pci>")) ==
        "node.xml:3:44: error: <gpu> needs 'sm'");
  CHECK(error_of(system_of(gpu_of("0000:01:00.0", 0, "<nvlink target=\"0000:02:00.0\" count=\"0\"/>"))) ==
        "node.xml:3:126: error: <nvlink> has count=\"0\"; expected a whole number from 1 to 1024");
  CHECK(error_of(system_of(
            gpu_of("0000:01:00.0", 0, "<nvlink target=\"0000:02:00.0\" count=\"1\" tclass=\"0x020000\"/>"))) ==
        "node.xml:3:126: error: <nvlink> to class 0x020000; expected a GPU (0x03....), an NVSwitch (0x068000) or a CPU "
        "(0x068001)");
  CHECK(error_of(system_of("<nic><net dev=\"0\" speed=\"fast\"/></nic>")) ==
        "node.xml:3:6: error: <net> has speed=\"fast\"; expected a whole number from -1 on");
  CHECK(error_of(system_of("<nic><net dev=\"0\" latency=\"nan\"/></nic>")) ==
        "node.xml:3:6: error: <net> has latency=\"nan\"; expected a number from 0 on");
}

TEST_CASE("a topology that contradicts itself is refused with both places") {
  CHECK(error_of(system_of(gpu_of("0000:01:00.0", 0) + "\n" + gpu_of("0000:01:00.0", 1))) ==
        "node.xml:4:1: error: a second <pci> with busid 0000:01:00.0; the first is line 3");
  CHECK(error_of(system_of(gpu_of("0000:01:00.0", 0) + "\n" + gpu_of("0000:02:00.0", 0))) ==
        "node.xml:4:88: error: a second <gpu> with dev 0; the first is line 3");
  CHECK(error_of("<system version=\"1\">\n<cpu numaid=\"0\"/>\n<cpu numaid=\"0\"/>\n</system>") ==
        "node.xml:3:1: error: a second <cpu> with numaid 0; the first is line 2");
  CHECK(error_of("<system version=\"1\">\n<cpu numaid=\"0\" host_hash=\"0x1\"/>\n<cpu numaid=\"0\" "
                 "host_hash=\"0x2\"/>\n</system>") ==
        "node.xml:3:1: error: a second host (host_hash of the <cpu> in line 2 is another); parplan reads one node from "
        "a file and repeats it by --nodes: keep "
        "the <cpu> elements of one host");
  CHECK(error_of(system_of(
            "<pci busid=\"0000:03:00.0\" class=\"0x020000\"/>\n" +
            gpu_of("0000:01:00.0", 0, "<nvlink target=\"0000:03:00.0\" count=\"1\" tclass=\"0x030200\"/>"))) ==
        "node.xml:4:126: error: <nvlink> to 0000:03:00.0, which is no GPU (line 3)");
  CHECK(error_of(system_of(
            gpu_of("0000:01:00.0", 0) + "\n" +
            gpu_of("0000:02:00.0", 1, "<nvlink target=\"0000:01:00.0\" count=\"1\" tclass=\"0x068000\"/>"))) ==
        "node.xml:4:126: error: <nvlink> to 0000:01:00.0 says class 0x068000, but that is a GPU (line 3)");
  CHECK(error_of(system_of(
            gpu_of("0000:01:00.0", 0, "<nvlink target=\"0000:02:00.0\" count=\"2\" tclass=\"0x030200\"/>") + "\n" +
            gpu_of("0000:02:00.0", 1, "<nvlink target=\"0000:01:00.0\" count=\"1\" tclass=\"0x030200\"/>"))) ==
        "node.xml:3:126: error: 2 NVLinks from 0000:01:00.0 to 0000:02:00.0, but 1 back (line 4)");
  CHECK(error_of(system_of("<nic><net dev=\"0\" name=\"eth0\"/></nic>\n<nic><net dev=\"0\" name=\"eth1\"/></nic>")) ==
        "node.xml:4:6: error: a second <net> with dev 0; the first is line 3");
  CHECK(error_of(
            system_of("<pci busid=\"0000:01:00.0\" class=\"0x020000\"><gpu dev=\"0\" sm=\"80\" rank=\"0\"/></pci>")) ==
        "node.xml:3:1: error: <pci> has a <gpu> but class=\"0x020000\", which is no GPU's; those begin with 0x03");
  CHECK(error_of(system_of("<pci busid=\"0000:01:00.0\" class=\"0x030200\"><gpu dev=\"0\" sm=\"100\" rank=\"0\"/><gpu "
                           "dev=\"1\" sm=\"100\" rank=\"1\"/></pci>")) ==
        "node.xml:3:76: error: a second <gpu> in one PCI device is a GPU that ranks share; parplan gives each rank its "
        "own");
  CHECK(error_of(system_of(
            "<pci busid=\"0000:01:00.0\" class=\"0x030200\"><pci busid=\"0000:02:00.0\" class=\"0x030200\"/></pci>")) ==
        "node.xml:3:44: error: <pci> inside of a GPU, NIC or NVSwitch; only bridges have devices behind them");
  CHECK(
      error_of(system_of("<pci busid=\"0000:01:00.0\" class=\"0x060400\"><pcilink target=\"0000:01:00.0\"/></pci>")) ==
      "node.xml:3:1: error: <pcilink> from 0000:01:00.0 to itself");
}

TEST_CASE("elements that NCCL does not know are left out, and named") {
  const NcclTopology topology = read_nccl_topology(
      system_of(gpu_of("0000:01:00.0", 0, "<nvlnk target=\"0000:02:00.0\" count=\"1\"/>")), "node.xml");
  CHECK(topology.notes ==
        std::vector<std::string>{"<nvlnk> in <gpu> (line 3) left out, as NCCL does; did you mean 'nvlink'?"});
}

TEST_CASE("NVLinks without a class lead to the GPU of the file, else to NVSwitches") {
  const NcclTopology topology = read_nccl_topology(
      system_of(gpu_of("0000:01:00.0", 0,
                       "<nvlink target=\"0000:02:00.0\" count=\"1\"/><nvlink target=\"0000:09:00.0\" count=\"2\"/>") +
                gpu_of("0000:02:00.0", 1, "<nvlink target=\"0000:01:00.0\" count=\"1\"/>")),
      "node.xml");
  const std::vector<NcclNvlink>& links = topology.cpus.front().children.front().gpu->nvlinks;
  REQUIRE(links.size() == 2);
  CHECK(links[0].target_class == 0x030200);
  CHECK(links[1].target_class == 0x068000);
}

TEST_CASE("NCCL's figures for links between CPUs, and for NVLinks by generation") {
  const auto intel = [](int model) {
    return inter_cpu_bandwidth({.host = {},
                                .architecture = CpuArchitecture::x86,
                                .vendor = CpuVendor::intel,
                                .family = 6,
                                .model = model,
                                .children = {},
                                .where = {}});
  };
  CHECK(intel(0x4f) == 6.0);   // Broadwell
  CHECK(intel(0x55) == 10.0);  // Skylake
  CHECK(intel(0x8f) == 22.0);  // Sapphire Rapids
  CHECK(intel(0xcf) == 40.0);  // Emerald Rapids
  CHECK(
      inter_cpu_bandwidth(
          {.host = {}, .architecture = CpuArchitecture::x86, .vendor = CpuVendor::amd, .children = {}, .where = {}}) ==
      16.0);
  CHECK(nvlink_bandwidth(60) == 18.0);
  CHECK(nvlink_bandwidth(75) == 20.0);
  CHECK(nvlink_bandwidth(80) == 20.0);
  CHECK(nvlink_bandwidth(86) == 12.0);
  CHECK(nvlink_bandwidth(89) == 20.0);
  CHECK(nvlink_bandwidth(90) == 20.6);
  CHECK(nvlink_bandwidth(103) == 40.1);
}

TEST_CASE("graph files that do not hold together are refused") {
  constexpr const char* head =
      "<graphs version=\"1\"><graph id=\"0\" pattern=\"4\" crossnic=\"0\" nchannels=\"{}\" speedintra=\"{}\" "
      "speedinter=\"12\" "
      "typeintra=\"{}\" typeinter=\"PIX\" samechannels=\"0\"><channel><gpu dev=\"{}\"/></channel></graph></graphs>";
  const auto text = [&](const char* channels, const char* speed, const char* type, const char* dev) {
    return fmt::format(fmt::runtime(head), channels, speed, type, dev);
  };
  CHECK(graphs_error_of(text("1", "12", "SYS", "0x3")).empty());
  CHECK(graphs_error_of(text("2", "12", "SYS", "0")) ==
        "graphs.xml:1:21: error: <graph> has nchannels=\"2\" but 1 <channel>");
  CHECK(graphs_error_of(text("1", "-1", "SYS", "0")) ==
        "graphs.xml:1:21: error: <graph> has speedintra=\"-1\"; expected a number from 0 on");
  CHECK(graphs_error_of(text("1", "12", "NEAR", "0")) ==
        "graphs.xml:1:21: error: <graph> has typeintra=\"NEAR\"; expected one of LOC, NVL, NVB, C2C, PIX, PXB, P2C, "
        "PXN, PHB, SYS, NET, DIS");
  CHECK(graphs_error_of(text("1", "12", "SYS", "first")) ==
        "graphs.xml:1:164: error: <gpu> has dev=\"first\"; expected a hexadecimal number");
}
