// `simulate --measured-step` from its arguments to the plans that are made with what it found; the
// fit is tested in tests/planner/calibrate/.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include <fmt/format.h>

#include "planner/base/json.h"
#include "tests/cli/call.h"

namespace parplan {
namespace {

using namespace testing;

const std::vector<std::string> measured_job{"--cluster", "dgx-a100", "--devices", "16", "--global-batch", "64"};
const std::vector<std::string> measured_layout{"--dp", "8", "--tp", "2", "--pp", "1"};

std::vector<std::string> command_with(const std::string& command, const std::string& subject,
                                      const std::vector<std::vector<std::string>>& parts) {
  std::vector<std::string> all{command, subject};
  for (const std::vector<std::string>& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

Json json_answer(std::vector<std::string> arguments) {
  arguments.insert(arguments.end(), {"--json", "-", "--quiet"});
  const Called called = call(arguments);
  INFO(called.err);
  REQUIRE(called.code == 0);
  return Json::parse(called.out);
}

double first_step(const Json& json) {
  return json.at("plans").at(0).at("step_time_s").get<double>();
}

}  // namespace

TEST_CASE("a measured step is fitted, saved, and carried over to other commands and by plans") {
  const Folder folder;
  const std::string file = folder.path("calibration.yaml"), plan = folder.path("plan.yaml");
  const double before =
      first_step(json_answer(command_with("simulate", "gpt2-large", {measured_job, measured_layout})));
  const double measured = 1.3 * before;
  const Json fitted = json_answer(command_with(
      "simulate", "gpt2-large",
      {measured_job, measured_layout, {"--measured-step", fmt::format("{} s", measured), "--save-calibration", file}}));
  CHECK(first_step(fitted) == doctest::Approx(measured).epsilon(0.001));
  const Json& calibration = fitted.at("calibration");
  CHECK(calibration.at("devices") == Json::parse(R"(["a100-sxm4-80gb"])"));
  CHECK(calibration.at("steps").at(0).at("before").at("step_time_s").get<double>() == doctest::Approx(before));
  CHECK(calibration.at("steps").at(0).at("after").at("step_time_s").get<double>() == first_step(fitted));
  CHECK(calibration.at("constants").at(0).at("constant") == "kernels");
  CHECK(calibration.at("constants").at(0).at("share").get<double>() < 0.8);
  CHECK(calibration.at("constants").at(2).at("share").is_null());
  CHECK(fitted.at("inputs").at("cluster").at("calibrated").get<std::string>().starts_with("kernels 0."));

  const std::vector<std::string> with{"--calibration", file};
  CHECK(first_step(json_answer(command_with("simulate", "gpt2-large", {measured_job, measured_layout, with}))) ==
        first_step(fitted));
  CHECK(first_step(json_answer(
            command_with("suggest", "gpt2-large", {measured_job, measured_layout, with, {"--max-candidates", "8"}}))) <=
        first_step(fitted) * 1.001);
  const auto swept = [&](const std::vector<std::string>& more) {
    return json_answer(command_with("sweep", "gpt2-large", {measured_job, {"--max-candidates", "2"}, more}))
        .at("rows")
        .at(0)
        .at("step_time_s")
        .get<double>();
  };
  CHECK(swept(with) > 1.2 * swept({}));
  // The plan is complete: it needs the file no more.
  REQUIRE(call(command_with("simulate", "gpt2-large", {measured_job, measured_layout, with, {"-o", plan, "--quiet"}}))
              .code == 0);
  CHECK(first_step(json_answer({"simulate", plan})) == doctest::Approx(first_step(fitted)));
  const std::string explained = call({"explain", plan, "--quick"}).out;
  CHECK(explained.find("calibrated") != std::string::npos);
  CHECK(call({"simulate", plan, "--cluster", "dgx-a100", "--devices", "16"})
            .err.starts_with("error: the plan is calibrated for its cluster (kernels 0."));
  CHECK(call({"explain", plan, "--quick", "--calibration", file}).err ==
        file + ": error: cluster 'dgx-a100' is calibrated already (" +
            fitted.at("inputs").at("cluster").at("calibrated").get<std::string>() +
            "); give the cluster that it was made of\n");
}

TEST_CASE("a log gives the same as its median step, and a plan's step is added to it") {
  const Folder folder;
  const std::string log =
      folder.write("train.log",
                   " iteration 1/9 | elapsed time per iteration (ms): 9000.0 | global batch size: 64 |\n"
                   " iteration 2/9 | elapsed time per iteration (ms): 270.0 | global batch size: 64 |\n"
                   " iteration 3/9 | elapsed time per iteration (ms): 270.0 | global batch size: 64 |\n");
  const std::string other = folder.path("other.yaml");
  const Json by_step = json_answer(
      command_with("simulate", "gpt2-large", {measured_job, measured_layout, {"--measured-step", "270 ms"}}));
  const Json by_log =
      json_answer(command_with("simulate", "gpt2-large", {measured_job, measured_layout, {"--measured-log", log}}));
  CHECK(by_log.at("calibration") == by_step.at("calibration"));
  const Called said =
      call(command_with("simulate", "gpt2-large", {measured_job, measured_layout, {"--measured-log", log}}));
  CHECK(said.err.find("note: " + log +
                      ": 2 steps of Megatron-LM count, 270 ms in the middle, 8 of 10 from 270 ms to "
                      "270 ms\n") != std::string::npos);
  CHECK(said.out.find("\ncalibration of dgx-a100 on a100-sxm4-80gb, by 1 measured step of parplan\n") !=
        std::string::npos);
  const Json third = json_answer(
      command_with("simulate", "gpt2-large", {measured_job, {"--dp", "16", "--tp", "1", "--pp", "1", "-o", other}}));
  const std::string step = fmt::format("{} s", 1.2 * first_step(third));
  const Json both = json_answer(
      command_with("simulate", "gpt2-large",
                   {measured_job, measured_layout, {"--measured-log", log, "--also-measured", other + "=" + step}}));
  CHECK(both.at("calibration").at("steps").size() == 2);
}

TEST_CASE("what a calibration cannot be made of or be used for is refused") {
  const Folder folder;
  const auto error = [&](const std::vector<std::string>& more) {
    return call(command_with("simulate", "gpt2-large", {measured_job, measured_layout, more, {"--quiet"}})).err;
  };
  CHECK(error({"--measured-step", "0 s"}) == "error: --measured-step: a step takes more than 0, found '0 s'\n");
  CHECK(error({"--measured-step", "fast"}).starts_with("error: --measured-step: expected a duration"));
  CHECK(error({"--measured-step", "2 s", "--measured-log", "x.log"}) ==
        "error: --measured-step and --measured-log both say what the step took; leave one of them out\n");
  CHECK(error({"--save-calibration", folder.path("c.yaml")}) ==
        "error: --save-calibration writes what a measured step tells; give one with --measured-step or "
        "--measured-log\n");
  CHECK(error({"--also-measured", "other.yaml=2 s"}) ==
        "error: --also-measured adds to a measured step of this layout; give that with --measured-step or "
        "--measured-log\n");
  CHECK(error({"--measured-step", "2 s", "--also-measured", "other.yaml"}) ==
        "error: --also-measured: expected a plan and its step, such as 'other.yaml=23 s', found 'other.yaml'\n");
  CHECK(
      error({"--measured-step", "2 s", "--calibration", "c.yaml"}) ==
      "error: --calibration is of other steps, and a calibration is fitted to the rates of the cluster's files; leave "
      "it out, and give the other steps with --also-measured\n");
  CHECK(error({"--measured-step", "1 us"}).find("is not explained by what kernels sustain") != std::string::npos);
}

}  // namespace parplan
