#include "planner/cluster/find_cluster.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>

#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/base/text.h"
#include "planner/cluster/group_network.h"
#include "planner/cluster/nccl/import.h"
#include "planner/cluster/write_topology.h"
#include "tests/temporary_folder.h"

using namespace parplan;

namespace {

const std::string source = PARPLAN_SOURCE_DIR;
const ClusterCatalog catalog{.devices_folder = source + "/configs/devices",
                             .clusters_folder = source + "/configs/clusters"};

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
  return group_network(cluster, {.degree = {.dp = dp, .tp = tp}, .order = parse_order("pp-dp-tp")}, axis)
             .ring_bandwidth.value /
         1e9;
}

}  // namespace

TEST_CASE("every device of the catalog loads, is named as its file, and says where its numbers come from") {
  const std::vector<std::string> names = device_names(catalog);
  for (const char* wanted :
       {"a100-pcie-40gb", "a100-pcie-80gb", "a100-sxm4-40gb", "a100-sxm4-80gb", "b200-sxm-180gb",
        "gaudi2-96gb",    "gaudi3-128gb",   "gb200-186gb",    "h100-nvl-94gb",  "h100-pcie-80gb",
        "h100-sxm-80gb",  "h200-sxm-141gb", "l40s",           "max-1100-48gb",  "max-1550-stack-64gb",
        "mi300x-192gb",   "rtx-3090",       "rtx-4090",       "rtx-a6000",      "titan-rtx",
        "v100-pcie-16gb", "v100-pcie-32gb", "v100-sxm2-16gb", "v100-sxm2-32gb"})
    CHECK_MESSAGE(std::ranges::find(names, wanted) != names.end(), wanted);
  for (const std::string& name : names) {
    INFO(name);
    const DeviceKind device = find_device(name, catalog);
    CHECK(device.name == name);
    CHECK(is_accelerator(device.backend));
    CHECK(device.sources.size() >= 5);
    CHECK(read_device(YamlNode::parse(write_device(device), "written")) == device);
  }
}

TEST_CASE("the numbers of every device are of the size that such a device has") {
  for (const std::string& name : device_names(catalog)) {
    INFO(name);
    const DeviceKind device = find_device(name, catalog);
    REQUIRE(device.power);
    CHECK(device.power->value >= 70.0);    // NVIDIA T4
    CHECK(device.power->value <= 1400.0);  // NVIDIA GB300
    CHECK(device.memory_capacity.count >= 11LL << 30);
    CHECK(device.memory_overhead.count <= 2LL << 30);
    // A name of so many GB means at most that in GiB, and no less than 0.93 of it in GB.
    if (const auto at = name.rfind('-'); name.ends_with("gb")) {
      const double gb = std::stod(name.substr(at + 1));
      CHECK(static_cast<double>(device.memory_capacity.count) <= gb * 1073741824.0);
      CHECK(static_cast<double>(device.memory_capacity.count) >= gb * 1e9 * 0.93);
    }
    for (const DeviceRates& rates : device.rates) {
      CHECK(rates.memory.value > 1e11);
      CHECK(rates.memory.value < 8e12);
      CHECK(rates.matrix_fp32 <= device.peak_fp32);
      CHECK(rates.vector <= device.peak_fp32);
      CHECK((rates.matrix_half.value > 0.0) == (device.peak_half.value > 0.0));
      CHECK((rates.matrix_tf32.value > 0.0) == (device.peak_tf32.value > 0.0));
      if (device.peak_half.value > 0.0)
        // At least half of the peak; otherwise a number with sparsity slipped in.
        CHECK(rates.matrix_half / device.peak_half > 0.5);
      if (device.peak_tf32.value > 0.0) {
        CHECK(device.peak_tf32 >= device.peak_fp32);
        CHECK(device.peak_tf32 <= device.peak_half);
      }
      CHECK((rates.matrix_fp8.value > 0.0) == (device.peak_fp8.value > 0.0));
      if (device.peak_fp8.value > 0.0) {
        // Twice as many as in half precision, but for roundings of datasheets.
        CHECK(device.peak_fp8 / device.peak_half == doctest::Approx(2.0).epsilon(0.02));
        CHECK(rates.matrix_fp8 / device.peak_fp8 > 0.5);
      }
      // Products of 4096 cubed are bound by arithmetic on all of them.
      if (device.peak_half.value > 0.0) CHECK(rates.matrix_half / FlopsPerSecond(rates.memory.value) < 4096.0 / 3.0);
    }
    // Units for bf16 came with Ampere, which is also when tf32 came.
    if (device.backend == BackendKind::cuda && device.peak_half.value > 0.0 && name != "rtx-5060ti-16gb")
      CHECK(has_units(device, DataType::bf16) == has_units(device, DataType::tf32));
    if (has_units(device, DataType::fp8)) CHECK(compute_capability_of(name).value_or(0) >= 89);
  }
}

TEST_CASE("a file says what training steps sustain in half precision, or that it is not known") {
  const std::vector<std::string> not_known = {"gaudi2-96gb", "gaudi3-128gb", "k80", "max-1100-48gb",
                                              "max-1550-stack-64gb"};
  for (const std::string& name : device_names(catalog)) {
    INFO(name);
    const DeviceKind device = find_device(name, catalog);
    const auto says = [&](std::string_view start) {
      return std::ranges::any_of(device.sources, [&](const std::string& source) { return source.starts_with(start); });
    };
    const bool without = std::ranges::find(not_known, name) != not_known.end();
    CHECK(says("sustained: not known") == without);
    CHECK(says("sustained"));
    const bool has_half = has_units(device, DataType::bf16) || has_units(device, DataType::fp16);
    const DataType half = has_units(device, DataType::bf16) ? DataType::bf16 : DataType::fp16;
    CHECK(knows_sustained(device, half) == (!without || !has_half));
    for (const DeviceRates& rates : device.rates) {
      CHECK((rates.sustained_half.value > 0.0) == (rates.sustained_weights.value > 0.0));
      CHECK(rates.sustained_weights <= rates.sustained_half);
      // A B200 runs loops of large products at .64 of its best (SimuMax); others come nearer.
      if (rates.sustained_half.value > 0.0) CHECK(rates.sustained_half >= 0.55 * rates.matrix_half);
    }
  }
}

TEST_CASE("a rate that one of two rows states is not known between them") {
  DeviceKind device = find_device("a100-sxm4-80gb", catalog);
  device.rates.push_back(device.rates.front());
  device.rates.back().active = device.rates.front().active + 2;
  const int between = device.rates.front().active + 1;
  DeviceRates& states = device.rates.front();
  DeviceRates& lacks = device.rates.back();
  for (const OptionalRate& one : optional_rates()) {
    states.*one.member = states.*one.reached;
    lacks.*one.member = {};
    CHECK((rates_at(device, between).*one.member).value == 0.0);
  }
  states.sustained_memory = states.memory;
  lacks.sustained_memory = {};
  CHECK(rates_at(device, between).sustained_memory.value == 0.0);
  for (FlopsPerSecond DeviceRates::*rate :
       {&DeviceRates::matrix_half, &DeviceRates::matrix_tf32, &DeviceRates::matrix_fp8}) {
    states.*rate = states.matrix_fp32;
    lacks.*rate = {};
    CHECK((rates_at(device, between).*rate).value == 0.0);
  }
}

TEST_CASE("cards with the same chip sustain the more, the higher their limit of power is") {
  const auto sustained = [](const char* name) { return find_device(name, catalog).rates.front().sustained_half; };
  CHECK(sustained("h100-pcie-80gb") < sustained("h100-nvl-94gb"));
  CHECK(sustained("h100-nvl-94gb") < sustained("h100-sxm-96gb-500w"));
  CHECK(sustained("h100-sxm-96gb-500w") < sustained("h100-sxm-80gb"));
  CHECK(sustained("rtx-6000-ada") < sustained("l40s"));
  CHECK(sustained("v100-pcie-32gb") < sustained("v100-sxm2-32gb"));
  CHECK(sustained("a100-pcie-80gb") < sustained("a100-sxm4-80gb"));
  CHECK(sustained("b200-sxm-180gb") < sustained("b300-sxm-288gb"));
}

TEST_CASE("what steps sustain is not known of products that have the rates of loops, and that is said in words") {
  const Cluster gaudi = find_cluster("gaudi2-8", catalog);
  CHECK(without_sustained(gaudi, DataType::bf16) == std::vector<std::string>{"gaudi2-96gb"});
  CHECK(rates_of_loops(gaudi, DataType::bf16) ==
        "products in bf16 on gaudi2-96gb are timed as in benchmark loops, since no training rate is known: predicted "
        "steps are too short");
  CHECK(rates_of_loops(gaudi, DataType::fp32).empty());  // no file tells of fp32
  CHECK(rates_of_loops(gaudi, DataType::fp16).empty());  // without units, as fp32
  CHECK(rates_of_loops(find_cluster("dgx-h100", catalog), DataType::fp8).empty());
  CHECK(without_sustained(find_cluster("rtx-4090-8", catalog), DataType::bf16).empty());
  CHECK(without_sustained(find_cluster("rtx-4090-8", catalog), DataType::fp8) == std::vector<std::string>{"rtx-4090"});
  // Kernels that parplan measure timed are of loops, too, unless the file has the share of steps.
  DeviceKind device = find_device("h100-sxm-80gb", catalog);
  device.measured = MeasuredKernels{};
  CHECK(knows_sustained(device, DataType::bf16));
  device.rates.front().sustained_share = 0.0;
  CHECK_FALSE(knows_sustained(device, DataType::bf16));
  device.backend = BackendKind::cpu;
  CHECK(knows_sustained(device, DataType::bf16));
}

TEST_CASE("no two devices have the name that the driver calls them by") {
  std::map<std::string, std::string> owners;
  for (const std::string& name : device_names(catalog))
    for (const std::string& driver_name : find_device(name, catalog).driver_names) {
      INFO(driver_name << " is " << name << " and " << owners[driver_name]);
      CHECK(owners[driver_name].empty());
      owners[driver_name] = name;
    }
}

TEST_CASE(
    "every cluster of the catalog loads, is named as its file, says where its numbers come from, and is written and "
    "read back") {
  const std::vector<std::string> names = cluster_names(catalog);
  for (const char* wanted :
       {"aurora",      "aws-p4d",           "aws-p5",      "azure-nd-a100-v4", "azure-nd-h100-v5",
        "dgx-1-v100",  "dgx-2-v100",        "dgx-a100",    "dgx-b200",         "dgx-h100",
        "gaudi2-8",    "gaudi3-8",          "gb200-nvl72", "hgx-a800",         "hgx-h200",
        "hgx-h800",    "l40s-8",            "lumi",        "mi300x-8",         "rtx-3090-8",
        "rtx-4090-4",  "rtx-4090-8",  "rtx-a6000-2-nvlink", "titan-rtx-2", "titan-rtx-2-nvlink"})
    CHECK_MESSAGE(std::ranges::find(names, wanted) != names.end(), wanted);
  for (const std::string& name : names) {
    INFO(name);
    const Cluster cluster = find_cluster(name, catalog);
    CHECK(cluster.name == name);
    CHECK(cluster.groups.front().nodes == 1);
    CHECK(!cluster.sources.empty());
    CHECK(read_cluster(YamlNode::parse(write_cluster(cluster), "written")) == cluster);
    CHECK(write_cluster(read_cluster(YamlNode::parse(write_cluster(cluster), "written"))) == write_cluster(cluster));
  }
}

TEST_CASE(
    "a group of all devices of a named node reaches what was measured, or what the links that are in the way allow") {
  struct Row {
    const char* cluster;
    double least, most;  // GB/s of a ring over all devices of a node
  };
  // All-reduce bus bandwidths where they were measured (the files name the source), otherwise
  // NCCL's figures.
  for (const Row& row :
       {Row{"dgx-2-v100", 115, 122}, Row{"dgx-b200", 682, 723}, Row{"gb200-nvl72", 682, 723}, Row{"aws-p4d", 232, 241},
        Row{"aws-p5", 360, 371}, Row{"aws-p5en", 360, 371}, Row{"azure-nd-a100-v4", 232, 241},
        Row{"azure-nd-h100-v5", 360, 371}, Row{"mi300x-8", 312, 337}, Row{"gaudi3-8", 510, 514},
        Row{"gaudi2-8", 255, 257}, Row{"rtx-4090-8", 16, 24}, Row{"rtx-3090-8", 16, 24}, Row{"l40s-8", 16, 24},
        Row{"rtx-4090-4", 24, 24}, Row{"rtx-a6000-2-nvlink", 48, 48}, Row{"dgx-1-v100", 134, 135},
        Row{"azure-ndv2", 134, 135}, Row{"aurora", 37, 190}, Row{"lumi", 75, 150}}) {
    INFO(row.cluster);
    const Cluster cluster = find_cluster(row.cluster, catalog);
    const int count = cluster.groups.front().devices_per_node();
    const double reached = ring(cluster, count, 1, Axis::dp);
    CHECK(reached >= doctest::Approx(row.least));
    CHECK(reached <= doctest::Approx(row.most));
  }
}

TEST_CASE("a group of two has what one pair of links gives") {
  CHECK(ring(find_cluster("mi300x-8", catalog, devices(2)), 2, 1, Axis::dp) == doctest::Approx(48));    // measured 47.7
  CHECK(ring(find_cluster("gaudi2-8", catalog, devices(2)), 2, 1, Axis::dp) == doctest::Approx(36.6));
  CHECK(ring(find_cluster("dgx-1-v100", catalog, devices(2)), 2, 1, Axis::dp) ==
        doctest::Approx(22.4));  // NV1, measured 22.5
  CHECK(ring(find_cluster("dgx-1-v100", catalog, devices(3)), 3, 1, Axis::dp) ==
        doctest::Approx(44.8));  // measured 45.1
  CHECK(ring(find_cluster("aurora", catalog, devices(2)), 2, 1, Axis::dp) == doctest::Approx(185));
  CHECK(ring(find_cluster("lumi", catalog, devices(2)), 2, 1, Axis::dp) == doctest::Approx(150));  // 3/4 of 200
}

TEST_CASE("switches add on Hopper and Blackwell, by each device's whole link, whatever the groups are") {
  const auto nvls = [](const char* name, int dp, int tp, Axis axis) {
    const DeviceMesh mesh{.degree = {.dp = dp, .tp = tp}, .order = parse_order("pp-dp-tp")};
    return group_network(find_cluster(name, catalog, devices(dp * tp)), mesh, axis).nvls_bandwidth.value / 1e9;
  };
  CHECK(nvls("dgx-h100", 8, 1, Axis::dp) == doctest::Approx(370.8));
  CHECK(nvls("hgx-h200", 2, 4, Axis::tp) == doctest::Approx(370.8));
  CHECK(nvls("dgx-h100", 4, 8, Axis::dp) == doctest::Approx(370.8));
  CHECK(nvls("dgx-b200", 16, 1, Axis::dp) == doctest::Approx(721.8));
  CHECK(nvls("gb200-nvl72", 72, 1, Axis::dp) == doctest::Approx(721.8));
  // The switches of older nodes do not add, and PCIe, meshes and memory have none.
  for (const char* name : {"dgx-a100", "dgx-2-v100", "dgx-1-v100", "l40s-8", "mi300x-8"})
    CHECK(nvls(name, 8, 1, Axis::dp) == 0.0);
  CHECK(has_nvlink_sharp(find_cluster("dgx-h100", catalog)));
  CHECK_FALSE(has_nvlink_sharp(find_cluster("dgx-a100", catalog)));
  CHECK_FALSE(has_nvlink_sharp(find_cluster("mi300x-8", catalog)));
}

TEST_CASE("a group has the NICs of a node to itself, or shares them with its siblings") {
  const auto uplink = [](int dp, int tp, Axis axis) {
    const DeviceMesh mesh{.degree = {.dp = dp, .tp = tp}, .order = parse_order("pp-dp-tp")};
    return group_network(find_cluster("dgx-h100", catalog, devices(dp * tp)), mesh, axis).uplink_bandwidth.value / 1e9;
  };
  CHECK(uplink(8, 1, Axis::dp) == 0.0);                       // one node
  CHECK(uplink(16, 1, Axis::dp) == doctest::Approx(8 * 48));  // 400 Gbit/s, 48 GB/s reached
  CHECK(uplink(4, 8, Axis::dp) == doctest::Approx(48));
  CHECK(uplink(8, 4, Axis::dp) == doctest::Approx(2 * 48));
}

TEST_CASE("several nodes reach what all their NICs give together, or what the links to them do") {
  struct Row {
    const char* cluster;
    double reached;  // GB/s of a ring over all devices of four nodes
  };
  for (const Row& row :
       {Row{"dgx-2-v100", 96}, Row{"azure-ndv2", 12}, Row{"dgx-b200", 384}, Row{"aws-p4d", 48}, Row{"aws-p5", 384},
        Row{"aws-p5en", 384}, Row{"azure-nd-a100-v4", 192}, Row{"azure-nd-h100-v5", 384}, Row{"mi300x-8", 384},
        Row{"gaudi2-8", 288}, Row{"gaudi3-8", 576}, Row{"gb200-nvl72", 721.8 * 72 / 71},
        // Double links between modules, which seven of eight hops take.
        Row{"lumi", 75 * 8.0 / 7}}) {
    INFO(row.cluster);
    const Cluster cluster = find_cluster(row.cluster, catalog, nodes(4));
    CHECK(ring(cluster, cluster.devices(), 1, Axis::dp) == doctest::Approx(row.reached));
  }
}

TEST_CASE("a rack of 72 gives any number of its trays") {
  const Cluster half = find_cluster("gb200-nvl72", catalog, devices(36));
  CHECK(half.groups.front().nodes == 1);
  CHECK(ring(half, 1, 36, Axis::tp) == doctest::Approx(721.8));
  const Cluster two = find_cluster("gb200-nvl72", catalog, devices(144));
  CHECK(two.groups.front().nodes == 2);
  CHECK(ring(two, 2, 72, Axis::dp) == doctest::Approx(48));
}

TEST_CASE("named clusters reach what was measured on them") {
  // All-reduce bus bandwidths: 232 and 370 GB/s inside a node, 192 and 370 across nodes (NVIDIA GTC
  // 2024).
  const Cluster a100 = find_cluster("dgx-a100", catalog, devices(32));
  CHECK(ring(a100, 4, 8, Axis::tp) == doctest::Approx(240));
  CHECK(ring(a100, 32, 1, Axis::dp) == doctest::Approx(192));
  CHECK(ring(a100, 4, 8, Axis::dp) == doctest::Approx(24));
  const Cluster h100 = find_cluster("dgx-h100", catalog, devices(32));
  CHECK(ring(h100, 4, 8, Axis::tp) == doctest::Approx(370.8));
  CHECK(ring(h100, 32, 1, Axis::dp) == doctest::Approx(384));
  CHECK(ring(h100, 4, 8, Axis::dp) == doctest::Approx(48));
  CHECK(ring(find_cluster("titan-rtx-2", catalog), 2, 1, Axis::dp) == doctest::Approx(3.9));
  CHECK(ring(find_cluster("titan-rtx-2-nvlink", catalog), 2, 1, Axis::dp) == doctest::Approx(40));
}

TEST_CASE("a hop between nodes takes what NCCL counts for it") {
  const Cluster cluster = find_cluster("dgx-h100", catalog, devices(16));
  const GroupNetwork network =
      group_network(cluster, {.degree = {.dp = 2, .tp = 8}, .order = parse_order("pp-dp-tp")}, Axis::dp);
  CHECK(network.inter_latency.value == doctest::Approx(2.7e-6));
}

TEST_CASE("any number of whole nodes, or a part of one, of a named cluster") {
  CHECK(find_cluster("dgx-a100", catalog, devices(64)).groups.front().nodes == 8);
  CHECK(find_cluster("dgx-a100", catalog, nodes(3)).devices() == 24);
  CHECK(find_cluster("dgx-a100", catalog, {.device = {}, .network = {}, .devices = 16, .nodes = 2}).devices() == 16);
  const Cluster part = find_cluster("dgx-a100", catalog, devices(3));
  CHECK(part.groups.front().nodes == 1);
  CHECK(part.groups.front().devices_per_node() == 3);
  CHECK(part.groups.front().node.vertices[part.groups.front().node.devices[2]].name == "GPU2");
  CHECK(ring(part, 3, 1, Axis::dp) == doctest::Approx(240));
}

TEST_CASE("numbers of devices that there are not are refused with those that there are") {
  CHECK(error_of("dgx-a100", devices(12)) ==
        "error: --devices 12: cluster 'dgx-a100' has 8 devices a node and any number of nodes; allowed are 1 to 8 "
        "devices and multiples of 8");
  CHECK(error_of("dgx-a100", devices(0)) ==
        "error: --devices 0: cluster 'dgx-a100' has 8 devices a node and any number of nodes; allowed are 1 to 8 "
        "devices and multiples of 8");
  CHECK(error_of("dgx-a100", {.device = {}, .network = {}, .devices = 16, .nodes = 4}) ==
        "error: --devices 16 with --nodes 4: 4 nodes of cluster 'dgx-a100' have 32 devices; leave one of the two "
        "out, or make them agree");
  CHECK(error_of("titan-rtx-2", nodes(2)) ==
        "error: --nodes 2: cluster 'titan-rtx-2' has 2 devices a node and no network, so it is one node; allowed are 1 "
        "to 2 devices");
}

TEST_CASE("a group of GPUs knows whether its hops stay on NVLink, and its oldest GPU") {
  const auto tensor = [](const Cluster& cluster, int ranks) {
    return group_network(cluster,
                         {.degree = {.dp = cluster.devices() / ranks, .tp = ranks}, .order = parse_order("pp-dp-tp")},
                         Axis::tp);
  };
  struct Case {
    const char* cluster;
    int ranks;
    bool nvlink;
    int compute_capability;
  };
  for (const Case& wanted : {Case{"dgx-a100", 8, true, 80},
                             {"dgx-h100", 2, true, 90},
                             {"dgx-1-v100", 2, true, 70},
                             {"rtx-a6000-2-nvlink", 2, true, 86},
                             {"l40s-8", 8, false, 89},
                             {"rtx-3090-8", 2, false, 86},
                             {"mi300x-8", 8, true, 0}}) {
    CAPTURE(wanted.cluster);
    const GroupNetwork network = tensor(find_cluster(wanted.cluster, catalog), wanted.ranks);
    CHECK(network.nvlink == wanted.nvlink);
    CHECK(network.compute_capability == wanted.compute_capability);
  }
  Cluster both = find_cluster("dgx-a100", catalog, nodes(1));
  both.groups.push_back(find_cluster("dgx-1-v100", catalog, nodes(1)).groups.front());
  CHECK(tensor(both, 16).compute_capability == 70);
  both.groups.back().device.name = "mine";
  CHECK(tensor(both, 16).compute_capability == 0);
  CHECK(group_network(find_cluster("l40s-8", catalog), {.degree = {.pp = 2, .tp = 4}, .order = parse_order("pp-dp-tp")},
                      Axis::pp)
            .nvlink == false);
  CHECK(stage_network(find_cluster("l40s-8", catalog), {.degree = {.pp = 2, .tp = 4}, .order = parse_order("pp-dp-tp")},
                      0, 1)
            .nvlink == false);
}

TEST_CASE("a file that says how many nodes it has gives no more") {
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("two-nodes.yaml",
                                        "name: mine\ndevice: a100-sxm4-80gb\nnode: {devices: 8, intra: nvswitch, nics: "
                                        "{count: 8, line_rate: 200 Gbit/s}}\n"
                                        "network: {latency: 1 us}\nnodes: 2\n");
  CHECK(find_cluster(path, catalog).devices() == 16);
  CHECK(find_cluster(path, catalog, devices(8)).devices() == 8);
  CHECK(error_of(path, devices(24)) ==
        "error: --devices 24: cluster 'mine' has 8 devices a node and 2 nodes; allowed are 1 to 8 devices and "
        "multiples of 8 up to 16");
}

TEST_CASE("a file with more kinds of nodes, or more devices, than can be counted is refused") {
  const testing::TemporaryFolder folder;
  const auto file_of = [&](int groups, int nodes) {
    std::string text = "name: many\nnetwork: {latency: 1 us}\ngroups:\n";
    for (int group = 0; group < groups; ++group)
      text += fmt::format("- {{device: a100-sxm4-80gb, nodes: {}, node: {{devices: 8, intra: nvswitch, nics: {{count: "
                          "8, line_rate: 200 Gbit/s}}}}}}\n",
                          nodes);
    return folder.write("many.yaml", text);
  };
  CHECK(find_cluster(file_of(64, 1), catalog).devices() == 512);
  CHECK(error_of(file_of(65, 1), {}).find("65 kinds of nodes; a cluster has at most 64") != std::string::npos);
  CHECK(error_of(file_of(60, 1 << 20), {}).find("503316480 devices; a cluster has at most 1048576") !=
        std::string::npos);
}

TEST_CASE("of a cluster of unlike nodes whole nodes are taken in order, or a part of the first") {
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("unlike.yaml",
                                        "name: unlike\ngroups:\n"
                                        "  - {device: a100-sxm4-80gb, node: {devices: 8, intra: nvswitch, nics: "
                                        "{count: 8, line_rate: 200 Gbit/s}}, nodes: 2}\n"
                                        "  - {device: v100-sxm2-32gb, node: {devices: 4, intra: nvlink_mesh, "
                                        "bandwidth: 40 GB/s, nics: {count: 4, line_rate: 100 Gbit/s}}, nodes: 3}\n"
                                        "network: {latency: 1 us}\n");
  CHECK(find_cluster(path, catalog).devices() == 28);
  CHECK(device_name(find_cluster(path, catalog)) == "a100-sxm4-80gb+v100-sxm2-32gb");
  const Cluster five = find_cluster(path, catalog, devices(24));
  CHECK(five.nodes() == 4);
  CHECK(five.groups.size() == 2);
  CHECK(five.groups[1].nodes == 2);
  CHECK(find_cluster(path, catalog, nodes(4)) == five);
  CHECK(find_cluster(path, catalog, {.device = {}, .network = {}, .devices = 24, .nodes = 4}) == five);
  CHECK(find_cluster(path, catalog, devices(16)).groups.size() == 1);
  CHECK(find_cluster(path, catalog, nodes(1)).devices() == 8);
  CHECK(find_cluster(path, catalog, devices(3)).devices() == 3);
  const std::string has =
      ": cluster 'unlike' has 2 nodes of 8 devices, 3 nodes of 4 devices, and whole nodes are taken in this order; "
      "allowed are 1 to 5 nodes, or 1 to 8 "
      "devices and 8, 16, 20, 24, 28";
  CHECK(error_of(path, devices(12)) == "error: --devices 12" + has);
  CHECK(error_of(path, devices(32)) == "error: --devices 32" + has);
  CHECK(error_of(path, nodes(6)) == "error: --nodes 6" + has);
  CHECK(error_of(path, {.device = {}, .network = {}, .devices = 16, .nodes = 4}) ==
        "error: --devices 16 with --nodes 4" + has);
  // --network applies to the NICs of all kinds of nodes.
  const Cluster faster =
      find_cluster(path, catalog, {.device = {}, .network = parse_bandwidth("400 Gbit/s"), .devices = {}, .nodes = {}});
  for (const NodeGroup& group : faster.groups)
    for (const Link& link : group.node.links)
      if (link.kind == "network") CHECK(link.bandwidth.value == doctest::Approx(48e9));
  CHECK(error_of(path, {.device = "h100-sxm-80gb", .network = {}, .devices = {}, .nodes = {}}).starts_with(
      "error: --device h100-sxm-80gb: cluster 'unlike' already says its device, a100-sxm4-80gb+v100-sxm2-32gb; "));
}

TEST_CASE("unknown names list the known ones") {
  CHECK(error_of("dgx-a10") == "error: unknown cluster 'dgx-a10'; expected a file or one of " +
                                   join(cluster_names(catalog)) + "; did you mean 'dgx-a100'?");
  CHECK_THROWS_WITH_AS(find_device("h100-sxm-80", catalog),
                       ("error: unknown device 'h100-sxm-80'; known are " + join(device_names(catalog)) +
                        "; did you mean 'h100-sxm-80gb'?")
                           .c_str(),
                       ConfigError);
  const std::string matrix = source + "/tests/data/topologies/smi-2x-rtx3090-nvlink.txt";
  const auto with_device = [&](const char* kind) {
    return error_of(matrix, {.device = kind, .network = {}, .devices = {}, .nodes = {}});
  };
  const std::string cards = join(nvidia_card_names(catalog));
  CHECK(with_device("h100") == "error: --device: unknown card 'h100'; known are " + cards +
                                   "; did you mean 'h100-nvl-94gb', 'h100-pcie-80gb', 'h100-sxm-80gb' or "
                                   "'h100-sxm-96gb-500w'?");
  CHECK(with_device("H200") ==
        "error: --device: unknown card 'H200'; known are " + cards + "; did you mean 'h200-sxm-141gb'?");
  CHECK(with_device("mi300x-192gb") ==
        "error: --device mi300x-192gb: nvidia-smi topo -m is of NVIDIA's cards, and 'mi300x-192gb' works by rocm; give "
        "one of " +
            cards);
  CHECK(cards.find("gaudi") == std::string::npos);
  CHECK(error_of("no/such/file.yaml") == "error: cannot read 'no/such/file.yaml': No such file or directory");
}

TEST_CASE("what a cluster already says cannot be said again") {
  CHECK(error_of("dgx-a100", {.device = "h100-sxm-80gb", .network = {}, .devices = {}, .nodes = {}}) ==
        "error: --device h100-sxm-80gb: cluster 'dgx-a100' already says its device, a100-sxm4-80gb; --device is for "
        "texts of nvidia-smi topo -m and NCCL's topologies");
  CHECK(error_of("titan-rtx-2", {.device = {}, .network = BytesPerSecond(1e9), .devices = {}, .nodes = {}}) ==
        "error: --network: cluster 'titan-rtx-2' has no NICs");
}

TEST_CASE("another network takes the place of a named cluster's") {
  const Cluster cluster = find_cluster(
      "dgx-a100", catalog, {.device = {}, .network = parse_bandwidth("100 Gbit/s"), .devices = 16, .nodes = {}});
  CHECK(ring(cluster, 2, 8, Axis::dp) == doctest::Approx(12));
}

TEST_CASE("an NCCL topology file is told apart, takes --device and --network and is repeated") {
  const std::string folder = source + "/tests/data/topologies/";
  CHECK(find_cluster(folder + "nccl-hgx-h200-8gpu-topo.xml", catalog).devices() == 8);
  ClusterOptions options;
  options.device = "a100-sxm4-40gb";
  options.devices = 32;
  const std::string azure = folder + "nccl-azure-ndv4-topo.xml";
  CHECK(error_of(azure, options) == azure +
                                        ": error: NCCL's topology file does not say the speed of its NICs (give "
                                        "--network, such as --network '400 Gbit/s')");
  options.network = parse_bandwidth("200 Gbit/s");
  const Cluster cluster = find_cluster(azure, catalog, options);
  CHECK(cluster.nodes() == 4);
  CHECK(ring(cluster, 4, 8, Axis::tp) == doctest::Approx(240));
  const std::string graphs = folder + "nccl-hgx-h200-8gpu-graph.xml";
  CHECK(error_of(graphs) == graphs +
                                ":1:1: error: found NCCL's graphs (<graphs>: rings and trees); expected NCCL's "
                                "topology (<system>), which NCCL writes to "
                                "the file named by NCCL_TOPO_DUMP_FILE");
}

TEST_CASE("a cluster is described in a few lines") {
  CHECK(describe(find_cluster("dgx-a100", catalog, devices(2))) ==
        "dgx-a100: 1 node of 2 x NVIDIA A100 SXM4 80 GB (a100-sxm4-80gb)\n"
        "  memory    79.1 GiB, 1.00 GiB of it for libraries; 1.79 TB/s reached\n"
        "  fp32      19.2 TFLOP/s reached of 19.5 TFLOP/s\n"
        "  half      268 TFLOP/s reached of 312 TFLOP/s\n"
        "  tf32      134 TFLOP/s reached of 156 TFLOP/s\n"
        "  NV12      240 GB/s, 600 ns: GPU0-GPU1\n"
        "  B/s       GPU0       GPU1       NIC0        NIC1\n"
        "  GPU0      X          NV12 240G  PIX 24.0G*  -\n"
        "  GPU1      NV12 240G  X          -           PIX 24.0G*\n"
        "  network   48.0 GB/s a node, 700 ns, oversubscription 1: GPU0 by NIC0, GPU1 by NIC1\n");
}

TEST_CASE("the examples of docs/cluster.md are clusters") {
  const std::string page = read_file(source + "/docs/cluster.md");
  int examples = 0;
  for (auto at = page.find("```yaml\n"); at != std::string::npos; at = page.find("```yaml\n", at)) {
    at += 8;
    const Cluster cluster =
        read_cluster(YamlNode::parse(page.substr(at, page.find("```", at) - at), "docs/cluster.md"), catalog);
    CHECK(read_cluster(YamlNode::parse(write_cluster(cluster), "written")) == cluster);
    ++examples;
  }
  CHECK(examples == 4);
}
