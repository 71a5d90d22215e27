// `--engine`, from arguments to plans; what an engine changes is tested in tests/planner.
#include <doctest/doctest.h>

#include <algorithm>
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
}

}  // namespace parplan
