// Mistakes of a user on the command line: exit code and the whole message.
#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <sstream>
#include <streambuf>
#include <string>
#include <vector>

#include "planner/base/file.h"
#include "tests/cli/call.h"

namespace parplan {
namespace {

using namespace testing;

struct Mistake {
  std::vector<std::string> arguments;
  std::string message;  // after "error: "
};

void check(const std::vector<Mistake>& mistakes) {
  for (const Mistake& mistake : mistakes) {
    const Called called = call(mistake.arguments);
    CHECK(called.code == 2);
    CHECK(called.out == "");
    CHECK(called.err == "error: " + mistake.message + "\n");
  }
}

const std::string models =
    "bert-base, bert-large, bloom-176b, bloom-7b1, command-a, command-r, command-r7b, falcon-40b, falcon-7b, "
    "flan-t5-xxl, gemma-7b, gemma2-27b, gemma2-9b, gemma3-12b, gemma3-1b, glm4-9b, gpt-neox-20b, gpt2, gpt2-large, "
    "gpt2-medium, gpt2-xl, "
    "gpt3-175b, gptj-6b, granite-3.1-8b, llama2-70b, llama2-7b, llama3-405b, llama3-70b, llama3-8b, llama3.2-1b, "
    "mistral-7b, mlp, olmo2-13b, "
    "olmo2-7b, opt-6.7b, phi3-mini, pythia-6.9b, qwen2.5-7b, qwen3-32b, qwen3-8b, starcoder2-15b, "
    "t5-11b, t5-3b, t5-base, t5-large, t5-small, vit-base, vit-huge, vit-large";
const std::string clusters =
    "aurora, aws-p4d, aws-p4de, aws-p5, aws-p5en, azure-nd-a100-v4, azure-nd-h100-v5, azure-ndv2, dgx-1-v100, "
    "dgx-2-v100, "
    "dgx-a100, dgx-b200, dgx-h100, gaudi2-8, gaudi3-8, gb200-nvl72, gb300-nvl72, hgx-a800, hgx-h200, hgx-h800, "
    "jean-zay-a100, l40s-8, lumi, mi300x-8, "
    "rtx-3090-8, "
    "rtx-4090-4, rtx-4090-8, rtx-a6000-2-nvlink, titan-rtx-2, titan-rtx-2-nvlink";

TEST_CASE("commands that do not exist are refused with those that do") {
  check({{{"sugest"},
          "unknown command 'sugest'; allowed: suggest, simulate, run, explain, sweep, measure, topology, validate, "
          "completion; did you mean 'suggest'?"},
         {{"frobnicate"},
          "unknown command 'frobnicate'; allowed: suggest, simulate, run, explain, sweep, measure, topology, validate, "
          "completion"},
         {{"--cluster", "dgx-a100"},
          "unknown option '--cluster'; expected a command: suggest, simulate, run, explain, sweep, measure, topology, "
          "validate, completion"}});
}

TEST_CASE("without a command the help goes to standard error") {
  const Called called = call({});
  CHECK(called.code == 2);
  CHECK(called.out == "");
  CHECK(called.err == call({"--help"}).out);
}

TEST_CASE("options and arguments that a command does not take are refused") {
  check(
      {{{"suggest", "gpt2", "--dpp", "3"}, "unknown option '--dpp'; see parplan suggest --help; did you mean '--dp'?"},
       {{"suggest", "gpt2", "--globl-batch=8"},
        "unknown option '--globl-batch'; see parplan suggest --help; did you mean '--global-batch'?"},
       {{"suggest", "gpt2", "-x"}, "unknown option '-x'; see parplan suggest --help"},
       {{"explain", "plan.yaml", "--dp", "2"}, "unknown option '--dp'; see parplan explain --help"},
       {{"suggest"}, "suggest needs a MODEL: a model.yaml, a Hugging Face config.json or a name of the zoo"},
       {{"run"}, "run needs a PLAN: a plan.yaml that suggest or simulate wrote"},
       {{"suggest", "gpt2", "llama3-8b"}, "unexpected argument 'llama3-8b'; suggest takes one MODEL"},
       {{"suggest", "gpt2", "--dp", "2", "--dp", "4"}, "--dp is given twice; give it once"},
       {{"suggest", "gpt2", "-o", "a.yaml", "--output", "b.yaml"}, "--output is given twice; give it once"},
       {{"suggest", "gpt2", "--dp"}, "--dp needs a value (N)"},
       {{"suggest", "gpt2", "--cluster", "--dp", "2"}, "--cluster needs a value (FILE|NAME)"},
       {{"suggest", "gpt2", "--quiet=yes"}, "--quiet takes no value, found '--quiet=yes'; write --quiet alone"}});
}

TEST_CASE("values that cannot be read are refused") {
  check(
      {{{"suggest", "gpt2", "--dp", "two"}, "--dp: expected a whole number from 1 to 1048576, found 'two'"},
       {{"suggest", "gpt2", "--tp", "0"}, "--tp: expected a whole number from 1 to 1048576, found '0'"},
       {{"suggest", "gpt2", "--pp", "-2"}, "--pp: expected a whole number from 1 to 1048576, found '-2'"},
       {{"suggest", "gpt2", "--cp-ulysses", "0"}, "--cp-ulysses: expected a whole number from 1 to 1048576, found '0'"},
       {{"suggest", "gpt2", "--devices", "1.5"}, "--devices: expected a whole number from 1 to 1048576, found '1.5'"},
       {{"suggest", "gpt2", "--devices", "99999999999999999999"},
        "--devices: expected a whole number from 1 to 1048576, found '99999999999999999999'"},
       {{"suggest", "gpt2", "--zero", "4"}, "--zero: expected a whole number from 0 to 3, found '4'"},
       {{"suggest", "gpt2", "--global-batch", ""},
        "--global-batch needs a value (N), found an empty one; give one, or leave --global-batch out"},
       {{"suggest", "gpt2", "--seq-len", "1k"},
        "--seq-len: expected a whole number from 1 to 1099511627776, found '1k'"},
       {{"suggest", "gpt2", "--top", "0"}, "--top: expected a whole number from 1 to 1000, found '0'"},
       {{"suggest", "gpt2", "--max-candidates", "0"},
        "--max-candidates: expected a whole number from 1 to 1099511627776, found '0'"},
       {{"run", "plan.yaml", "--steps", "0"}, "--steps: expected a whole number from 1 to 1000000000, found '0'"},
       {{"suggest", "gpt2", "--precision", "fp4"},
        "--precision: expected one of bf16, fp16, fp8, tf32, fp32, found 'fp4'; did you mean 'fp8'?"},
       {{"suggest", "gpt2", "--optimizer", "adamww"},
        "--optimizer: expected one of adamw, adamw_8bit, adam, sgd, muon, found 'adamww'; did you mean 'adamw'?"},
       {{"simulate", "gpt2", "--schedule", "gpip"},
        "--schedule: expected one of gpipe, 1f1b, interleaved, zero_bubble_h1, zero_bubble_v, dualpipe_v, found 'gpip'"
        "; did you mean 'gpipe'?"},
       {{"simulate", "gpt2", "--recompute", "selective"},
        "--recompute: expected one of none, norms, activation, norms+activation, core_attn, core_attn+norms, "
        "core_attn+activation, core_attn+norms+activation, mlp, norms+mlp, core_attn+mlp, core_attn+norms+mlp, "
        "every_other_product, full, "
        "found 'selective'"},
       {{"simulate", "gpt2", "--stage-blocks", "7,x"},
        "--stage-blocks: expected a whole number from 1 to 1048576, found 'x'"},
       {{"suggest", "gpt2", "--device-ids", "0,,1"},
        "--device-ids: expected a whole number from 0 to 1048576, found ''"},
       {{"suggest", "gpt2", "--device-ids", "1,0,1"}, "--device-ids: device 1 is listed twice; name each once"},
       {{"suggest", "gpt2", "--memory-limit", "3"},
        "--memory-limit: expected a size with its unit such as '80 GiB', found '3'; allowed units: B, kB, MB, GB, TB, "
        "KiB, MiB, GiB, TiB"},
       {{"suggest", "gpt2", "--memory-limit", "120%"},
        "--memory-limit: expected bytes, such as '40 GiB', or a percentage above 0% and up to 100%, found '120%'"},
       {{"run", "plan.yaml", "--processes", "0"}, "--processes: expected a whole number from 1 to 100000, found '0'"},
       {{"run", "plan.yaml", "--backend", "gpu"},
        "--backend: expected one of auto, cpu, cuda, found 'gpu'; did you mean 'cpu'?"}});
  CHECK(call({"suggest", "gpt2", "--network", "fast"}).err.starts_with("error: --network: expected a bandwidth"));
  CHECK(call({"suggest", "gpt2", "--mesh-order", "dp-tp"}).err.starts_with("error: --mesh-order: "));
}

TEST_CASE("names and files that are not there are refused with those that are") {
  check({{{"suggest", "gpt4", "--cluster", cpu_8},
          "unknown model 'gpt4'; allowed: a path to a .yaml or .json file, a folder that holds a config.json, or one "
          "of " +
              models + "; did you mean 'gpt2'?"},
         {{"suggest", "gpt2", "--cluster", "dgxa100"},
          "unknown cluster 'dgxa100'; expected a file or one of " + clusters + "; did you mean 'dgx-a100'?"},
         {{"topology", "nowhere"}, "unknown cluster 'nowhere'; expected a file or one of " + clusters},
         {{"suggest", "nothing.yaml"}, "cannot read 'nothing.yaml': No such file or directory"},
         {{"simulate", "nothing.yaml"}, "cannot read 'nothing.yaml': No such file or directory"},
         {{"suggest", "gpt2", "--cluster", "nothing.txt"}, "cannot read 'nothing.txt': No such file or directory"},
         {{"run", "nothing.yaml"}, "cannot read 'nothing.yaml': No such file or directory"},
         {{"explain", "nothing.yaml"}, "cannot read 'nothing.yaml': No such file or directory"}});
  const Called called = call(
      {"suggest", "gpt2", "--cluster", data + "/topologies/smi-hgx-h200-8gpu-8nic.txt", "--device", "h200-sxm-141g"});
  CHECK(called.code == 2);
  CHECK(called.err.starts_with("error: --device: unknown card 'h200-sxm-141g'; known are a100-"));
  CHECK(called.err.ends_with("; did you mean 'h200-sxm-141gb'?\n"));
}

TEST_CASE("a layout that contradicts devices, model or batch is refused") {
  const std::vector<std::string> on_8{"suggest", "gpt2", "--cluster", "dgx-a100"};
  const auto with = [&](std::vector<std::string> more) {
    std::vector<std::string> all = on_8;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  check({{with({"--dp", "3", "--tp", "2", "--pp", "1", "--devices", "8"}),
          "the layout takes 6 devices (dp 3 x tp 2 x pp 1), and --devices asks for 8; make them equal, or leave one "
          "part out"},
         {with({"--dp", "4", "--tp", "4"}),
          "the layout needs 16 devices (dp 4 x tp 4); the cluster has 8; lower a degree, or give more with --devices "
          "or --nodes"},
         {with({"--tp", "5"}),
          "tensor parallelism over 5 cannot split 12 attention heads (12 key/value groups); legal degrees: 1, 2, 3, 4, "
          "6, 12"},
         {with({"--dp", "2", "--global-batch", "7"}),
          "data parallelism over 2 cannot split a global batch of 7 sequences in micro-batches of 1; legal degrees: 1, "
          "7, or any with replica_micro_batches"},
         {with({"--micro-batch", "3"}),
          "micro-batches of 3 cannot split a global batch of 512 sequences; legal micro-batches: 1, 2, 4, 8, 16, 32, "
          "64, 128, 256, 512"},
         {with({"--dp", "1", "--zero", "1"}),
          "ZeRO stage 1 shards over data-parallel ranks, and there is 1 (dp 1); legal stages: 0"},
         {with({"--tp", "1", "--sequence-parallel"}),
          "sequence parallelism spreads work over tensor-parallel ranks, and there is 1 (tp 1)"},
         {with({"--pp", "2", "--stage-blocks", "7,8"}),
          "the stage cut [7, 8] holds 15 blocks, and the model has 14 (embedding to head)"},
         {with({"--pp", "15", "--devices", "16"}),
          "pipeline parallelism over 15 cannot give every stage a block: the model has 14 (embedding to head); legal "
          "degrees: 1 to 14"},
         {with({"--zero", "2", "--prefetch-depth", "2"}),
          "prefetch_depth 2 says how many blocks ahead parameters are gathered, and none are; it goes with zero_stage "
          "3 or an offload of parameters"},
         {with({"--zero", "0", "--gather-unit", "parameter"}),
          "gather_unit parameter says which parameters one collective gathers, and none does; it goes with zero_stage "
          "3"},
         {with({"--offload", "optimizer", "--offload-layers", "2"}),
          "--offload-layers says of how many layers of each stage activations leave the device, and --offload is "
          "optimizer; leave --offload-layers out, or add activations to --offload"},
         {with({"--pp", "1", "--offload-layers", "13"}),
          "offload_layers is 13, and the model has 12 layers; take 1 to 12, or leave it out: all layers"},
         {{"simulate", "gpt2", "--cluster", "dgx-a100", "--dp", "8", "--prefetch-depth", "2"},
          "prefetch_depth 2 says how many blocks ahead parameters are gathered, and none are; it goes with zero_stage "
          "3 or an offload of parameters"},
         {{"simulate", "gpt2", "--cluster", "dgx-a100", "--gather-unit", "parameter"},
          "gather_unit parameter says which parameters one collective gathers, and none does; it goes with zero_stage "
          "3"},
         {with({"--dp", "1", "--tp", "1", "--pp", "1", "--zero", "1"}),
          "ZeRO stage 1 shards over data-parallel ranks, and there is 1 (dp 1); legal stages: 0"},
         {with({"--tp", "2", "--dp", "1", "--pp", "1", "--stage-blocks", "7,7"}),
          "the stage cut [7, 7] has 2 stages, and pp is 1"},
         {with({"--seq-len", "2048"}),
          "sequence length 2048 is longer than the 1024 learned positions of model 'gpt2'; allowed: 1 to 1024"},
         {{"simulate", "gpt2", "--cluster", "dgx-a100", "--tp", "16"},
          "the layout needs 16 devices (tp 16); the cluster has 8; lower a degree, or give more with --devices or "
          "--nodes"}});
}

TEST_CASE("a batch whose bytes cannot be counted is refused instead of counted wrong") {
  for (const char* command : {"suggest", "simulate"}) {
    const Called called =
        call({command, "gpt2", "--cluster", "dgx-a100", "--global-batch", "1099511627776", "--quiet"});
    CHECK(called.code == 2);
    CHECK(called.err.starts_with("error: a global batch of 1099511627776 sequences of 1024 tokens has "));
    CHECK(called.err.find(" bytes of activations and their gradients, more than can be counted; give at most ") !=
          std::string::npos);
  }
}

TEST_CASE("a layout that leaves the search nothing is refused") {
  const Called called = call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--devices", "1", "--zero", "2", "--quiet"});
  CHECK(called.code == 2);
  CHECK(called.err ==
        "error: no layout of up to 1 devices has the parts that are given; leave some of them to the search\n");
}

TEST_CASE("devices that the cluster does not have are refused") {
  check({{{"suggest", "gpt2", "--cluster", "dgx-a100", "--devices", "12"},
          "--devices 12: cluster 'dgx-a100' has 8 devices a node and any number of nodes; allowed are 1 to 8 devices "
          "and multiples of 8"},
         {{"suggest", "gpt2", "--cluster", "dgx-a100", "--device-ids", "0,8"},
          "--device-ids: cluster 'dgx-a100' has devices 0 to 7, found 8"},
         {{"suggest", "gpt2", "--cluster", "dgx-a100", "--nodes", "2", "--device-ids", "0"},
          "--device-ids chooses devices of one node, and cluster 'dgx-a100' has 2 nodes; give --nodes 1"},
         {{"suggest", "gpt2", "--cluster", "dgx-a100", "--devices", "4", "--device-ids", "0,1"},
          "--device-ids says how many devices already; leave --devices out"},
         {{"suggest", "gpt2", "--cluster", "dgx-a100", "--device", "h100-sxm-80gb"},
          "--device h100-sxm-80gb: cluster 'dgx-a100' already says its device, a100-sxm4-80gb; --device is for texts "
          "of nvidia-smi topo -m and NCCL's topologies"},
         {{"suggest", "gpt2", "--cluster", "dgx-a100", "--measure-again"},
          "--measure-again measures this machine, and --cluster dgx-a100 is given; leave one of them out"},
         {{"suggest", "gpt2", "--nodes", "2"}, "--nodes 2: this machine is one node; give --cluster for others"},
         {{"suggest", "gpt2", "--device", "h100-sxm-80gb"},
          "--device completes a topology (text of nvidia-smi topo -m, XML of NCCL); give that with --cluster"},
         {{"topology", "dgx-a100", "--cluster", "dgx-h100"},
          "a cluster is given twice: as argument and with --cluster; leave one of them out"},
         {{"suggest", "gpt2", "--cluster", "dgx-a100", "--memory-limit", "100 GiB"},
          "--memory-limit: a device of cluster 'dgx-a100' has 79.1 GiB, found 100 GiB; give less, or a percentage"},
         {{"suggest", "gpt2", "--cluster", "dgx-a100", "--network", "1e300 Gbit/s"},
          "--network: expected a line rate from 8 bit/s to 8000000 Tbit/s, found '1e300 Gbit/s'"},
         {{"suggest", "gpt2", "--cluster", "dgx-a100", "--network", "0 Gbit/s"},
          "--network: expected a rate above 0, found '0 Gbit/s'; leave --network out for none"},
         {{"suggest", "gpt2", "--cluster", "dgx-a100", "--price", "1e308 USD"},
          "--price: expected a price of a device for an hour, such as '2.50 USD', found '1e308 USD': at most "
          "1000000000 is allowed"},
         {{"sweep", "gpt2", "--cluster", "dgx-a100", "--price", "2,50 EUR"},
          "--price: expected a price of a device for an hour, such as '2.50 USD', found '2,50 EUR': decimals stand "
          "behind a point, and thousands have nothing between "
          "them"}});
}

TEST_CASE("more micro-batches than a plan can list are refused") {
  check({{{"simulate", "gpt2", "--cluster", "dgx-a100", "--global-batch", "2500000000", "--dp", "1", "--tp", "1",
           "--pp", "1"},
          "a step would be 2500000000 micro-batches of 1 on each data-parallel rank; with 1 stage a plan holds at most "
          "262144: take larger micro-batches, more data "
          "parallelism, or a smaller batch"},
         {{"suggest", "gpt2", "--cluster", "dgx-a100", "--global-batch", "1000000", "--dp", "1", "--tp", "1", "--pp",
           "8", "--micro-batch", "1"},
          "a step would be 1000000 micro-batches of 1 on each data-parallel rank; with 8 stages a plan holds at most "
          "32768: take larger micro-batches, more data "
          "parallelism, or a smaller batch"}});
}

TEST_CASE("outputs that exclude one another are refused") {
  check({{{"suggest", "gpt2", "--cluster", cpu_8, "--json", "--csv"},
          "--json and --csv cannot both go to standard output; give one of them a file"},
         {{"suggest", "gpt2", "--cluster", cpu_8, "--quiet", "--verbose"},
          "--quiet and --verbose exclude one another; leave one of them out"}});
}

TEST_CASE("two outputs to one file are refused, whatever they are called") {
  const Folder folder;
  const std::string same = folder.path("same");
  const std::string link = folder.path("link");
  std::filesystem::create_symlink("same", link);
  check({{{"suggest", "gpt2", "--cluster", cpu_8, "--json", same, "--csv", same},
          "--json and --csv both write to '" + same + "'; give one of them another file"},
         {{"suggest", "gpt2", "--cluster", cpu_8, "--csv", same, "-o", same},
          "--csv and --output both write to '" + same + "'; give one of them another file"},
         {{"simulate", "gpt2", "--cluster", cpu_8, "--trace", same, "-o", link},
          "--output and --trace write to one file, '" + link + "' and '" + same + "'; give one of them another"},
         {{"topology", cpu_8, "--json", same, "--graphviz", folder.path("./same")},
          "--json and --graphviz write to one file, '" + same + "' and '" + folder.path("./same") +
              "'; give one of them another"},
         {{"topology", cpu_8, "--json", "--graphviz"},
          "--json and --graphviz cannot both go to standard output; give one of them a file"},
         {{"suggest", "gpt2", "--cluster", cpu_8, "--json", "/dev/stdout", "--csv"},
          "--json and --csv cannot both go to standard output; give one of them a file"},
         {{"sweep", "gpt2", "--cluster", cpu_8, "--csv", folder.path("same.xlsx"), "-o", folder.path("same.xlsx")},
          "--csv and --output both write to '" + folder.path("same.xlsx") + "'; give one of them another file"},
         {{"measure", "--device", "cpu", "-o", same, "--write-device", same},
          "--output and --write-device both write to '" + same + "'; give one of them another file"}});
  CHECK_FALSE(std::filesystem::exists(same));
  CHECK(call({"topology", cpu_8, "--quiet", "--json", "/dev/null", "--graphviz", "/dev/null"}).code == 0);
}

TEST_CASE("an output that would replace an input is refused, whatever they are called") {
  const Folder folder;
  const std::string model = folder.path("model.yaml");
  const std::string cluster = folder.path("cluster.yaml");
  const std::string plan = folder.path("plan.yaml");
  const std::string link = folder.path("link.json");
  std::filesystem::copy_file(tiny_gpt2, model);
  std::filesystem::copy_file(cpu_8, cluster);
  std::filesystem::create_symlink("model.yaml", link);
  REQUIRE(call({"suggest", model, "--cluster", cluster, "--global-batch", "8", "-o", plan}).code == 0);
  check(
      {{{"suggest", model, "--cluster", cpu_8, "-o", model},
        "--output would replace '" + model + "', which is read as MODEL; give another name"},
       {{"suggest", model, "--cluster", cpu_8, "--json", link},
        "--json would replace '" + link + "', which is read as MODEL; give another name"},
       {{"suggest", model, "--cluster", cluster, "--csv", cluster},
        "--csv would replace '" + cluster + "', which is read as --cluster; give another name"},
       {{"simulate", plan, "-o", plan},
        "--output would replace '" + plan + "', which is read as MODEL|PLAN; give another name"},
       {{"explain", plan, "--json", plan},
        "--json would replace '" + plan + "', which is read as PLAN; give another name"},
       {{"run", plan, "--json", plan}, "--json would replace '" + plan + "', which is read as PLAN; give another name"},
       {{"topology", cluster, "--graphviz", cluster},
        "--graphviz would replace '" + cluster + "', which is read as CLUSTER; give another name"},
       {{"sweep", model, "--cluster", cluster, "--json", cluster},
        "--json would replace '" + cluster + "', which is read as --cluster; give another name"}});
}

TEST_CASE("a file that cannot be written is refused before any work") {
  const Folder folder;
  const std::string absent = folder.path("absent/plan.yaml");
  const std::string taken = folder.path("taken");
  std::filesystem::create_directory(taken);
  for (const auto& [path, reason] :
       {std::pair(absent, "No such file or directory"), std::pair(taken, "Is a directory")}) {
    const Called called = call({"suggest", "gpt3-175b", "--cluster", "dgx-a100", "--devices", "1024", "-o", path});
    CHECK(called.code == 1);
    CHECK(called.err == "error: cannot write '" + path + "': " + reason + "\n");
    CHECK(called.out.empty());
  }
}

TEST_CASE("names and values that are empty are refused") {
  check({{{"suggest", "gpt2", "-o", ""}, "-o needs a value (PLAN.yaml), found an empty one; give one, or leave -o out"},
         {{"suggest", "gpt2", "--output="},
          "--output needs a value (PLAN.yaml), found an empty one; give one, or leave --output out"},
         {{"suggest", "gpt2", "--json", ""},
          "--json needs a value ([FILE|-]), found an empty one; give one, or leave --json out"},
         {{"suggest", "gpt2", "--cluster", ""},
          "--cluster needs a value (FILE|NAME), found an empty one; give one, or leave --cluster out"},
         {{"simulate", "gpt2", "--trace", ""},
          "--trace needs a value (FILE), found an empty one; give one, or leave --trace out"},
         {{"run", "plan.yaml", "--data", ""},
          "--data needs a value (FILE,...), found an empty one; give one, or leave --data out"},
         {{"topology", ""}, "the CLUSTER is empty; name one, or leave it out"},
         {{"suggest", ""}, "the MODEL is empty; give a model.yaml, a Hugging Face config.json or a name of the zoo"}});
}

// A standard output that takes a number of bytes and then fails like a full disk.
struct FullDisk : std::streambuf {
  std::streamsize room;
  explicit FullDisk(std::streamsize bytes) : room(bytes) {}
  std::streamsize xsputn(const char*, std::streamsize size) override {
    const std::streamsize taken = std::min(size, room);
    room -= taken;
    if (taken < size) errno = ENOSPC;
    return taken;
  }
  int_type overflow(int_type c) override {
    const char letter = traits_type::to_char_type(c);
    return xsputn(&letter, 1) == 1 ? c : traits_type::eof();
  }
};

TEST_CASE("a standard output that takes no more is a failed run, and says why") {
  const std::vector<std::vector<std::string>> all{{"--help"},
                                                  {"--version"},
                                                  {"suggest", "--help"},
                                                  {"topology", cpu_8},
                                                  {"completion", "bash"},
                                                  {"suggest", tiny_gpt2, "--cluster", cpu_8, "--quiet"},
                                                  {"suggest", tiny_gpt2, "--cluster", cpu_8, "--quiet", "--json", "-"},
                                                  {"sweep", tiny_gpt2, "--cluster", cpu_8, "--quiet", "--csv"}};
  for (const std::vector<std::string>& arguments : all) {
    for (const std::streamsize room : {0, 10}) {
      FullDisk disk(room);
      std::ostream out(&disk);
      std::ostringstream err;
      CHECK(run_command_line(arguments, out, err) == 1);
      CHECK(err.str() == "error: cannot write to standard output: No space left on device\n");
    }
  }
  // Other failures keep their own code.
  FullDisk disk(0);
  std::ostream out(&disk);
  std::ostringstream err;
  CHECK(run_command_line({"frobnicate"}, out, err) == 2);
}

TEST_CASE("files that are something else than what is asked for say what was expected") {
  const Folder folder;
  const std::string empty = folder.write("empty", "\n");
  const std::string page = folder.write("README.md", "# A page\n\n`a: [b`: - c\n");
  const std::string config = folder.write("config.json", "{\"model_type\": \"gpt2\"}");
  const std::string kinds = "a cluster.yaml, the text of nvidia-smi topo -m or NCCL's topology (XML)";
  std::filesystem::create_directory(folder.path("no-config"));
  const auto check_file = [](std::vector<std::string> arguments, const std::string& message) {
    const Called called = call(std::move(arguments));
    CHECK(called.code == 2);
    CHECK(called.err == message + "\n");
  };
  check_file({"topology", empty}, empty + ": error: the file is empty; expected " + kinds);
  check_file({"topology", page}, page + ": error: expected " + kinds + "; it is none of them");
  for (const char* command : {"explain", "run"})
    check_file({command, config}, config +
                                      ": error: this is no plan: it has no 'schema: parplan.plan/1'; make one with "
                                      "parplan suggest MODEL -o plan.yaml");
  const Called called = call({"suggest", folder.path("no-config")});
  CHECK(called.code == 2);
  CHECK(called.err.starts_with("error: the folder '" + folder.path("no-config") +
                               "' holds no config.json; name a folder that does, a .yaml or .json file, or one of "));
}

TEST_CASE("files that cannot be written are a failed run") {
  const Called called =
      call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--quiet", "--json", "/nonexistent/folder/plans.json"});
  CHECK(called.code == 1);
  CHECK(called.err.starts_with("error: "));
  CHECK(called.err.find("/nonexistent/folder/plans.json") != std::string::npos);
}

TEST_CASE("a folder of data that holds none is refused") {
  const Folder folder;
  setenv("PARPLAN_DATA", folder.path("").c_str(), 1);
  const Called called = call({"suggest", "gpt2"});
  unsetenv("PARPLAN_DATA");
  CHECK(called.code == 2);
  CHECK(
      called.err ==
      "error: PARPLAN_DATA is '" + folder.path("") +
          "', and that folder does not hold models/ and configs/; name the folder that does, or unset PARPLAN_DATA\n");
}

TEST_CASE("a plan for GPUs does not run where there is no plugin and says what is missing") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  REQUIRE(call({"suggest", "gpt2", "--cluster", "dgx-a100", "--top", "1", "--quiet", "-o", plan}).code == 0);
  REQUIRE(setenv("PARPLAN_PLUGINS", folder.path("").c_str(), 1) == 0);
  check({{{"run", plan},
          "the plan is for NVIDIA A100 SXM4 80 GB and cannot run here. Missing: no libparplan_cuda.so in " +
              folder.path("") +
              " (the folder that PARPLAN_PLUGINS names); make a plan for this machine with `parplan suggest MODEL`"},
         {{"run", plan, "--backend", "cpu"},
          "--backend cpu: the plan is for NVIDIA A100 SXM4 80 GB (cuda); its memory and its kernels are that "
          "backend's: plan again with a cluster of CPU devices"}});
  unsetenv("PARPLAN_PLUGINS");
}

TEST_CASE("plans that cannot be used as asked are refused") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  REQUIRE(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--dp", "8", "--tp", "1", "--pp", "1", "--quiet", "-o", plan})
              .code == 0);
  const std::string fixed = plan + " is a plan: it fixes layout and training; give the model instead to choose them";
  check({{{"simulate", plan, "--tp", "2"}, fixed},
         {{"simulate", plan, "--global-batch", "8"}, fixed},
         {{"simulate", plan, "--cluster", cpu_8, "--devices", "4"},
          "the plan takes 8 devices; cluster 'cpu-8' has 4; give more with --devices or --nodes"}});
  // A model is no plan.
  const Called called = call({"explain", tiny_gpt2});
  CHECK(called.code == 2);
  CHECK(called.err == tiny_gpt2 +
                          ": error: this is no plan: it has no 'schema: parplan.plan/1'; make one with parplan suggest "
                          "MODEL -o plan.yaml\n");
}

TEST_CASE("a plan where a model or a cluster is wanted is known as a plan, and a model where a plan is wanted") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  REQUIRE(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--devices", "1", "--quiet", "-o", plan}).code == 0);
  const auto refused = [&](const std::vector<std::string>& arguments, const std::string& message) {
    const Called called = call(arguments);
    CHECK(called.code == 2);
    CHECK(called.err.starts_with(plan));
    CHECK(called.err.ends_with(": error: " + message + "\n"));
  };
  const std::string no_model =
      "this is a plan, and a model is wanted; give the model that it was made of, or give the plan to parplan "
      "simulate, explain or run";
  refused({"suggest", plan}, no_model);
  refused({"sweep", plan, "--cluster", "dgx-a100", "--devices", "8"}, no_model);
  refused({"suggest", tiny_gpt2, "--cluster", plan},
          "this is a plan, and a cluster is wanted: a cluster.yaml, a topology or the name of one; a plan's own "
          "cluster stands under its 'cluster'");
  check({{{"explain", "gpt2"},
          "there is no file 'gpt2'; a plan is wanted, such as parplan suggest gpt2 -o plan.yaml writes"},
         {{"run", "llama3-8b"},
          "there is no file 'llama3-8b'; a plan is wanted, such as parplan suggest llama3-8b -o plan.yaml writes"}});
}

TEST_CASE("a plan whose numbers are not its model's, or of no step, is refused") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  REQUIRE(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--devices", "1", "--quiet", "-o", plan}).code == 0);
  const std::string text = read_file(plan);
  // With the first line of the key changed; `%` stands for its old value.
  const auto refused = [&](const std::string& key, const std::string& value, const std::string& message) {
    const std::size_t begin = text.find(key + ": ") + key.size() + 2, end = text.find('\n', begin);
    REQUIRE(end != std::string::npos);
    const std::string changed = folder.write("changed.yaml", text.substr(0, begin) + value + text.substr(end));
    const std::size_t line =
        static_cast<std::size_t>(std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(begin), '\n')) + 1;
    std::string wanted = changed + message;
    if (const std::size_t at = wanted.find('%'); at != std::string::npos)
      wanted.replace(at, 1, text.substr(begin, end - begin));
    if (const std::size_t at = wanted.find('@'); at != std::string::npos) wanted.replace(at, 1, std::to_string(line));
    for (const char* command : {"explain", "simulate", "run"}) {
      const Called called = call({command, changed});
      CHECK(called.code == 2);
      CHECK(called.err == wanted + "\n");
    }
  };
  refused("parameters", "1",
          ": error: the plan's model has % parameters, and its summary says 1; plan again instead of changing the "
          "model in a plan");
  refused("flops_per_sample", "1",
          ": error: the plan's model takes % FLOPs a sample, and its summary says 1 (flops_per_sample); plan again "
          "instead of changing it in a plan");
  refused("time_compute_s", "1e308",
          ":@:19: error: expected seconds from 0 to 1e+30, found 1e+308; take the number that parplan wrote, or plan "
          "again");
}

TEST_CASE("a text that the model cannot read is refused") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  REQUIRE(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--devices", "1", "--seq-len", "8", "--quiet", "-o", plan})
              .code == 0);
  const std::string letters = folder.write("letters.txt", "01234567890 a");
  Called called = call({"run", plan, "--quiet", "--data", letters});
  CHECK(called.code == 2);
  CHECK(called.err == letters +
                          ": error: token 97 at position 12; the model's vocabulary ends at 60; give others with "
                          "--data (each byte of a text is a token, as of the default; or tokens in llm.c's layout)\n");
  const std::string few = folder.write("few.txt", "0123");
  called = call({"run", plan, "--quiet", "--data", few});
  CHECK(called.code == 2);
  CHECK(called.err == few + ": error: 4 tokens; one sequence takes 8 and the token after it\n");
}

TEST_CASE("a plan whose parts contradict one another is refused") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  REQUIRE(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--devices", "1", "--quiet", "-o", plan}).code == 0);
  std::string text = folder.read("plan.yaml");
  const std::size_t at = text.find("layers: 4");
  REQUIRE(at != std::string::npos);
  text.replace(at, 9, "layers: 3");
  const std::string changed = folder.write("changed.yaml", text);
  const Called called = call({"run", changed});
  CHECK(called.code == 2);
  CHECK(called.err.starts_with(changed + ": error: the plan's model has "));
}

TEST_CASE("a plan with placements that no technique sets is refused") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  REQUIRE(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--devices", "2", "--tp", "2", "--quiet", "-o", plan}).code ==
          0);
  const auto change = [&](const std::string& from, const std::string& to) {
    std::string text = folder.read("plan.yaml");
    const std::size_t at = text.find(from);
    REQUIRE(at != std::string::npos);
    text.replace(at, from.size(), to);
    return folder.write("changed.yaml", text);
  };
  std::string changed = change("\"attention.qkv.weight\": Shard(kv_groups)", "\"attention.qkv.weight\": Replicate");
  Called called = call({"run", changed});
  CHECK(called.code == 2);
  CHECK(called.err ==
        changed +
            ": error: placements: 'attention.qkv.weight' is Replicate over tp; the plan's techniques place it as "
            "Shard(kv_groups), and only that can be carried out; write it so\n");
  changed = change("\"attention.qkv.weight\": ", "\"attention.kqv.weight\": Replicate\n    \"attention.qkv.weight\": ");
  called = call({"simulate", changed});
  CHECK(called.code == 2);
  CHECK(called.err ==
        changed + ": error: placements: the model has no parameter 'attention.kqv.weight'; take it out\n");
}

}  // namespace
}  // namespace parplan
