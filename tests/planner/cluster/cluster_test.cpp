#include "planner/cluster/cluster.h"

#include <doctest/doctest.h>

#include <set>

#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/cluster/mesh.h"

using namespace parplan;

namespace {

const std::string source = PARPLAN_SOURCE_DIR;

const std::string device_text =
    "name: d\ntitle: D\nbackend: cuda\nmemory: {capacity: 10 GB, overhead: 1 GB}\npeak: {fp32: 2 TFLOP/s, half: 4 TFLOP/s}\n"
    "kernel_launch: 2 us\nrates:\n  - {active: 1, matrix_fp32: 1 TFLOP/s, matrix_half: 3 TFLOP/s, vector: 1 TFLOP/s, memory: 1 TB/s}\n";

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

std::string device_error(const std::string& from, const std::string& to) {
  try {
    read_device(YamlNode::parse(replaced(device_text, from, to), "d.yaml"));
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

// Lines 1 to 3 of every cluster below.
const std::string head = "name: c\ndevice: {name: d, title: D, backend: cuda, memory: {capacity: 10 GB, overhead: 1 GB}, peak: {fp32: 2 TFLOP/s}, kernel_launch: 2 us,\n"
                         "  rates: [{active: 1, matrix_fp32: 1 TFLOP/s, vector: 1 TFLOP/s, memory: 1 TB/s}]}\n";

std::string cluster_error(const std::string& rest) {
  try {
    read_cluster(YamlNode::parse(head + rest, "c.yaml"));
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

Cluster test_data(const std::string& name) { return read_cluster(YamlNode::load(source + "/tests/data/clusters/" + name)); }

}  // namespace

TEST_CASE("the unit cluster has eight devices of 1 FLOP/s with 1 B/s between any two") {
  const Cluster unit = test_data("unit.yaml");
  CHECK(unit.devices() == 8);
  CHECK(rates_at(unit.groups.front().device, 8) == DeviceRates{.active = 8, .matrix_fp32 = FlopsPerSecond(1), .matrix_half = FlopsPerSecond(1), .vector = FlopsPerSecond(1),
                                                .memory = BytesPerSecond(1)});
  CHECK(unit.groups.front().device.kernel_launch == Seconds(0));
  const GroupNetwork network = group_network(unit, {.degree = {1, 8, 1}, .order = parse_order("pp-dp-tp")}, Axis::dp);
  CHECK(network == GroupNetwork{.ranks = 8, .nodes = 1, .ring_bandwidth = BytesPerSecond(1), .tree_bandwidth = BytesPerSecond(1), .intra_latency = {}, .inter_latency = {}});
  CHECK(read_cluster(YamlNode::parse(write_cluster(unit), "written")) == unit);
}

TEST_CASE("cores slow one another down as their rows say") {
  const Cluster cpu = test_data("cpu-8.yaml");
  CHECK(cpu.groups.front().device.backend == BackendKind::cpu);
  CHECK(!cpu.groups.front().device.overlaps_communication);
  CHECK(rates_at(cpu.groups.front().device, 1).memory == BytesPerSecond(20e9));
  CHECK(rates_at(cpu.groups.front().device, 8).memory == BytesPerSecond(8e9));
  CHECK(rates_at(cpu.groups.front().device, 16).memory == BytesPerSecond(8e9));
  CHECK(rates_at(cpu.groups.front().device, 16).active == 16);
  CHECK(rates_at(cpu.groups.front().device, 2).matrix_fp32.value == doctest::Approx(200e9 - 40e9 / 7));  // a seventh of the way from 1 to 8
  CHECK(read_cluster(YamlNode::parse(write_cluster(cpu), "written")) == cpu);
}

TEST_CASE("peaks are by data type") {
  const DeviceKind device = read_device(YamlNode::parse(device_text, "d.yaml"));
  CHECK(peak(device, DataType::fp32) == FlopsPerSecond(2e12));
  CHECK(peak(device, DataType::bf16) == FlopsPerSecond(4e12));
  CHECK(peak(device, DataType::fp16) == FlopsPerSecond(4e12));
  CHECK(peak(device, DataType::tf32) == FlopsPerSecond(2e12));
  const DeviceKind with_tf32 = read_device(YamlNode::parse(replaced(device_text, "half: 4 TFLOP/s", "half: 4 TFLOP/s, tf32: 3 TFLOP/s"), "d.yaml"));
  CHECK(peak(with_tf32, DataType::tf32) == FlopsPerSecond(3e12));
  CHECK(peak(with_tf32, DataType::fp32) == FlopsPerSecond(2e12));
  CHECK(read_device(YamlNode::parse(write_device(with_tf32), "written")) == with_tf32);
}

TEST_CASE("a half precision without units of its own is computed as fp32, as tf32 is") {
  const DeviceKind both = read_device(YamlNode::parse(device_text, "d.yaml"));
  CHECK(has_units(both, DataType::bf16));
  CHECK(has_units(both, DataType::fp16));
  CHECK(has_units(both, DataType::fp32));
  CHECK_FALSE(has_units(both, DataType::tf32));
  const DeviceKind older = read_device(YamlNode::parse(replaced(device_text, "kernel_launch:", "half_types: [fp16]\nkernel_launch:"), "d.yaml"));
  CHECK(has_units(older, DataType::fp16));
  CHECK_FALSE(has_units(older, DataType::bf16));
  CHECK(peak(older, DataType::fp16) == FlopsPerSecond(4e12));
  CHECK(peak(older, DataType::bf16) == FlopsPerSecond(2e12));
  CHECK(read_device(YamlNode::parse(write_device(older), "written")) == older);
  const DeviceKind none = read_device(YamlNode::parse(replaced(replaced(device_text, ", half: 4 TFLOP/s", ""), "matrix_half: 3 TFLOP/s, ", ""), "d.yaml"));
  CHECK_FALSE(has_units(none, DataType::bf16));
  CHECK(peak(none, DataType::bf16) == FlopsPerSecond(2e12));
}

TEST_CASE("a board's power is optional and kept") {
  CHECK(read_device(YamlNode::parse(device_text, "d.yaml")).power == std::nullopt);
  const DeviceKind device = read_device(YamlNode::parse(replaced(device_text, "rates:", "power: 0.7 kW\nrates:"), "d.yaml"));
  CHECK(device.power == Watts(700));
  CHECK(read_device(YamlNode::parse(write_device(device), "written")) == device);
}

TEST_CASE("every backend has a name of its own, and those that run nothing say what would") {
  std::set<std::string> names;
  for (const BackendKind backend : {BackendKind::cpu, BackendKind::cuda, BackendKind::rocm, BackendKind::oneapi, BackendKind::synapse}) {
    CHECK(names.insert(name(backend)).second);
    CHECK(read_device(YamlNode::parse(replaced(device_text, "backend: cuda", std::string("backend: ") + name(backend)), "d.yaml")).backend == backend);
    CHECK(std::string(row_of(backend).runtime) != "");
    CHECK(is_accelerator(backend) == (backend != BackendKind::cpu));
    CHECK(row_of(backend).runs == (backend == BackendKind::cpu || backend == BackendKind::cuda));
  }
  CHECK(names.size() == backend_names().size());
}

TEST_CASE("what is wrong in a device file is named with its place") {
  CHECK(device_error("name: d", "nam: d") == "d.yaml:1:1: error: unknown key 'nam'; allowed: name, title, backend, memory, peak, half_types, kernel_launch, multiprocessors, "
                                             "overlaps_communication, rates, nvlink, pcie, power, driver_names, measured, sources; did you mean 'name'?");
  CHECK(device_error("backend: cuda", "backend: cude") == "d.yaml:3:10: error: expected one of cpu, cuda, rocm, oneapi, synapse, found 'cude'; did you mean 'cuda'?");
  CHECK(device_error("overhead: 1 GB", "overhead: 10 GB") == "d.yaml:4:37: error: the overhead of 10 GB leaves nothing of the capacity of 10 GB");
  CHECK(device_error("matrix_half: 3", "matrix_half: 5") == "d.yaml:8:54: error: reached rate 5 TFLOP/s is above the peak of 4 TFLOP/s");
  CHECK(device_error("matrix_half: 3", "matrix_tf32: 1") == "d.yaml:8:54: error: reached rate 1 TFLOP/s is above the peak of 0 FLOP/s");
  CHECK(device_error("matrix_fp32: 1", "matrix_fp32: 0") == "d.yaml:8:30: error: 'matrix_fp32' must be more than 0");
  CHECK(device_error("memory: 1 TB/s}", "memory: 1 TB/s}\n  - {active: 1, matrix_fp32: 1 TFLOP/s, vector: 1 TFLOP/s, memory: 1 TB/s}") ==
        "d.yaml:9:14: error: rows must ascend in 'active', found 1 after 1");
  CHECK(device_error("rates:\n  - {active: 1, matrix_fp32: 1 TFLOP/s, matrix_half: 3 TFLOP/s, vector: 1 TFLOP/s, memory: 1 TB/s}", "rates: []") ==
        "d.yaml:7:8: error: 'rates' needs at least one row");
  CHECK(device_error("rates:", "nvlink: {links: 2, per_link: 2 GB/s, per_link_reached: 3 GB/s}\nrates:") ==
        "d.yaml:7:56: error: expected more than 0 and at most the link's 2 GB/s, found 3 GB/s");
  CHECK(device_error("kernel_launch: 2 us", "kernel_launch: 2") == "d.yaml:6:16: error: expected a duration with its unit such as '2 us', found '2'; allowed units: ns, us, ms, s, min, h");
  CHECK(device_error("kernel_launch:", "half_types: [bf15]\nkernel_launch:") == "d.yaml:6:14: error: expected one of bf16, fp16, found 'bf15'; did you mean 'bf16'?");
  CHECK(device_error("kernel_launch:", "half_types: [fp16, fp16]\nkernel_launch:") == "d.yaml:6:20: error: fp16 is listed twice");
  CHECK(device_error("kernel_launch:", "half_types: []\nkernel_launch:") ==
        "d.yaml:6:13: error: expected bf16, fp16 or both; a device without units for either has no 'half' peak");
  CHECK(device_error("rates:", "power: 700\nrates:") ==
        "d.yaml:7:8: error: expected a power with its unit such as '700 W', found '700'; allowed units: mW, W, kW, MW");
  CHECK(device_error("rates:", "power: 0 W\nrates:") == "d.yaml:7:8: error: 'power' must be more than 0");
  CHECK(device_error("title: D", "name: e") == "d.yaml:2:1: error: duplicate key 'name', first given on line 1");
}

TEST_CASE("what is wrong in a cluster file is named with its place") {
  CHECK(cluster_error("nod: {}\n") ==
        "c.yaml:4:1: error: unknown key 'nod'; allowed: name, device, node, nodes, price, network, device_ids, measured_on, notes, sources; did you mean 'node'?");
  CHECK(cluster_error("node: {devices: 4}\n") == "c.yaml:4:7: error: expected a node with either 'devices' and 'intra' or 'vertices' and 'links'");
  CHECK(cluster_error("node: {devices: 4, intra: nvswitc}\n") ==
        "c.yaml:4:27: error: expected one of nvswitch, nvlink_mesh, pcie, memory, found 'nvswitc'; did you mean 'nvswitch'?");
  CHECK(cluster_error("node: {devices: 4, intra: nvswitch}\n") == "c.yaml:4:7: error: device 'd' has no NVLink; write the links' 'bandwidth'");
  CHECK(cluster_error("node: {devices: 4, intra: pcie}\n") == "c.yaml:4:7: error: device 'd' has no PCIe; write the links' 'bandwidth'");
  CHECK(cluster_error("node: {devices: 4, intra: memory}\n") ==
        "c.yaml:4:7: error: memory says nothing of its speed; write the 'bandwidth' of one device's link to it");
  CHECK(cluster_error("node: {devices: 4, intra: memory, bandwidth: 0 B/s}\n") == "c.yaml:4:46: error: a bandwidth must be more than 0");
  CHECK(cluster_error("node: {devices: 4, intra: memory, bandwidth: 1 GB/s, nics: {count: 1, line_rate: 1 Gbit/s}}\nnetwork: {latency: 0 s}\n") ==
        "c.yaml:4:7: error: device 'd' has no PCIe to reach NICs by");
  CHECK(cluster_error("node: {devices: 4, intra: memory, bandwidth: 1 GB/s}\nnodes: 2\n") == "c.yaml:4:7: error: 2 nodes, but device 'core0' reaches no NIC");
  CHECK(cluster_error("node: {devices: 4, intra: memory, bandwidth: 1 GB/s}\nnetwork: {latency: 0 s, oversubscription: 0.5}\n") ==
        "c.yaml:5:43: error: expected an oversubscription of at least 1, found 0.5");
  CHECK(cluster_error("node: {devices: 0, intra: memory, bandwidth: 1 GB/s}\n") == "c.yaml:4:17: error: expected a whole number from 1 to 4096, found '0'");
}

TEST_CASE("what is wrong in a device's name or NICs is named with its place") {
  const auto error_of = [](const std::string& text) {
    try {
      read_cluster(YamlNode::parse(text, "c.yaml"));
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(error_of("name: c\ndevice: a100\n") == "c.yaml:2:9: error: expected the device written out, found the name 'a100'");
  const std::string with_pcie = replaced(head, "rates:", "pcie: {generation: 4, lanes: 16}, rates:");
  CHECK(error_of(with_pcie + "node: {devices: 8, intra: pcie, nics: {count: 3, line_rate: 1 Gbit/s}}\nnetwork: {latency: 0 s}\n") ==
        "c.yaml:4:7: error: 3 NICs cannot be shared evenly by 8 devices; one number must divide the other, or write vertices and links");
  CHECK(error_of(with_pcie + "node: {devices: 8, intra: pcie, nics: {count: 2, line_rate: 1 Gbit/s}}\n") ==
        "c.yaml:1:1: error: a node with NICs needs 'network' with its 'latency'");
}

TEST_CASE("what is wrong in vertices and links is named with its place") {
  const std::string two = "node:\n  vertices: [{name: A, kind: device}, {name: B, kind: device}]\n";
  CHECK(cluster_error(two + "  links: []\n") == "c.yaml:5:3: error: device 'A' does not reach device 'B' over links and switches");
  CHECK(cluster_error(two + "  links: [{between: [A, C], bandwidth: 1 GB/s, latency: 0 s, kind: NV1}]\n") ==
        "c.yaml:6:25: error: unknown vertex 'C'; the node has A, B");
  CHECK(cluster_error(two + "  links: [{between: [A, A], bandwidth: 1 GB/s, latency: 0 s, kind: NV1}]\n") == "c.yaml:6:21: error: a link from 'A' to itself");
  CHECK(cluster_error(two + "  links: [{between: A, bandwidth: 1 GB/s, latency: 0 s, kind: NV1}]\n") ==
        "c.yaml:6:21: error: a link is 'between' a list of two vertices");
  CHECK(cluster_error("node:\n  vertices: [{name: A, kind: device}, {name: A, kind: device}]\n  links: []\n") ==
        "c.yaml:5:46: error: a second vertex is named 'A'");
  CHECK(cluster_error("node:\n  vertices: [{name: A, kind: nvswitch}]\n  links: []\n") == "c.yaml:5:13: error: a node needs at least one vertex of kind device");
  CHECK(cluster_error("node:\n  vertices: [{name: A, kind: device}, {name: N, kind: nic}]\n  links: []\nnetwork: {latency: 0 s}\n") ==
        "c.yaml:5:3: error: NIC 'N' has 0 links to the network; it needs one");
  CHECK(cluster_error("node:\n  vertices: [{name: A, kind: device}, {name: W, kind: network}]\n"
                      "  links: [{between: [A, W], bandwidth: 1 GB/s, latency: 0 s, kind: x}]\n") == "c.yaml:6:21: error: only NICs have links to the network");
  const std::string joined = two + "  links: [{between: [A, B], bandwidth: 1 GB/s, latency: 0 s, kind: NV1}]\n";
  CHECK(cluster_error(joined + "  devices: [A]\n") == "c.yaml:7:12: error: lists 1 of the node's 2 devices");
  CHECK(cluster_error(joined + "  devices: [A, A]\n") == "c.yaml:7:16: error: device 'A' is listed twice");
  CHECK(cluster_error(joined) == "");
}

TEST_CASE("the order of devices is kept through writing and reading") {
  const Cluster cluster = read_cluster(YamlNode::parse(head + "node:\n  vertices: [{name: A, kind: device}, {name: B, kind: device}]\n"
                                                              "  links: [{between: [A, B], bandwidth: 1 GB/s, latency: 1.5 us, kind: NV1}]\n  devices: [B, A]\n"
                                                              "measured_on: \"2026-11-21, host: a\"\nnotes: [\"a: note, with #\"]\n", "c.yaml"));
  CHECK(cluster.groups.front().node.devices == std::vector<int>{1, 0});
  CHECK(cluster.measured_on == "2026-11-21, host: a");
  CHECK(read_cluster(YamlNode::parse(write_cluster(cluster), "written")) == cluster);
}
