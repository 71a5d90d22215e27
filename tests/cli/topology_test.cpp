// What `topology` shows and draws, and how the environment and --device-ids choose devices, on the
// command line.
#include <doctest/doctest.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "planner/base/json.h"
#include "planner/base/yaml.h"
#include "tests/cli/call.h"

namespace parplan {
namespace {

using namespace testing;

const std::string topologies = data + "/topologies/";
const std::vector<std::string> four_cards = {"--cluster", topologies + "smi-4x-rtx5060ti-phb.txt", "--device",
                                             "rtx-5060ti-16gb"};

// An environment variable that is restored afterwards.
class Variable {
 public:
  Variable(std::string name, const std::string& value) : name_(std::move(name)) {
    if (const char* before = std::getenv(name_.c_str())) before_ = before;
    setenv(name_.c_str(), value.c_str(), 1);
  }
  ~Variable() {
    if (before_) setenv(name_.c_str(), before_->c_str(), 1);
    else unsetenv(name_.c_str());
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  std::string name_;
  std::optional<std::string> before_;
};

std::vector<std::string> words(std::vector<std::string> first, const std::vector<std::string>& rest) {
  first.insert(first.end(), rest.begin(), rest.end());
  return first;
}

Json suggested(const std::vector<std::string>& rest) {
  const Called called =
      call(words({"suggest", "gpt2", "--global-batch", "8", "--seq-len", "128", "--json", "-", "--quiet"}, rest));
  INFO(called.err);
  REQUIRE(called.code == 0);
  return Json::parse(called.out);
}

}  // namespace

TEST_CASE("topology prints a node as nvidia-smi does, with rates") {
  CHECK(call(words({"topology"}, four_cards)).out ==
        "smi-4x-rtx5060ti-phb: 1 node of 4 x NVIDIA GeForce RTX 5060 Ti 16 GB (rtx-5060ti-16gb)\n"
        "  memory    15.5 GiB, 768 MiB of it for libraries; 394 GB/s reached\n"
        "  fp32      17.4 TFLOP/s reached of 23.7 TFLOP/s\n"
        "  half      47.4 TFLOP/s reached of 47.4 TFLOP/s\n"
        "  tf32      23.7 TFLOP/s reached of 23.7 TFLOP/s\n"
        "  PCIe      24.0 GB/s, 1.00 us: all 6 pairs\n"
        "  network   none\n"
        "  note      PCIe links taken as generation 5 x8, the card's\n");
  const std::string cube = call({"topology", "dgx-1-v100"}).out;
  INFO(cube);
  CHECK(cube.find("  B/s       GPU0       GPU1       GPU2       GPU3       GPU4       GPU5       GPU6       GPU7       "
                  "NIC0        NIC1        NIC2        NIC3\n"
                  "  GPU0      X          NV1 22.4G  NV1 22.4G  NV2 44.8G  NV2 44.8G  SYS 6.00G  SYS 6.00G  SYS 6.00G  "
                  "PIX 12.0G*  PHB 12.0G   SYS 6.00G   SYS 6.00G\n") != std::string::npos);
  CHECK(call({"topology", "gb200-nvl72", "--devices", "36"}).out.starts_with("gb200-nvl72: 1 node of 36 x "));
  CHECK(call({"topology", "gb200-nvl72", "--device-ids", "3"}).err ==
        "error: --device-ids chooses devices of one machine, and a node of cluster 'gb200-nvl72' is 18 machines; give "
        "--devices\n");
}

TEST_CASE("topology prints levels and rails") {
  const Folder folder;
  const std::string file = folder.write("rails.yaml",
                                        "name: rails\ndevice: h100-sxm-80gb\nnode: {devices: 2, intra: nvswitch, nics: "
                                        "{count: 2, line_rate: 400 Gbit/s}}\nnodes: 64\n"
                                        "network: {latency: 0.7 us, rails: true, levels: [{name: leaf, nodes: 32}, "
                                        "{name: spine, oversubscription: 3, latency: 1.5 us}]}\n");
  CHECK(call({"topology", file}).out ==
        "rails: 64 nodes of 2 x NVIDIA H100 SXM5 80 GB (h100-sxm-80gb)\n"
        "  memory    79.1 GiB, 1.25 GiB of it for libraries; 2.97 TB/s reached\n"
        "  fp32      52.0 TFLOP/s reached of 67.0 TFLOP/s\n"
        "  half      794 TFLOP/s reached of 989 TFLOP/s\n"
        "  tf32      397 TFLOP/s reached of 495 TFLOP/s\n"
        "  fp8       1.45 PFLOP/s reached of 1.98 PFLOP/s\n"
        "  NV18      371 GB/s, 600 ns: GPU0-GPU1\n"
        "  B/s       GPU0       GPU1       NIC0        NIC1\n"
        "  GPU0      X          NV18 371G  PIX 48.0G*  -\n"
        "  GPU1      NV18 371G  X          -           PIX 48.0G*\n"
        "  network   96.0 GB/s a node: GPU0 by NIC0, GPU1 by NIC1\n"
        "  leaf      blocks of 32 nodes, 700 ns, oversubscription 1\n"
        "  spine     all nodes, 1.50 us, oversubscription 3\n"
        "  rails     a switch for each NIC of a node; traffic changes rails inside nodes where there is NVLink\n");
}

TEST_CASE("topology writes a graph and JSON to files, or one of them to standard output") {
  const Folder folder;
  const Called called =
      call({"topology", "dgx-h100", "--graphviz", folder.path("a.dot"), "--json", folder.path("a.json")});
  CHECK(called.code == 0);
  CHECK(called.out.starts_with("dgx-h100: 1 node of 8 x "));
  CHECK(called.err == "wrote " + folder.path("a.json") + "\nwrote " + folder.path("a.dot") + "\n");
  CHECK(call({"topology", "dgx-h100", "--graphviz"}).out == folder.read("a.dot"));
  CHECK(call({"topology", "dgx-h100", "--graphviz", "-"}).out == folder.read("a.dot"));
  CHECK(call({"topology", "dgx-h100", "--json"}).out == folder.read("a.json"));
  CHECK(Json::parse(folder.read("a.json"))["groups"][0]["devices"].size() == 8);
  const Called both = call({"topology", "dgx-h100", "--graphviz", "-", "--json", "-"});
  CHECK(both.code == 2);
  CHECK(both.err == "error: --json and --graphviz cannot both go to standard output; give one of them a file\n");
}

TEST_CASE("suggest says which variables and which command put ranks where they were planned") {
  const Json whole = suggested(four_cards);
  CHECK(whole["environment"] == Json::object());
  CHECK(whole["launch"] == "parplan run plan.yaml");
  CHECK(whole["inputs"]["cluster"]["device_ids"].is_null());
  const Json chosen = suggested(words(four_cards, {"--device-ids", "2,0"}));
  CHECK(chosen["environment"].dump() == R"({"CUDA_DEVICE_ORDER":"PCI_BUS_ID","CUDA_VISIBLE_DEVICES":"2,0"})");
  CHECK(chosen["launch"] == "parplan run plan.yaml");
  CHECK(chosen["inputs"]["cluster"]["device_ids"] == Json({2, 0}));
  CHECK(suggested({"--cluster", "dgx-a100", "--nodes", "2", "--dp", "8", "--tp", "2", "--pp", "1"})["launch"] ==
        "mpirun -n 16 --hostfile hosts --map-by ppr:8:node parplan run plan.yaml");
}

TEST_CASE("the environment chooses devices of one machine's topology, in its order, and the plan keeps which") {
  const Folder folder;
  const Variable visible("CUDA_VISIBLE_DEVICES", "3,1,0");
  const std::string plan = folder.path("plan.yaml");
  const Called good = call(words(
      {"suggest", "gpt2", "--global-batch", "9", "--seq-len", "128", "--dp", "3", "--tp", "1", "--pp", "1", "-o", plan},
      four_cards));
  INFO(good.err);
  REQUIRE(good.code == 0);
  CHECK(good.err.find("note: smi-4x-rtx5060ti-phb: CUDA_VISIBLE_DEVICES='3,1,0' shows devices 3, 1, 0 of 4\n") !=
        std::string::npos);
  CHECK(good.out.find("\nstart     CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=3,1,0 parplan run " + plan +
                      "\n") != std::string::npos);
  CHECK(folder.read("plan.yaml").find("device_ids: [3, 1, 0]") != std::string::npos);
  CHECK(suggested(words(four_cards, {"--device-ids", "1"}))["environment"]["CUDA_VISIBLE_DEVICES"] == "1");
  CHECK(suggested({"--cluster", "dgx-a100"})["environment"] == Json::object());
  CHECK(call({"topology", cpu_8}).code == 0);
}

TEST_CASE("an environment that shows nothing is refused, where it counts") {
  const Variable visible("CUDA_VISIBLE_DEVICES", "");
  const Called called = call(words({"topology"}, four_cards));
  CHECK(called.code == 2);
  CHECK(called.err ==
        "error: CUDA_VISIBLE_DEVICES='' shows none of the 4 devices of cluster 'smi-4x-rtx5060ti-phb'; unset the "
        "variable, or list some of 0 to 3\n");
  CHECK(call({"topology", "dgx-h100"}).code == 0);
  CHECK(call({"topology", cpu_8}).code == 0);
}

}  // namespace parplan
