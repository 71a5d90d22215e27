#include "planner/cluster/visible_devices.h"

#include <doctest/doctest.h>

#include "planner/base/error.h"
#include "planner/cluster/find_cluster.h"

using namespace parplan;

namespace {

const std::string source = PARPLAN_SOURCE_DIR;
const ClusterCatalog catalog{.devices_folder = source + "/configs/devices",
                             .clusters_folder = source + "/configs/clusters"};
const std::string four_cards = source + "/tests/data/topologies/smi-4x-rtx5060ti-phb.txt";

SelectionRequest cards(int count, VisibilityVariables environment, std::vector<int> device_ids = {}) {
  return {.machine = "cluster 'mine'",
          .backend = BackendKind::cuda,
          .devices = std::vector<MachineDevice>(static_cast<std::size_t>(count)),
          .environment = std::move(environment),
          .device_ids = std::move(device_ids)};
}

SelectionRequest tiles(int cards, int per_card, const std::string& mask, std::optional<std::string> hierarchy = {}) {
  return {.machine = "cluster 'mine'",
          .backend = BackendKind::oneapi,
          .devices = std::vector<MachineDevice>(static_cast<std::size_t>(cards * per_card)),
          .tiles_per_card = per_card,
          .environment = {.ze_affinity_mask = mask, .ze_flat_device_hierarchy = std::move(hierarchy)},
          .device_ids = {}};
}

std::vector<int> chosen(const SelectionRequest& request) { return select_devices(request).devices; }
std::vector<int> visible(int count, const std::string& text) {
  return chosen(cards(count, {.cuda_visible_devices = text}));
}

template <class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}
std::string invisible(int count, const std::string& text) {
  return error_of([&] { visible(count, text); });
}

using Devices = std::vector<int>;

}  // namespace

TEST_CASE("without ids and variables all devices are chosen, in their order") {
  CHECK(select_devices(cards(3, {})) == DeviceSelection{.devices = {0, 1, 2}, .shown_by = ""});
}

TEST_CASE("CUDA_VISIBLE_DEVICES chooses devices in the order in which it lists them") {
  CHECK(select_devices(cards(4, {.cuda_visible_devices = "2,0"})) ==
        DeviceSelection{.devices = {2, 0}, .shown_by = "CUDA_VISIBLE_DEVICES='2,0'"});
  CHECK(visible(4, "3,2,1,0") == Devices{3, 2, 1, 0});
  CHECK(visible(4, " 1 , 3 ") == Devices{1, 3});
  CHECK(visible(4, "1gpu,3abc") == Devices{1, 3});  // strtoul, as CUDA and PyTorch read
  CHECK(visible(4, "+2") == Devices{2});
}

TEST_CASE("what follows an entry of CUDA_VISIBLE_DEVICES that is no device is invisible") {
  CHECK(visible(4, "0,2,-1,1") == Devices{0, 2});  // the CUDA Programming Guide's example
  CHECK(visible(4, "1,4,0") == Devices{1});
  CHECK(visible(4, "1,,0") == Devices{1});
  CHECK(visible(4, "1,gpu0,0") == Devices{1});
  CHECK(visible(4, "1,GPU-8932f937,0") == Devices{1});
}

TEST_CASE("CUDA_VISIBLE_DEVICES that shows nothing is refused with what to do") {
  CHECK(invisible(4, "") ==
        "error: CUDA_VISIBLE_DEVICES='' shows none of the 4 devices of cluster 'mine'; unset the variable, or list "
        "some of 0 to 3");
  CHECK(invisible(1, "-1") ==
        "error: CUDA_VISIBLE_DEVICES='-1' shows none of the 1 device of cluster 'mine' ('-1' is none of them, and CUDA "
        "stops there); unset the "
        "variable, or list some of 0");
  CHECK(invisible(4, "7,0") ==
        "error: CUDA_VISIBLE_DEVICES='7,0' shows none of the 4 devices of cluster 'mine' ('7' is none of them, and "
        "CUDA stops there); unset the "
        "variable, or list some of 0 to 3");
  CHECK(invisible(4, "0,1,0") ==
        "error: CUDA_VISIBLE_DEVICES='0,1,0' shows none of the 4 devices of cluster 'mine' ('0' is listed twice, and "
        "CUDA then shows none); unset "
        "the variable, or list some of 0 to 3");
}

TEST_CASE("UUIDs choose by the beginning that only one device has") {
  SelectionRequest request = cards(3, {.cuda_visible_devices = "GPU-b,GPU-a1"});
  request.devices[0].uuid = "GPU-a1234567";
  request.devices[1].uuid = "GPU-a7654321";
  request.devices[2].uuid = "GPU-b0000000";
  CHECK(chosen(request) == Devices{2, 0});
  request.environment.cuda_visible_devices = "GPU-b0000000,GPU-a,GPU-a1234567";  // GPU-a: two of them
  CHECK(chosen(request) == Devices{2});
  request.environment.cuda_visible_devices = "GPU-b,1";
  CHECK(chosen(request) == Devices{2});
}

TEST_CASE("UUIDs where none are known, and slices of GPUs, are refused") {
  CHECK(invisible(4, "GPU-8932f937") ==
        "error: CUDA_VISIBLE_DEVICES='GPU-8932f937' names GPUs by their UUIDs, which cluster 'mine' does not say; list "
        "them by their numbers as `nvidia-smi -L` prints "
        "them, or give --device-ids with the variable unset");
  CHECK(invisible(4, "MIG-8932f937/1/0") ==
        "error: CUDA_VISIBLE_DEVICES='MIG-8932f937/1/0' names slices of GPUs (MIG), and parplan plans for whole GPUs; "
        "list GPUs by their numbers");
}

TEST_CASE("CUDA numbers unlike devices the fastest first unless told to go by bus ids") {
  SelectionRequest request = cards(4, {});
  request.devices[0].speed = 10;
  request.devices[1].speed = 30;
  request.devices[2].speed = 10;
  request.devices[3].speed = 30;
  CHECK(chosen(request) == Devices{1, 3, 0, 2});  // equally fast ones by bus ids
  request.environment.cuda_device_order = "FASTEST_FIRST";
  CHECK(chosen(request) == Devices{1, 3, 0, 2});
  request.environment.cuda_visible_devices = "0,2";
  CHECK(chosen(request) == Devices{1, 0});
  request.environment.cuda_device_order = "PCI_BUS_ID";
  CHECK(chosen(request) == Devices{0, 2});
  request.environment.cuda_device_order = "PCI_BUSID";
  CHECK(error_of([&] { select_devices(request); }) ==
        "error: CUDA_DEVICE_ORDER='PCI_BUSID': expected one of FASTEST_FIRST, PCI_BUS_ID; did you mean 'PCI_BUS_ID'?");
}

TEST_CASE("CUDA_DEVICE_ORDER counts as unset where it is empty, and matters only where something goes by it") {
  CHECK(chosen(cards(3, {.cuda_visible_devices = "2,0", .cuda_device_order = ""})) == Devices{2, 0});
  SelectionRequest request = cards(3, {.cuda_device_order = "PCI"});
  CHECK(chosen(request) == Devices{0, 1, 2});
  request.device_ids = {2, 1};
  CHECK(chosen(request) == Devices{2, 1});
  const std::string refused =
      "error: CUDA_DEVICE_ORDER='PCI': expected one of FASTEST_FIRST, PCI_BUS_ID; did you mean 'PCI_BUS_ID'?";
  request.devices[1].speed = 2.0;
  CHECK(error_of([&] { select_devices(request); }) == refused);
  CHECK(error_of([] { select_devices(cards(3, {.cuda_visible_devices = "1", .cuda_device_order = "PCI"})); }) ==
        refused);
}

TEST_CASE("--device-ids count the devices that are visible") {
  CHECK(chosen(cards(4, {}, {3, 1})) == Devices{3, 1});
  CHECK(chosen(cards(4, {.cuda_visible_devices = "3,1,0"}, {1, 0})) == Devices{1, 3});
  CHECK(error_of([] { select_devices(cards(4, {}, {4})); }) ==
        "error: --device-ids: cluster 'mine' has devices 0 to 3, found 4");
  CHECK(error_of([] { select_devices(cards(4, {.cuda_visible_devices = "3,1"}, {2})); }) ==
        "error: --device-ids counts the devices that are visible, and CUDA_VISIBLE_DEVICES='3,1' shows 2 of the 4 of "
        "cluster 'mine', numbered 0 to 1; found 2");
}

TEST_CASE("ZE_AFFINITY_MASK is a set of devices, or of cards and their tiles") {
  CHECK(chosen(tiles(4, 1, "3,1")) == Devices{1, 3});
  CHECK(chosen(tiles(6, 2, "3,1,1")) == Devices{1, 3});  // FLAT: tiles are devices
  CHECK(chosen(tiles(2, 4, "1", "COMPOSITE")) == Devices{4, 5, 6, 7});
  CHECK(chosen(tiles(2, 4, "0.2, 1.3, 1.0, 0.3")) == Devices{2, 3, 4, 7});  // the specification's example
  CHECK(chosen(tiles(2, 3, "0,1.2")) == Devices{0, 1, 2, 5});
  CHECK(chosen(tiles(2, 2, "")) == Devices{0, 1, 2, 3});
}

TEST_CASE("masks that name what is not there are refused") {
  CHECK(error_of([] { select_devices(tiles(2, 2, "4")); }) ==
        "error: ZE_AFFINITY_MASK='4': cluster 'mine' has devices 0 to 3, found '4'");
  CHECK(error_of([] { select_devices(tiles(2, 2, "0,1.2")); }) ==
        "error: ZE_AFFINITY_MASK='0,1.2': cluster 'mine' has cards 0 to 1 of 2 tiles, found '1.2'");
  CHECK(error_of([] { select_devices(tiles(2, 2, "0,x")); }) ==
        "error: ZE_AFFINITY_MASK='0,x': cluster 'mine' has devices 0 to 3, found 'x'");
  CHECK(error_of([] { select_devices(tiles(2, 2, "0.1", "FLAT")); }) ==
        "error: ZE_AFFINITY_MASK='0.1' names tiles of cards, and with ZE_FLAT_DEVICE_HIERARCHY=FLAT tiles are devices "
        "of their own: number them from 0 to 3, or set "
        "ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE");
  CHECK(error_of([] { select_devices(tiles(2, 2, "0", "flat")); }) ==
        "error: ZE_FLAT_DEVICE_HIERARCHY='flat': expected one of FLAT, COMPOSITE, COMBINED; did you mean 'FLAT'?");
}

TEST_CASE("a variable speaks for devices of its driver only") {
  SelectionRequest request = cards(4, {.cuda_visible_devices = "", .ze_affinity_mask = "9"});
  for (const BackendKind other : {BackendKind::cpu, BackendKind::rocm, BackendKind::synapse}) {
    request.backend = other;
    CHECK(select_devices(request) == DeviceSelection{.devices = {0, 1, 2, 3}, .shown_by = ""});
  }
  request.backend = BackendKind::oneapi;
  request.environment.ze_affinity_mask = "2";
  CHECK(chosen(request) == Devices{2});
}

TEST_CASE("drivers are told by variables of their own which devices to show") {
  using Variables = std::vector<std::pair<std::string, std::string>>;
  CHECK(visibility_of(BackendKind::cuda, {2, 0}) ==
        VisibilitySetting{.variables = {{"CUDA_DEVICE_ORDER", "PCI_BUS_ID"}, {"CUDA_VISIBLE_DEVICES", "2,0"}}});
  CHECK(visibility_of(BackendKind::rocm, {1}).variables == Variables{{"HIP_VISIBLE_DEVICES", "1"}});
  CHECK(visibility_of(BackendKind::oneapi, {0, 2}).in_this_order);
  CHECK(!visibility_of(BackendKind::oneapi, {2, 0}).in_this_order);
  CHECK(visibility_of(BackendKind::synapse, {3, 1}) ==
        VisibilitySetting{.variables = {{"HABANA_VISIBLE_MODULES", "3,1"}}});
  CHECK(visibility_of(BackendKind::cpu, {0, 1}) == VisibilitySetting{});
}

TEST_CASE("what is told to CUDA is what CUDA then shows") {
  for (const Devices& wanted : {Devices{0}, Devices{3, 1}, Devices{2, 0, 1, 3}}) {
    VisibilityVariables environment;
    for (const auto& [name, value] : visibility_of(BackendKind::cuda, wanted).variables)
      (name == "CUDA_DEVICE_ORDER" ? environment.cuda_device_order : environment.cuda_visible_devices) = value;
    SelectionRequest request = cards(4, environment);
    request.devices[2].speed = 5;  // would be CUDA's first
    CHECK(chosen(request) == wanted);
  }
}

TEST_CASE("the environment chooses devices of a file that is one node, and a note says so") {
  ClusterOptions options{.device = "rtx-5060ti-16gb", .network = {}, .devices = {}, .nodes = {}};
  options.environment.cuda_visible_devices = "2,0";
  const Cluster cluster = find_cluster(four_cards, catalog, options);
  CHECK(cluster.devices() == 2);
  CHECK(cluster.device_ids == Devices{2, 0});
  CHECK(cluster.notes.back() == "CUDA_VISIBLE_DEVICES='2,0' shows devices 2, 0 of 4");
  const NodeKind& node = cluster.groups.front().node;
  CHECK(node.vertices[node.devices[0]].name == "GPU2");
  CHECK(node.vertices[node.devices[1]].name == "GPU0");
  CHECK(read_cluster(YamlNode::parse(write_cluster(cluster), "written")) == cluster);

  options.devices = 1;
  CHECK(find_cluster(four_cards, catalog, options).device_ids == Devices{2});
  options.devices = 3;
  CHECK(error_of([&] { find_cluster(four_cards, catalog, options); }) ==
        "error: --devices 3: CUDA_VISIBLE_DEVICES='2,0' shows 2 of the 4 devices of cluster 'smi-4x-rtx5060ti-phb'; "
        "leave --devices out, or let the variable show more");
  options.devices.reset();
  options.device_ids = {1};
  CHECK(find_cluster(four_cards, catalog, options).device_ids == Devices{0});
  CHECK(find_cluster(four_cards, catalog, options).notes.back() ==
        "CUDA_VISIBLE_DEVICES='2,0' shows devices 2, 0 of 4; --device-ids 1 chose 0 of them");
  options.environment.cuda_visible_devices = "3,2,1";
  options.device_ids = {2, 0};
  CHECK(find_cluster(four_cards, catalog, options).notes.back() ==
        "CUDA_VISIBLE_DEVICES='3,2,1' shows devices 3, 2, 1 of 4; --device-ids 2,0 chose 1, 3 of them");
  options.device_ids = {};
  options.environment.cuda_visible_devices = "";
  CHECK(error_of([&] { find_cluster(four_cards, catalog, options); }) ==
        "error: CUDA_VISIBLE_DEVICES='' shows none of the 4 devices of cluster 'smi-4x-rtx5060ti-phb'; unset the "
        "variable, or list some of 0 to 3");
}

TEST_CASE("the environment never chooses devices of a named cluster or of several nodes") {
  ClusterOptions options;
  options.environment.cuda_visible_devices = "";
  CHECK(find_cluster("dgx-h100", catalog, options).devices() == 8);
  ClusterOptions several{
      .device = "h200-sxm-141gb", .network = parse_bandwidth("400 Gbit/s"), .devices = {}, .nodes = 2};
  several.environment.cuda_visible_devices = "1";
  const Cluster cluster = find_cluster(source + "/tests/data/topologies/smi-hgx-h200-8gpu-8nic.txt", catalog, several);
  CHECK(cluster.devices() == 16);
  CHECK(cluster.device_ids.empty());
}

TEST_CASE("--device-ids chooses of a named cluster's one node in its order") {
  ClusterOptions options;
  options.device_ids = {5, 2};
  const Cluster cluster = find_cluster("dgx-a100", catalog, options);
  CHECK(cluster.device_ids == Devices{5, 2});
  CHECK(cluster.devices() == 2);
  options.nodes = 2;
  CHECK(error_of([&] { find_cluster("dgx-a100", catalog, options); }) ==
        "error: --device-ids chooses devices of one node, and cluster 'dgx-a100' has 2 nodes; give --nodes 1");
  options.nodes.reset();
  options.devices = 4;
  CHECK(error_of([&] { find_cluster("dgx-a100", catalog, options); }) ==
        "error: --device-ids says how many devices already; leave --devices out");
}

TEST_CASE("of devices that were selected before, numbers are those of the machine") {
  Cluster cluster = find_cluster("dgx-a100", catalog);
  select_devices(cluster, {}, {6, 4, 2});
  select_devices(cluster, {}, {2, 0});
  CHECK(cluster.device_ids == Devices{2, 6});
}
