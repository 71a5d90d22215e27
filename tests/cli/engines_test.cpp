// `--engine`, from arguments to plans; what an engine changes is tested in tests/planner.
#include <doctest/doctest.h>

#include <algorithm>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "cli/data_folder.h"
#include "planner/base/json.h"
#include "planner/graph/engine_file.h"
#include "tests/cli/call.h"

namespace parplan {
namespace {

using namespace testing;

Json answer_of(std::vector<std::string> arguments) {
  arguments.insert(arguments.end(), {"--json", "-", "--quiet"});
  const Called called = call(arguments);
  INFO(called.err);
  REQUIRE(called.code == 0);
  return Json::parse(called.out);
}

}  // namespace

TEST_CASE("every engine's plans are of layouts that it has, in its name, and explain keeps to it") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  for (const std::string& name : engine_names(engines_folder())) {
    CAPTURE(name);
    const Engine engine = find_engine(name, engines_folder());
    const Json json = answer_of({"suggest", "gpt2", "--cluster", "dgx-a100", "--devices", "8", "--global-batch", "16",
                               "--seq-len", "512", "--engine", name, "-o", plan});
    CHECK(json.at("inputs").at("training").at("engine") == name);
    for (const Json& row : json.at("plans")) {
      CHECK(row.at("engine") == name);
      CHECK((engine.has_tensor || row.at("tp") == 1));
      CHECK((engine.has_pipeline || row.at("pp") == 1));
      CHECK((engine.has_interleaved || row.at("virtual_stages") == 1));
      CHECK(row.at("zero_stage").get<int>() <= engine.most_zero);
      CHECK((row.at("pp") == 1 || row.at("zero_stage").get<int>() <= engine.most_zero_in_pipelines));
      CHECK((engine.has_sequence_parallel || row.at("sequence_parallel") == false));
      CHECK((engine.has_gpipe || row.at("schedule") != "gpipe"));
      CHECK((engine.has_other_orders || row.at("mesh_order") == "pp-dp-tp"));
      CHECK((engine.has_recompute_per_stage || row.at("recompute") != "per_stage"));
      if (engine.equal_stages) {
        std::istringstream listed(row.at("stage_layers").get<std::string>());  // "3,3,3,3"
        std::vector<int> layers;
        for (std::string one; std::getline(listed, one, ',');) layers.push_back(std::stoi(one));
        CHECK(std::ranges::max(layers) - std::ranges::min(layers) <= 1);
      }
    }
    // The plan alone says what it predicts.
    const Json& best = json.at("plans").at(0);
    const Json again = answer_of({"simulate", plan}).at("plans").at(0);
    CHECK(again.at("engine") == name);
    CHECK(again.at("step_time_s") == best.at("step_time_s"));
    CHECK(again.at("memory_peak_bytes") == best.at("memory_peak_bytes"));
    if (name == "ddp") CHECK(answer_of({"explain", plan}).at("plans").at(0).at("engine") == name);
    if (is_own(engine)) continue;
    const Called run = call({"run", plan});
    CHECK(run.code == 2);
    CHECK(run.err.find("parplan runs plans for its own runtime only") != std::string::npos);
  }
}

TEST_CASE("an engine that overlaps less, fuses less and repeats more takes longer") {
  const auto step = [](const std::string& engine) {
    return answer_of({"simulate", "gpt3-175b", "--cluster", "dgx-a100", "--devices", "64", "--global-batch", "64",
                    "--seq-len", "2048", "--tp", "8", "--pp", "8", "--micro-batch", "1", "--recompute", "full",
                    "--engine", engine})
        .at("plans").at(0).at("step_time_s").get<double>();
  };
  CHECK(step("parplan") < step("megatron"));
  CHECK(step("megatron") < step("megatron-2022"));
  CHECK(step("megatron-2022") < step("megatron-2021"));
}

TEST_CASE("a compiled FSDP takes less than an eager one, and more than where the loss is fused, too") {
  const auto step = [](const std::string& engine) {
    return answer_of({"simulate", "llama3-8b", "--cluster", "dgx-h100", "--devices", "8", "--global-batch", "8",
                      "--seq-len", "8192", "--dp", "8", "--zero", "3", "--recompute", "full", "--engine", engine})
        .at("plans").at(0).at("step_time_s").get<double>();
  };
  CHECK(step("fsdp-compiled") < step("fsdp"));
  CHECK(step("fsdp-compiled") > step("parplan"));
}

TEST_CASE("what an engine lacks is said of its space and refused where it is asked for") {
  const std::vector<std::string> suggest = {"suggest",  "gpt2", "--cluster", "dgx-a100", "--devices", "8",
                                            "--global-batch", "16", "--seq-len", "512", "--engine"};
  const auto space = [&](const std::string& engine, std::vector<std::string> more) {
    std::vector<std::string> arguments = suggest;
    arguments.push_back(engine);
    arguments.insert(arguments.end(), more.begin(), more.end());
    std::string words = answer_of(arguments).at("search").at("space").get<std::string>();
    const Called called = call(arguments);
    CHECK(called.out.find("space: " + words + "\n") != std::string::npos);
    return words;
  };
  CHECK(space("bloom", {}) ==
        "every dp x tp x pp on up to 8 devices; zero_stage 0, 1, 2, 3; engine bloom has no sequence parallelism, "
        "tensor parallelism overlapped by slices, context parallelism, GPipe, interleaved pipelines, zero-bubble "
        "pipelines, other orders of the mesh's axes, DataParallel, hybrid sharding, ZeRO above 1 in pipelines; "
        "stages with equal numbers of layers, as engine bloom cuts them; recompute none, full, the same on all stages");
  CHECK(space("megatron-2022", {"--recompute", "core_attn"}) ==
        "every dp x tp x pp on up to 8 devices; zero_stage 0, 1; sequence_parallel false, true; schedule 1f1b, "
        "interleaved; engine megatron-2022 has no tensor parallelism "
        "overlapped by slices, context parallelism, GPipe, groups of another number of micro-batches than of ranks, "
        "zero-bubble pipelines, other orders of the mesh's axes, DataParallel, hybrid sharding, ZeRO above 1; stages "
        "with equal numbers of layers, as engine megatron-2022 cuts them");
  CHECK(space("parplan", {}) ==
        "every dp x tp x pp on up to 8 devices; zero_stage 0, 1, 2, 3; sequence_parallel false, true; schedule gpipe, "
        "1f1b, interleaved; dp_shard sizes that double at least; recompute none, norms+activation, norms+mlp, full; "
        "with the layouts of the best plans also interleaved in other groups of micro-batches, tp_overlap ring");
  CHECK(space("parplan", {"--pp", "1", "--tp", "2", "--zero", "1"}) ==
        "every dp x tp x pp with what is given on up to 8 devices; sequence_parallel false, true; dp_shard sizes that "
        "double at least; recompute none, norms+activation, norms+mlp, full; with the layouts of the best plans also "
        "tp_overlap ring");
  CHECK(space("parplan", {"--cp", "2", "--schedule", "1f1b"}) ==
        "every dp x tp x pp x cp with what is given on up to 8 devices; zero_stage 0, 1, 2, 3; sequence_parallel "
        "false, true; cp_method all_gather, ulysses, ring; dp_shard sizes that double at least; recompute none, "
        "norms+activation, norms+mlp, full; with the layouts of the best plans also cp_ulysses with any cp_method, "
        "tp_overlap ring");
  CHECK(space("fsdp", {}) ==
        "every dp x tp x pp on up to 8 devices; zero_stage 0, 2, 3; dp_shard every size; engine fsdp has no tensor "
        "parallelism, context parallelism, pipelines, DataParallel, ZeRO stage 1, gathers other than one block ahead, "
        "gathers of each parameter by itself; recompute none, norms+activation, norms+mlp, full");
  const auto error = [&](const std::string& command, const std::string& engine, std::vector<std::string> more) {
    std::vector<std::string> arguments = suggest;
    arguments.front() = command;
    arguments.push_back(engine);
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Called called = call(arguments);
    CHECK(called.code == 2);
    return called.err;
  };
  for (const char* const command : {"suggest", "simulate"}) {
    CHECK(error(command, "bloom", {"--tp", "2", "--sequence-parallel"}) ==
          "error: engine bloom has no sequence parallelism: sequence_parallel must be false\n");
    CHECK(error(command, "bloom", {"--dp", "2", "--pp", "2", "--zero", "2"}) ==
          "error: engine bloom has no ZeRO stage 2 in pipelines; its highest where pp is above 1 is 1\n");
    CHECK(error(command, "megatron", {"--recompute", "activation"}) ==
          "error: engine megatron has no recompute of the activation alone: recompute must be without activation\n");
  }
  CHECK(error("suggest", "bloom", {"--schedule", "interleaved"}) ==
        "error: engine bloom has no interleaved pipelines: virtual_stages must be 1 and schedule another, such as "
        "1f1b\n");
  CHECK(error("suggest", "megatron-2022", {"--dp-method", "master"}) ==
        "error: engine megatron-2022 has no DataParallel: dp_method must be all_reduce\n");
  CHECK(error("suggest", "data-parallel", {"--dp", "8", "--dp-method", "all_reduce"}) ==
        "error: engine data-parallel has no data-parallel ranks that each reduce gradients: dp_method must be master, "
        "or dp 1\n");
  CHECK(error("suggest", "megatron-2021", {"--mesh-order", "dp-pp-tp"}) ==
        "error: engine megatron-2021 has no other orders of the mesh's axes: mesh_order must be pp-dp-tp\n");
}

TEST_CASE("InternEvo is asked for no layout that its scheduler and its modes have not") {
  const auto simulate = [](std::vector<std::string> layout) {
    std::vector<std::string> arguments = {"simulate", "llama2-7b", "--cluster", "dgx-a100", "--devices", "8",
                                          "--global-batch", "64", "--seq-len", "4096", "--engine", "internevo"};
    arguments.insert(arguments.end(), layout.begin(), layout.end());
    return call(arguments);
  };
  for (const char* const layout :
       {"--pp 2 --dp 4 --schedule gpipe", "--pp 2 --dp 4 --schedule zero_bubble_v",
        "--pp 2 --dp 4 --schedule dualpipe_v", "--tp 2 --dp 4 --sequence-parallel --tp-overlap ring",
        "--cp 4 --dp 2 --cp-method ring",
        "--cp 4 --dp 2 --cp-ulysses 2", "--dp 8 --recompute norms+activation", "--dp 8 --recompute core_attn",
        "--tp 2 --dp 4 --mesh-order tp-dp-pp", "--dp 8 --zero 2"}) {
    CAPTURE(layout);
    std::istringstream words(layout);
    const Called refused = simulate({std::istream_iterator<std::string>(words), {}});
    CHECK(refused.code == 2);
    CHECK(refused.err.find("error: engine internevo has no ") != std::string::npos);
  }
  for (const char* const layout :
       {"--pp 2 --dp 4 --schedule interleaved --virtual-stages 4", "--tp 2 --dp 4 --sequence-parallel",
        "--cp 4 --dp 2", "--dp 8 --zero 1 --dp-shard 4", "--dp 8 --recompute norms", "--dp 8 --recompute full"}) {
    CAPTURE(layout);
    std::istringstream words(layout);
    const Called taken = simulate({std::istream_iterator<std::string>(words), {}});
    INFO(taken.err);
    CHECK(taken.code == 0);
  }
  // Stages hold as many layers.
  const Json plan = answer_of({"simulate", "llama2-7b", "--cluster", "dgx-a100", "--devices", "8", "--global-batch",
                               "64", "--seq-len", "4096", "--engine", "internevo", "--pp", "4", "--dp", "2"});
  CHECK(plan.at("plans").at(0).at("stage_layers") == "8,8,8,8");
  CHECK(answer_of({"simulate", "llama2-7b", "--cluster", "dgx-a100", "--devices", "8", "--global-batch", "64",
                   "--seq-len", "4096", "--engine", "internevo", "--cp", "4", "--dp", "2"})
            .at("plans")
            .at(0)
            .at("cp_method") == "ulysses");
}

TEST_CASE("products in fp8 that an engine or a device has not are refused with a precision that there is") {
  const auto error = [](const char* cluster, const char* engine) {
    const Called called = call({"simulate", "gpt2", "--cluster", cluster, "--devices", "8", "--dp", "8", "--engine",
                                engine, "--precision", "fp8"});
    CHECK(called.code == 2);
    return called.err;
  };
  CHECK(error("dgx-h100", "bloom") ==
        "error: engine bloom has no products in fp8: precision must be another, such as bf16\n");
  CHECK(error("azure-ndv2", "bloom") ==
        "error: engine bloom has no products in fp8: precision must be another, such as fp16\n");
  const std::string units = error("azure-ndv2", "megatron");
  CHECK(units.find("has no units for it, or its file states no rate in fp8; fp16 instead") != std::string::npos);
}

TEST_CASE("replicas of DataParallel have a master, whether or not it is asked for") {
  const auto answer = [](const std::string& command, const std::string& engine, std::vector<std::string> more) {
    std::vector<std::string> arguments{command, "gpt2", "--cluster", "dgx-a100", "--global-batch", "64",
                                       "--seq-len", "512", "--engine", engine};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return answer_of(arguments);
  };
  const auto step = [](const Json& of) { return of.at("plans").at(0).at("step_time_s").get<double>(); };
  const Json implied = answer("simulate", "data-parallel", {"--dp", "8"});
  CHECK(implied.at("plans").at(0).at("dp_method") == "master");
  CHECK(step(implied) == step(answer("simulate", "data-parallel", {"--dp", "8", "--dp-method", "master"})));
  CHECK(step(implied) > step(answer("simulate", "ddp", {"--dp", "8"})));
  CHECK(answer("simulate", "data-parallel", {"--dp", "1", "--devices", "1"}).at("notes").empty());
  // The search's plans are no others, and one device is among them.
  const Json found = answer("suggest", "data-parallel", {"--top", "20"});
  bool has_one = false;
  for (const Json& row : found.at("plans")) {
    CHECK((row.at("dp") == 1 || row.at("dp_method") == "master"));
    has_one = has_one || row.at("dp") == 1;
  }
  CHECK(has_one);
  CHECK(found.at("plans").size() > 1);
  CHECK(found.at("search").at("certified") == true);
  for (const Json& left_out : found.at("search").at("left_out")) CHECK(left_out.at("what") != "DataParallel");
}

TEST_CASE("an engine that has it keeps what some layers save in host memory, and another is refused") {
  const auto with = [](const std::string& engine, const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"simulate", "llama3-8b", "--cluster",      "dgx-a100", "--devices", "8",
                                       "--tp",     "8",         "--global-batch", "8",        "--engine",  engine};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  const auto memory = [&](const std::vector<std::string>& more) {
    const Json row = answer_of(with("megatron", more)).at("plans").at(0);
    CHECK(row.at("offload_layers").is_null() == more.empty());
    return std::pair(row.at("memory_peak_bytes").get<std::int64_t>(), row.at("memory_host_bytes").get<std::int64_t>());
  };
  const auto none = memory({}), some = memory({"--offload-layers", "20"});
  CHECK(none.second == 0);
  CHECK(some.second > 0);
  // What is on the host is not on the device, up to padding and the allocator's share.
  CHECK(none.first - some.first >= some.second - 20 * 256);
  const Called refused = call(with("torchtitan", {"--offload-layers", "20"}));
  CHECK(refused.code == 2);
  CHECK(refused.err ==
        "error: engine torchtitan has no offload of the activations of some layers: offload_layers must be left out\n");
}

TEST_CASE("what is no engine is refused") {
  const std::vector<std::string> suggest = {"suggest", "gpt2", "--cluster", "dgx-a100", "--devices", "8", "--engine"};
  const auto error = [&](const std::string& engine) {
    std::vector<std::string> arguments = suggest;
    arguments.push_back(engine);
    const Called called = call(arguments);
    CHECK(called.code == 2);
    return called.err;
  };
  CHECK(error("megatrom").find("did you mean 'megatron'") != std::string::npos);
  CHECK(error("missing.yaml").find("missing.yaml") != std::string::npos);
  const Folder folder;
  CHECK(error(folder.write("mine.yaml", "name: mine\ntitle: Mine\nfacts: {dropout: {value: maybe, source: x}}\n"))
            .find("mine.yaml:3:") != std::string::npos);
  // At once, not in each row.
  const Called validated = call({"validate", PARPLAN_SOURCE_DIR "/tests/data/published/runs.csv", "--engine", "nope"});
  CHECK(validated.code == 2);
  CHECK(validated.out.empty());
  CHECK(validated.err.find("--engine: unknown engine 'nope'") != std::string::npos);
}

}  // namespace parplan
