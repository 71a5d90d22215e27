// The program itself, with the plugin: a plan for GPUs from suggest to run.
#include <doctest/doctest.h>

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tests/gpu/device.h"
#include "tests/temporary_folder.h"

namespace parplan {

using namespace testing;

namespace {

const std::string model = std::string(PARPLAN_SOURCE_DIR) + "/tests/data/models/tiny-llama.yaml";

struct Shell {
  int code = 0;
  std::string out;
};
Shell shell(const std::string& command) {
  Shell result;
  std::FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  REQUIRE(pipe != nullptr);
  std::array<char, 4096> buffer{};
  while (const std::size_t read = std::fread(buffer.data(), 1, buffer.size(), pipe))
    result.out.append(buffer.data(), read);
  result.code = WEXITSTATUS(pclose(pipe));
  return result;
}

}  // namespace

TEST_CASE("suggest plans for GPUs and run trains that plan, every byte as promised") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 600; ++i) text += static_cast<char>(i * i % 11);
  const std::string data = folder.write("text.bin", text);
  for (const std::string precision : {"bf16", "fp16", "fp8"})
    for (const std::string layout : {"--tp 2 --pp 2 --dp 1", "--dp 4 --tp 1 --pp 1 --zero 3"}) {
      INFO(precision << ", " << layout);
      const std::string plan = folder.path("plan.yaml");
      Shell called = shell(fmt::format(
          "{} suggest {} --cluster dgx-h100 --devices 4 --global-batch 8 --seq-len 16 --precision {} {} -o {} --quiet",
          PARPLAN_BINARY, model, precision, layout, plan));
      INFO(called.out);
      REQUIRE(called.code == 0);
      called =
          shell(fmt::format("{} run {} --share-gpu --steps 5 --data {} --json - --quiet", PARPLAN_BINARY, plan, data));
      INFO(called.out);
      REQUIRE(called.code == 0);
      const nlohmann::json run = nlohmann::json::parse(called.out);
      CHECK(run.at("loss").size() == 5);
      CHECK(run.at("loss").at(4).get<double>() < run.at("loss").at(0).get<double>());
      for (const std::string part :
           {"communication_tp_bytes", "communication_dp_bytes", "communication_pp_bytes", "memory_activations_bytes"})
        CHECK(run.at("measured").at(part) == run.at("predicted").at(part));
      CHECK(run.at("measured").at("step_time_s").get<double>() > 0.0);
    }
}

TEST_CASE("more ranks than GPUs are refused with what to do") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const std::size_t devices = gpu->devices().size();
  if (devices >= 16) return;
  const TemporaryFolder folder;
  const std::string plan = folder.path("plan.yaml");
  REQUIRE(shell(fmt::format("{} suggest {} --cluster dgx-h100 --nodes 1 --devices 8 --global-batch 16 --seq-len 16 "
                            "--dp 8 --tp 1 --pp 1 -o {} --quiet",
                            PARPLAN_BINARY, model, plan))
              .code == 0);
  if (devices >= 8) return;  // there are enough
  const Shell called = shell(fmt::format("{} run {}", PARPLAN_BINARY, plan));
  CHECK(called.code == 2);
  CHECK(called.out == fmt::format("error: the plan has 8 ranks and this machine {} GPU{}: plan again with --devices "
                                  "{}, or try the plan out on one GPU with "
                                  "--share-gpu (one process, no timing that means anything)\n",
                                  devices, devices == 1 ? "" : "s", devices));
}

}  // namespace parplan
