#include "planner/cluster/cluster.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <set>

#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/cluster/group_network.h"
#include "planner/cluster/mesh.h"
#include "planner/cluster/node_layout.h"
#include "planner/graph/engine.h"

using namespace parplan;

namespace {

const std::string source = PARPLAN_SOURCE_DIR;

const std::string device_text =
    "name: d\ntitle: D\nbackend: cuda\nmemory: {capacity: 10 GB, overhead: 1 GB}\npeak: {fp32: 2 TFLOP/s, half: 4 "
    "TFLOP/s}\n"
    "kernel_launch: 2 us\nrates:\n  - {active: 1, matrix_fp32: 1 TFLOP/s, matrix_half: 3 TFLOP/s, vector: 1 TFLOP/s, "
    "memory: 1 TB/s}\n";

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
const std::string head =
    "name: c\ndevice: {name: d, title: D, backend: cuda, memory: {capacity: 10 GB, overhead: 1 GB}, peak: {fp32: 2 "
    "TFLOP/s}, kernel_launch: 2 us,\n"
    "  rates: [{active: 1, matrix_fp32: 1 TFLOP/s, vector: 1 TFLOP/s, memory: 1 TB/s}]}\n";

std::string cluster_error(const std::string& rest) {
  try {
    read_cluster(YamlNode::parse(head + rest, "c.yaml"));
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

Cluster test_data(const std::string& name) {
  return read_cluster(YamlNode::load(source + "/tests/data/clusters/" + name));
}

}  // namespace

TEST_CASE("the unit cluster has eight devices of 1 FLOP/s with 1 B/s between any two") {
  const Cluster unit = test_data("unit.yaml");
  CHECK(unit.devices() == 8);
  CHECK(rates_at(unit.groups.front().device, 8) == DeviceRates{.active = 8,
                                                               .matrix_fp32 = FlopsPerSecond(1),
                                                               .matrix_half = FlopsPerSecond(1),
                                                               .vector = FlopsPerSecond(1),
                                                               .memory = BytesPerSecond(1)});
  CHECK(unit.groups.front().device.kernel_launch == Seconds(0));
  const GroupNetwork network = group_network(unit, {.degree = {.dp = 8}, .order = parse_order("pp-dp-tp")}, Axis::dp);
  CHECK(network == GroupNetwork{.ranks = 8,
                                .nodes = 1,
                                .ring_bandwidth = BytesPerSecond(1),
                                .tree_bandwidth = BytesPerSecond(1),
                                .intra_latency = {},
                                .inter_latency = {}});
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
  CHECK(rates_at(cpu.groups.front().device, 2).matrix_fp32.value ==
        doctest::Approx(200e9 - 40e9 / 7));  // a seventh of the way from 1 to 8
  CHECK(read_cluster(YamlNode::parse(write_cluster(cpu), "written")) == cpu);
}

TEST_CASE("peaks are by data type") {
  const DeviceKind device = read_device(YamlNode::parse(device_text, "d.yaml"));
  CHECK(peak(device, DataType::fp32) == FlopsPerSecond(2e12));
  CHECK(peak(device, DataType::bf16) == FlopsPerSecond(4e12));
  CHECK(peak(device, DataType::fp16) == FlopsPerSecond(4e12));
  CHECK(peak(device, DataType::tf32) == FlopsPerSecond(2e12));
  const DeviceKind with_tf32 = read_device(
      YamlNode::parse(replaced(device_text, "half: 4 TFLOP/s", "half: 4 TFLOP/s, tf32: 3 TFLOP/s"), "d.yaml"));
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
  const DeviceKind older = read_device(
      YamlNode::parse(replaced(device_text, "kernel_launch:", "half_types: [fp16]\nkernel_launch:"), "d.yaml"));
  CHECK(has_units(older, DataType::fp16));
  CHECK_FALSE(has_units(older, DataType::bf16));
  CHECK(peak(older, DataType::fp16) == FlopsPerSecond(4e12));
  CHECK(peak(older, DataType::bf16) == FlopsPerSecond(2e12));
  CHECK(read_device(YamlNode::parse(write_device(older), "written")) == older);
  const DeviceKind none = read_device(YamlNode::parse(
      replaced(replaced(device_text, ", half: 4 TFLOP/s", ""), "matrix_half: 3 TFLOP/s, ", ""), "d.yaml"));
  CHECK_FALSE(has_units(none, DataType::bf16));
  CHECK(peak(none, DataType::bf16) == FlopsPerSecond(2e12));
}

TEST_CASE("kernels that parplan measure timed are those of parplan's own runtime") {
  Cluster cluster;
  cluster.groups.resize(2);
  for (NodeGroup& group : cluster.groups) group.device.measured.emplace().fits = {KernelFit{}};
  const Cluster before = cluster;
  keep_kernels_of(Engine{}, cluster);
  CHECK(cluster == before);
  keep_kernels_of(Engine{.name = "other"}, cluster);
  for (const NodeGroup& group : cluster.groups) CHECK_FALSE(group.device.measured.has_value());
}

TEST_CASE("the share that a step sustains of measured loops is kept, and is no more than all") {
  const auto with_share = [](const std::string& share) {
    return "memory: 1 TB/s, sustained: {half: 2 TFLOP/s, share: " + share + "}}";
  };
  const DeviceKind device =
      read_device(YamlNode::parse(replaced(device_text, "memory: 1 TB/s}", with_share("0.91")), "d.yaml"));
  CHECK(device.rates.front().sustained_share == 0.91);
  CHECK(read_device(YamlNode::parse(write_device(device), "written")) == device);
  for (const char* share : {"0", "1.01", "-1"})
    CHECK(device_error("memory: 1 TB/s}", with_share(share)).find("expected more than 0 and at most 1, found '") !=
          std::string::npos);
}

TEST_CASE("rates have the origins that a file states, else the datasheet, and keep them") {
  const std::string to =
      "memory: 1 TB/s, sustained: {half: 2 TFLOP/s}, origins: {measured: [matrix_half, kernel_launch], "
      "interpolated: [sustained.half]}}";
  const DeviceKind device = read_device(YamlNode::parse(replaced(device_text, "memory: 1 TB/s}", to), "d.yaml"));
  const RateOrigins& origins = device.rates.front().origins;
  CHECK(origins[Rate::matrix_half] == Origin::measured);
  CHECK(origins[Rate::kernel_launch] == Origin::measured);
  CHECK(origins[Rate::sustained_half] == Origin::interpolated);
  CHECK(origins[Rate::memory] == Origin::datasheet);
  CHECK(read_device(YamlNode::parse(write_device(device), "written")) == device);
  CHECK(read_device(YamlNode::parse(device_text, "d.yaml")).rates.front().origins == RateOrigins{});
  const auto error_with = [](const std::string& list) {
    return device_error("memory: 1 TB/s}", "memory: 1 TB/s, origins: " + list + "}");
  };
  CHECK(error_with("{measured: [sustained.half]}") ==
        "d.yaml:8:121: error: an origin of sustained.half, which the row does not state; state it, or leave the origin "
        "out");
  CHECK(error_with("{measured: [memory], datasheet: [memory]}") == "d.yaml:8:142: error: memory has two origins");
  CHECK(error_with("{guessed: [memory]}").find("allowed: measured, interpolated, datasheet") != std::string::npos);
  CHECK(error_with("{measured: [memry]}").find("did you mean 'memory'?") != std::string::npos);
  // Between two rows, a rate is as sure as the less sure.
  DeviceKind two = device;
  two.rates.push_back(device.rates.front());
  two.rates.back().active = 3;
  two.rates.back().origins[Rate::matrix_half] = Origin::interpolated;
  CHECK(rates_at(two, 1).origins[Rate::matrix_half] == Origin::measured);
  CHECK(rates_at(two, 2).origins[Rate::matrix_half] == Origin::interpolated);
}

TEST_CASE("a board's power is optional and kept") {
  CHECK(read_device(YamlNode::parse(device_text, "d.yaml")).power == std::nullopt);
  const DeviceKind device =
      read_device(YamlNode::parse(replaced(device_text, "rates:", "power: 0.7 kW\nrates:"), "d.yaml"));
  CHECK(device.power == Watts(700));
  CHECK(read_device(YamlNode::parse(write_device(device), "written")) == device);
}

TEST_CASE("every backend has a name of its own, and those that run nothing say what would") {
  std::set<std::string> names;
  for (const BackendKind backend :
       {BackendKind::cpu, BackendKind::cuda, BackendKind::rocm, BackendKind::oneapi, BackendKind::synapse}) {
    CHECK(names.insert(name(backend)).second);
    CHECK(read_device(YamlNode::parse(replaced(device_text, "backend: cuda", std::string("backend: ") + name(backend)),
                                      "d.yaml"))
              .backend == backend);
    CHECK(std::string(row_of(backend).runtime) != "");
    CHECK(is_accelerator(backend) == (backend != BackendKind::cpu));
    CHECK(row_of(backend).runs == (backend == BackendKind::cpu || backend == BackendKind::cuda));
  }
  CHECK(names.size() == backend_names().size());
}

TEST_CASE("what is wrong in a device file is named with its place") {
  CHECK(device_error("name: d", "nam: d") ==
        "d.yaml:1:1: error: unknown key 'nam'; allowed: name, title, backend, memory, peak, half_types, kernel_launch, "
        "multiprocessors, "
        "overlaps_communication, rates, nvlink, pcie, power, driver_names, measured, sources; did you mean 'name'?");
  CHECK(device_error("backend: cuda", "backend: cude") ==
        "d.yaml:3:10: error: expected one of cpu, cuda, rocm, oneapi, synapse, found 'cude'; did you mean 'cuda'?");
  CHECK(device_error("overhead: 1 GB", "overhead: 10 GB") ==
        "d.yaml:4:37: error: the overhead of 10 GB leaves nothing of the capacity of 10 GB");
  CHECK(device_error("matrix_half: 3", "matrix_half: 5") ==
        "d.yaml:8:54: error: reached rate 5 TFLOP/s is above the peak of 4 TFLOP/s");
  CHECK(device_error("matrix_half: 3", "matrix_tf32: 1") ==
        "d.yaml:8:54: error: reached rate 1 TFLOP/s is above the peak of 0 FLOP/s");
  CHECK(device_error("matrix_fp32: 1", "matrix_fp32: 0") == "d.yaml:8:30: error: 'matrix_fp32' must be more than 0");
  CHECK(device_error("memory: 1 TB/s}",
                     "memory: 1 TB/s}\n  - {active: 1, matrix_fp32: 1 TFLOP/s, vector: 1 TFLOP/s, memory: 1 TB/s}") ==
        "d.yaml:9:14: error: rows must ascend in 'active', found 1 after 1");
  CHECK(
      device_error(
          "rates:\n  - {active: 1, matrix_fp32: 1 TFLOP/s, matrix_half: 3 TFLOP/s, vector: 1 TFLOP/s, memory: 1 TB/s}",
          "rates: []") == "d.yaml:7:8: error: 'rates' needs at least one row");
  CHECK(device_error("rates:", "nvlink: {links: 2, per_link: 2 GB/s, per_link_reached: 3 GB/s}\nrates:") ==
        "d.yaml:7:56: error: expected more than 0 and at most the link's 2 GB/s, found 3 GB/s");
  CHECK(device_error("kernel_launch: 2 us", "kernel_launch: 2") ==
        "d.yaml:6:16: error: expected a duration with its unit such as '2 us', found '2'; allowed units: ns, us, ms, "
        "s, min, h");
  CHECK(device_error("kernel_launch:", "half_types: [bf15]\nkernel_launch:") ==
        "d.yaml:6:14: error: expected one of bf16, fp16, found 'bf15'; did you mean 'bf16'?");
  CHECK(device_error("kernel_launch:", "half_types: [fp16, fp16]\nkernel_launch:") ==
        "d.yaml:6:20: error: fp16 is listed twice");
  CHECK(device_error("kernel_launch:", "half_types: []\nkernel_launch:") ==
        "d.yaml:6:13: error: expected bf16, fp16 or both; a device without units for either has no 'half' peak");
  CHECK(device_error("rates:", "power: 700\nrates:") ==
        "d.yaml:7:8: error: expected a power with its unit such as '700 W', found '700'; allowed units: mW, W, kW, MW");
  CHECK(device_error("rates:", "power: 0 W\nrates:") == "d.yaml:7:8: error: 'power' must be more than 0");
  CHECK(device_error("title: D", "name: e") == "d.yaml:2:1: error: duplicate key 'name', first given on line 1");
}

TEST_CASE("what is wrong in a cluster file is named with its place") {
  CHECK(cluster_error("nod: {}\n") ==
        "c.yaml:4:1: error: unknown key 'nod'; allowed: name, device, node, nodes, price, processor, host, nvme, "
        "groups, network, device_ids, memory_headroom, measured_on, calibrated, notes, sources; did you mean 'node' or "
        "'nodes'?");
  CHECK(cluster_error("node: {devices: 4}\n") ==
        "c.yaml:4:7: error: expected a node with either 'devices' and 'intra' or 'vertices' and 'links'");
  CHECK(cluster_error("node: {devices: 4, intra: nvswitc}\n") ==
        "c.yaml:4:27: error: expected one of nvswitch, nvlink_mesh, pcie, memory, found 'nvswitc'; did you mean "
        "'nvswitch'?");
  CHECK(cluster_error("node: {devices: 4, intra: nvswitch}\n") ==
        "c.yaml:4:7: error: device 'd' has no NVLink; write the links' 'bandwidth'");
  CHECK(cluster_error("node: {devices: 4, intra: pcie}\n") ==
        "c.yaml:4:7: error: device 'd' has no PCIe; write the links' 'bandwidth'");
  CHECK(cluster_error("node: {devices: 4, intra: memory}\n") ==
        "c.yaml:4:7: error: memory says nothing of its speed; write the 'bandwidth' of one device's link to it");
  CHECK(cluster_error("node: {devices: 4, intra: memory, bandwidth: 0 B/s}\n") ==
        "c.yaml:4:46: error: a bandwidth must be more than 0");
  CHECK(cluster_error("node: {devices: 4, intra: memory, bandwidth: 1 GB/s, nics: {count: 1, line_rate: 1 "
                      "Gbit/s}}\nnetwork: {latency: 0 s}\n") ==
        "c.yaml:4:7: error: device 'd' has no PCIe to reach NICs by");
  CHECK(cluster_error("node: {devices: 4, intra: memory, bandwidth: 1 GB/s}\nnodes: 2\n") ==
        "c.yaml:4:7: error: 2 nodes, but device 'core0' reaches no NIC");
  CHECK(cluster_error(
            "node: {devices: 4, intra: memory, bandwidth: 1 GB/s}\nnetwork: {latency: 0 s, oversubscription: 0.5}\n") ==
        "c.yaml:5:43: error: expected an oversubscription from 1 to 1000000, found '0.5'");
  CHECK(cluster_error("node: {devices: 0, intra: memory, bandwidth: 1 GB/s}\n") ==
        "c.yaml:4:17: error: expected a whole number from 1 to 1024, found '0'");
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
  CHECK(error_of("name: c\ndevice: a100\n") ==
        "c.yaml:2:9: error: expected the device written out, found the name 'a100'");
  const std::string with_pcie = replaced(head, "rates:", "pcie: {generation: 4, lanes: 16}, rates:");
  CHECK(error_of(with_pcie +
                 "node: {devices: 8, intra: pcie, nics: {count: 3, line_rate: 1 Gbit/s}}\nnetwork: {latency: 0 s}\n") ==
        "c.yaml:4:7: error: 3 NICs cannot be shared evenly by 8 devices; one number must divide the other, or write "
        "vertices and links");
  CHECK(error_of(with_pcie + "node: {devices: 8, intra: pcie, nics: {count: 2, line_rate: 1 Gbit/s}}\n") ==
        "c.yaml:1:1: error: a node with NICs needs 'network' with its 'latency'");
  CHECK(error_of(with_pcie +
                 "node: {devices: 8, intra: pcie, nics: {count: 2, line_rate: 8 Gbit/s, reached: 9 Gbit/s}}\n" +
                 "network: {latency: 0 s}\n") == "c.yaml:4:80: error: a NIC reaches no more than its line rate");
}

TEST_CASE("what is wrong in vertices and links is named with its place") {
  const std::string two = "node:\n  vertices: [{name: A, kind: device}, {name: B, kind: device}]\n";
  CHECK(cluster_error(two + "  links: []\n") ==
        "c.yaml:5:3: error: device 'A' does not reach device 'B' over links and switches");
  CHECK(cluster_error(two + "  links: [{between: [A, C], bandwidth: 1 GB/s, latency: 0 s, kind: NV1}]\n") ==
        "c.yaml:6:25: error: unknown vertex 'C'; the node has A, B");
  CHECK(cluster_error(two + "  links: [{between: [A, A], bandwidth: 1 GB/s, latency: 0 s, kind: NV1}]\n") ==
        "c.yaml:6:21: error: a link from 'A' to itself");
  CHECK(cluster_error(two + "  links: [{between: A, bandwidth: 1 GB/s, latency: 0 s, kind: NV1}]\n") ==
        "c.yaml:6:21: error: a link is 'between' a list of two vertices");
  CHECK(cluster_error("node:\n  vertices: [{name: A, kind: device}, {name: A, kind: device}]\n  links: []\n") ==
        "c.yaml:5:46: error: a second vertex is named 'A'");
  CHECK(cluster_error("node:\n  vertices: [{name: A, kind: nvswitch}]\n  links: []\n") ==
        "c.yaml:5:13: error: a node needs at least one vertex of kind device");
  CHECK(cluster_error("node:\n  vertices: [{name: A, kind: device}, {name: N, kind: nic}]\n  links: []\nnetwork: "
                      "{latency: 0 s}\n") == "c.yaml:5:3: error: NIC 'N' has 0 links to the network; it needs one");
  CHECK(cluster_error("node:\n  vertices: [{name: A, kind: device}, {name: W, kind: network}]\n"
                      "  links: [{between: [A, W], bandwidth: 1 GB/s, latency: 0 s, kind: x}]\n") ==
        "c.yaml:6:21: error: only NICs have links to the network");
  const std::string joined = two + "  links: [{between: [A, B], bandwidth: 1 GB/s, latency: 0 s, kind: NV1}]\n";
  CHECK(cluster_error(joined + "  devices: [A]\n") == "c.yaml:7:12: error: lists 1 of the node's 2 devices");
  CHECK(cluster_error(joined + "  devices: [A, A]\n") == "c.yaml:7:16: error: device 'A' is listed twice");
  CHECK(cluster_error(joined) == "");
}

TEST_CASE("the order of devices is kept through writing and reading") {
  const Cluster cluster = read_cluster(YamlNode::parse(
      head + "node:\n  vertices: [{name: A, kind: device}, {name: B, kind: device}]\n"
             "  links: [{between: [A, B], bandwidth: 1 GB/s, latency: 1.5 us, kind: NV1}]\n  devices: [B, A]\n"
             "measured_on: \"2026-11-21, host: a\"\nnotes: [\"a: note, with #\"]\n",
      "c.yaml"));
  CHECK(cluster.groups.front().node.devices == std::vector<int>{1, 0});
  CHECK(cluster.measured_on == "2026-11-21, host: a");
  CHECK(read_cluster(YamlNode::parse(write_cluster(cluster), "written")) == cluster);
}

namespace {

const std::string one_device =
    "{name: d, title: D, backend: cuda, memory: {capacity: 10 GB, overhead: 1 GB}, peak: {fp32: 2 TFLOP/s}, "
    "kernel_launch: 2 us, "
    "pcie: {generation: 3, lanes: 16}, rates: [{active: 1, matrix_fp32: 1 TFLOP/s, vector: 1 TFLOP/s, memory: 1 "
    "TB/s}]}";
const std::string with_nics =
    "node: {devices: 2, intra: nvswitch, bandwidth: 1 GB/s, nics: {count: 2, line_rate: 8 Gbit/s}}";

std::string error_in(const std::string& text) {
  try {
    read_cluster(YamlNode::parse(text, "c.yaml"));
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}
// Line 3 is the network.
std::string network_error(const std::string& network, int nodes = 4, const std::string& node = with_nics) {
  return error_in("name: c\n" + node + "\nnetwork: " + network + "\ndevice: " + one_device +
                  "\nnodes: " + std::to_string(nodes) + "\n");
}

}  // namespace

TEST_CASE("clusters of unlike nodes are written and read back, with everything that networks may say") {
  const std::string text =
      "name: two kinds\ngroups:\n  - device: " + one_device + "\n    " + with_nics +
      "\n    nodes: 3\n    price: 2.5 USD\n    processor: amd\n  - device: " +
      replaced(one_device, "{name: d", "{name: e") +
      "\n    node: {devices: 4, intra: nvlink_mesh, bandwidth: 1 GB/s, nics: {count: 2, line_rate: 8 Gbit/s}}\n"
      "network: {latency: 1 us, post_overhead: 3 us, ring_protocols: [ll128, ll], tree_protocols: [], transfer_chunk: "
      "512 KiB, rails: true, pxn: false, "
      "levels: [{name: leaf, nodes: 2}, {nodes: 4, oversubscription: "
      "3, latency: 2.5 us}, "
      "{name: core, oversubscription: 7}]}\nsources: [\"made up\"]\n";
  const Cluster cluster = read_cluster(YamlNode::parse(text, "c.yaml"));
  CHECK(cluster.nodes() == 4);
  CHECK(cluster.devices() == 10);
  CHECK(device_name(cluster) == "d+e");
  CHECK(cluster.groups[1].nodes == 1);
  CHECK(cluster.groups[0].price == Price{.per_device_hour = 2.5, .currency = "USD"});
  CHECK(cluster.groups[0].processor == ProcessorVendor::amd);
  CHECK(!cluster.groups[1].processor);
  CHECK(cluster.group_of(5).device.name == "d");
  CHECK(cluster.group_of(6).device.name == "e");
  CHECK(cluster.network ==
        Network{.latency = Seconds(1e-6),
                .post_overhead = Seconds(3e-6),
                .ring_protocols = {.simple = false, .low_latency = true, .low_latency_128 = true},
                .tree_protocols = {.simple = false, .low_latency = false},
                .transfer_chunk = Bytes(512 << 10),
                .levels = {{.name = "leaf", .nodes = 2, .oversubscription = 1, .latency = Seconds(1e-6)},
                           {.name = "level 2", .nodes = 4, .oversubscription = 3, .latency = Seconds(2.5e-6)},
                           {.name = "core", .nodes = std::nullopt, .oversubscription = 7, .latency = Seconds(2.5e-6)}},
                .rails = true,
                .pxn = false});
  CHECK(read_cluster(YamlNode::parse(write_cluster(cluster), "written")) == cluster);
  CHECK(write_cluster(read_cluster(YamlNode::parse(write_cluster(cluster), "written"))) == write_cluster(cluster));
}

TEST_CASE("a measured overhead without the protocols that once followed from it is noted, until they are stated") {
  const auto read = [](const std::string& network) {
    return read_cluster(YamlNode::parse("name: c\n" + std::string(with_nics) + "\nnetwork: " + network + "\ndevice: " +
                                            one_device + "\nnodes: 4\n",
                                        "c.yaml"));
  };
  const Cluster alone = read("{latency: 1 us, post_overhead: 8 us}");
  const std::string note =
      "'post_overhead' was given without 'ring_protocols' and 'tree_protocols': rings and trees over nodes were taken "
      "to use simple and ll; on EFA rings use [simple, ll, ll128] and trees [ll, ll128]";
  CHECK(alone.notes == std::vector{note});
  CHECK(alone.network.ring_protocols == Protocols{});
  CHECK(read("{latency: 1 us}").notes.empty());
  const Cluster stated = read("{latency: 1 us, post_overhead: 8 us, ring_protocols: [simple, ll]}");
  CHECK(stated.notes.empty());
  // What is written states them, so that the note does not come twice, and is true beside them.
  for (const Cluster& cluster : {alone, stated})
    CHECK(read_cluster(YamlNode::parse(write_cluster(cluster), "written")) == cluster);
}

TEST_CASE("which devices of a machine these are, and tiles of cards, are kept through writing and reading") {
  Cluster cluster = read_cluster(
      YamlNode::parse("name: c\ndevice: " + one_device +
                          "\nnode: {devices: 4, intra: pcie, tiles_per_card: 2}\ndevice_ids: [6, 0, 3, 1]\n",
                      "c.yaml"));
  CHECK(cluster.device_ids == std::vector<int>{6, 0, 3, 1});
  CHECK(cluster.groups.front().node.tiles_per_card == 2);
  CHECK(read_cluster(YamlNode::parse(write_cluster(cluster), "written")) == cluster);
}

TEST_CASE("a node of several machines stays that as far as it is taken") {
  const Cluster rack = read_cluster(YamlNode::parse(
      "name: c\ndevice: " + one_device + "\nnode: {devices: 6, intra: pcie, devices_per_machine: 2}\n", "c.yaml"));
  CHECK(rack.groups.front().machines() == 3);
  CHECK(read_cluster(YamlNode::parse(write_cluster(rack), "written")) == rack);
  CHECK(first_devices(rack.groups.front().node, 3).devices_per_machine == 2);
  CHECK(!first_devices(rack.groups.front().node, 2).devices_per_machine);
}

TEST_CASE("what is wrong in levels and rails is named with its place") {
  CHECK(network_error("{latency: 1 us, level: []}") ==
        "c.yaml:3:26: error: unknown key 'level'; allowed: latency, post_overhead, ring_protocols, "
        "tree_protocols, transfer_chunk, oversubscription, levels, rails, pxn, one_ring; did you mean 'levels'?");
  CHECK(network_error("{latency: 20 us, post_overhead: 0 s}") ==
        "c.yaml:3:42: error: expected more than 0 s: without 'post_overhead', NCCL's model has one");
  CHECK(network_error("{latency: 1 us, ring_protocols: simple}") ==
        "c.yaml:3:42: error: expected a list of protocols, such as [simple, ll, ll128]");
  CHECK(network_error("{latency: 1 us, ring_protocols: [simple, ll182]}") ==
        "c.yaml:3:51: error: unknown protocol 'll182'; allowed: simple, ll, ll128; did you mean 'll128'?");
  CHECK(network_error("{latency: 1 us, tree_protocols: [ll, ll]}") ==
        "c.yaml:3:47: error: 'll' stands twice in the list; leave one out");
  CHECK(network_error("{latency: 1 us, ring_protocols: [ll128]}") ==
        "c.yaml:3:42: error: expected 'simple' or 'll' among them: 'll128' is known of some GPUs alone");
  CHECK(network_error("{latency: 1 us, tree_protocols: []}") == "");
  CHECK(network_error("{latency: 20 us, transfer_chunk: 0 B}") == "c.yaml:3:43: error: expected at least one byte");
  CHECK(network_error("{latency: 1 us, rails: true, one_ring: true}") ==
        "c.yaml:3:49: error: rings that enter a node by one NIC and leave it by another change rails; leave out "
        "'rails'");
  CHECK(network_error("{latency: 1 us, one_ring: true}") == "");
  CHECK(
      network_error("{latency: 1 us, levels: []}") ==
      "c.yaml:3:34: error: expected a list of levels from the nodes up, such as [{nodes: 32}, {oversubscription: 3}]");
  CHECK(network_error("{latency: 1 us, oversubscription: 2, levels: [{nodes: 2}]}") ==
        "c.yaml:3:44: error: 'levels' have an oversubscription each; leave this one out");
  CHECK(
      network_error("{latency: 1 us, levels: [{node: 2}]}") ==
      "c.yaml:3:36: error: unknown key 'node'; allowed: name, nodes, oversubscription, latency; did you mean 'nodes'?");
  CHECK(network_error("{latency: 1 us, levels: [{nodes: 2}, {nodes: 3}, {}]}") ==
        "c.yaml:3:55: error: expected a multiple of the 2 nodes that a block of the level below joins, found 3");
  CHECK(network_error("{latency: 1 us, levels: [{}, {nodes: 8}]}") ==
        "c.yaml:3:39: error: the level before this one joins all nodes: it has no 'nodes'");
  CHECK(network_error("{latency: 1 us, levels: [{nodes: 2, oversubscription: 0.5}, {}]}") ==
        "c.yaml:3:64: error: expected an oversubscription from 1 to 1000000, found '0.5'");
  CHECK(network_error("{latency: 1 us, levels: [{nodes: 2}]}") ==
        "c.yaml:2:7: error: 4 nodes, but the highest level of the network, 'level 1', joins 2; take fewer nodes, or "
        "add a level above it");
  CHECK(network_error("{latency: 1 us, levels: [{nodes: 2}]}", 2) == "");
  CHECK(network_error("{latency: 1 us, pxn: false}") ==
        "c.yaml:3:31: error: 'pxn' says how traffic changes rails; it needs 'rails: true'");
  CHECK(network_error("{latency: 1 us, rails: true}") == "");
  CHECK(network_error("{latency: 1 us, rails: true, pxn: false}") ==
        "c.yaml:2:7: error: rails that only devices of a node could join, and those of 'd' do not, with 'pxn: false'; "
        "give the network a level above the rails");
  CHECK(network_error("{latency: 1 us, rails: true}", 4,
                      "node: {devices: 2, intra: pcie, nics: {count: 2, line_rate: 8 Gbit/s}}") ==
        "c.yaml:2:7: error: rails that only devices of a node could join, and those of 'd' have no NVLink between all "
        "of them; give the network a level above the rails");
}

TEST_CASE("a price that is none says what is wrong with it") {
  CHECK(parse_price("2.50 USD") == Price{.per_device_hour = 2.5, .currency = "USD"});
  CHECK(parse_price("1e9 IRR") == Price{.per_device_hour = 1e9, .currency = "IRR"});
  CHECK(parse_price("0 EUR") == Price{.per_device_hour = 0.0, .currency = "EUR"});
  for (const auto& [text, why] : std::vector<std::pair<std::string, std::string>>{
           {"", ""},
           {"USD", ""},
           {"nan USD", ""},
           {"+2 USD", ""},
           {"1e308 USD", ": at most 1000000000 is allowed"},
           {"1e999 USD", ": at most 1000000000 is allowed"},
           {"1000000001 USD", ": at most 1000000000 is allowed"},
           {"-1 USD", ": a price is at least 0"},
           {"2.50", ": it names no currency"},
           {"2.50USD", ": a space stands between the amount and the currency"},
           {"2.50 usd", ": a currency is three capital letters (ISO 4217), found 'usd'"},
           {"2.50 dollars", ": a currency is three capital letters (ISO 4217), found 'dollars'"},
           {"2,50 EUR", ": decimals stand behind a point, and thousands have nothing between them"},
           {"2.50 USD/h", ": the hour is understood; leave what begins with '/' out"},
           {"$2.50", ": the amount stands before the currency, which is three letters of ISO 4217"},
           {"EUR 2.50", ": the amount stands before the currency, which is three letters of ISO 4217"}}) {
    try {
      parse_price(text);
      FAIL_CHECK(text);
    } catch (const ConfigError& error) {
      CHECK(error.message() ==
            fmt::format("expected a price of a device for an hour, such as '2.50 USD', found '{}'{}", text, why));
    }
  }
}

TEST_CASE("what no machine has is refused with its place and the range") {
  CHECK(network_error("{latency: 1e308 s}") ==
        "c.yaml:3:20: error: expected a duration of at most 24 h, found '1e308 s'");
  CHECK(network_error("{latency: 1 us, oversubscription: 1e300}") ==
        "c.yaml:3:44: error: expected an oversubscription from 1 to 1000000, found '1e300'");
  const std::string node = "\nnode: {devices: 2, intra: memory, bandwidth: 1e-30 B/s}\n";
  CHECK(error_in("name: c\ndevice: " + one_device + node) ==
        "c.yaml:3:46: error: expected a bandwidth from 1 B/s to 1000000 TB/s, found '1e-30 B/s'");
  const auto device_error = [](const std::string& from, const std::string& to) {
    return error_in("name: c\n" + with_nics + "\nnetwork: {latency: 1 us}\ndevice: " + replaced(one_device, from, to) +
                    "\n");
  };
  CHECK(device_error("capacity: 10 GB", "capacity: 2 EB").find("unknown unit 'EB'") != std::string::npos);
  CHECK(device_error("capacity: 10 GB", "capacity: 1025 TiB")
            .ends_with("error: expected a capacity of at most 1024 TiB, found '1025 TiB'"));
  CHECK(device_error("vector: 1 TFLOP/s", "vector: 1e-9 FLOP/s")
            .ends_with("error: expected a compute rate from 1 FLOP/s to 1000000 PFLOP/s, found '1e-9 FLOP/s'"));
  CHECK(device_error("name: d", "name: ''").ends_with("error: expected a name, found ''"));
  // NICs reach less than their line rate.
  CHECK(network_error("{latency: 1 us}", 2, "node: {devices: 2, intra: pcie, nics: {count: 2, line_rate: 8 bit/s}}") ==
        "c.yaml:2:7: error: the link between 'NIC0' and 'network' comes to 0.96 B/s and 0 s; allowed are 1 B/s to "
        "1000000 TB/s, and up to 24 h");
  CHECK(error_in("name: ''\ndevice: " + one_device + "\n") == "c.yaml:1:7: error: expected a name, found ''");
  // Nor a host without memory, or drives without room.
  const auto machine_error = [](const std::string& line) {
    return error_in("name: c\ndevice: " + one_device + "\nnode: {devices: 2, intra: pcie}\n" + line + "\n");
  };
  CHECK(machine_error("nvme: {read: 1 GB/s, write: 1 GB/s, capacity: 0 B}") ==
        "c.yaml:4:47: error: expected more than 0 B: without 'capacity', how much plans take is not checked");
  CHECK(machine_error("host: {memory: 0 B, memory_bandwidth: 1 GB/s, link: 1 GB/s}") ==
        "c.yaml:4:16: error: expected more than 0 B: without 'memory', how much plans take is not checked");
  CHECK(machine_error("processor: amb") ==
        "c.yaml:4:12: error: expected one of intel, amd, found 'amb'; did you mean 'amd'?");
  CHECK(machine_error("processor: arm") == "c.yaml:4:12: error: expected one of intel, amd, found 'arm'");
  CHECK(machine_error("nvme: {read: 0 B/s, write: 1 GB/s}") == "c.yaml:4:14: error: a bandwidth must be more than 0");
  CHECK(machine_error("nvme: {read: 1 GB/s, write: 0 B/s}") == "c.yaml:4:29: error: a bandwidth must be more than 0");
}

TEST_CASE("what is wrong in groups is named with its place") {
  const std::string group = "  - device: " + one_device + "\n    " + with_nics + "\n";
  CHECK(error_in("name: c\ngroups: []\n") ==
        "c.yaml:2:9: error: expected a list of kinds of nodes, each with 'device', 'node' and 'nodes'");
  CHECK(error_in("name: c\ndevice: d\ngroups: []\n") ==
        "c.yaml:2:1: error: unknown key 'device'; allowed: name, groups, network, device_ids, memory_headroom, "
        "measured_on, calibrated, notes, "
        "sources; did you mean 'device_ids'?");
  CHECK(error_in("name: c\ngroups:\n" + group + "    count: 2\nnetwork: {latency: 1 us}\n") ==
        "c.yaml:5:5: error: unknown key 'count'; allowed: device, node, nodes, price, processor, host, "
        "nvme");
  CHECK(error_in("name: c\ngroups:\n" + group) ==
        "c.yaml:1:1: error: a node with NICs needs 'network' with its 'latency'");
  CHECK(error_in("name: c\ngroups:\n" + group + "  - device: " +
                 replaced(replaced(one_device, "{name: d", "{name: e"), "backend: cuda", "backend: cpu") + "\n    " +
                 with_nics + "\nnetwork: {latency: 1 us}\n") ==
        "c.yaml:3:3: error: 'd' works by cuda and 'e' by cpu; a cluster needs one of them");
  CHECK(error_in("name: c\ngroups:\n" + group + "  - device: " + one_device +
                 "\n    node: {devices: 2, intra: pcie}\nnetwork: {latency: 1 us}\n") ==
        "c.yaml:3:3: error: 2 nodes, but device 'GPU0' reaches no NIC");
}

TEST_CASE("what is wrong in device_ids and tiles_per_card is named with its place") {
  const std::string node = "name: c\ndevice: " + one_device + "\nnode: {devices: 2, intra: pcie}\n";
  CHECK(error_in(node + "device_ids: [1]\n") == "c.yaml:4:13: error: lists 1 numbers for 2 devices");
  CHECK(error_in(node + "device_ids: [1, 1]\n") == "c.yaml:4:17: error: device 1 is listed twice");
  CHECK(error_in(node + "device_ids: [1, -2]\n") ==
        "c.yaml:4:17: error: expected a whole number from 0 to 1048576, found '-2'");
  CHECK(error_in("name: c\ndevice: " + one_device + "\n" + with_nics +
                 "\nnetwork: {latency: 1 us}\nnodes: 2\ndevice_ids: [0, 1, 2, 3]\n") ==
        "c.yaml:6:13: error: says which devices of one machine these are, and there are 2 nodes");
  CHECK(error_in("name: c\ndevice: " + one_device + "\nnode: {devices: 3, intra: pcie, tiles_per_card: 2}\n") ==
        "c.yaml:3:49: error: 3 devices are not cards of 2 tiles each");
  CHECK(error_in("name: c\ndevice: " + one_device + "\nnode: {devices: 4, intra: pcie, devices_per_machine: 4}\n") ==
        "c.yaml:3:54: error: expected less than the node's 4 devices: a node of one machine does not say it");
}
