// A plan under circumstances that are not its own: on another cluster, with another headroom, or
// calibrated.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "planner/base/json.h"
#include "tests/cli/call.h"

namespace parplan {
namespace {

using namespace testing;

// A plan of gpt2 on two devices, written to a file.
std::string plan_of_gpt2(const Folder& folder, const std::vector<std::string>& more) {
  const std::string plan = folder.path("plan.yaml");
  std::vector<std::string> arguments = {"simulate", "gpt2", "--devices", "2", "--global-batch", "16",
                                        "--quiet",  "-o",   plan,        "--json", folder.path("simulated.json")};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const Called called = call(arguments);
  REQUIRE_MESSAGE(called.code == 0, called.err);
  return plan;
}

Json simulated(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "simulate");
  arguments.insert(arguments.end(), {"--quiet", "--json", "-"});
  const Called called = call(arguments);
  REQUIRE_MESSAGE(called.code == 0, called.err);
  return Json::parse(called.out);
}

}  // namespace

TEST_CASE("a plan is refused on a cluster that lacks what its offload or its precision needs") {
  const Folder folder;
  const std::string offloaded =
      plan_of_gpt2(folder, {"--cluster", "dgx-a100", "--dp", "2", "--zero", "1", "--offload", "optimizer"});
  const Called homeless = call({"simulate", offloaded, "--cluster", "rtx-4090-4"});
  CHECK(homeless.code == 2);
  CHECK(homeless.err.find("offload needs the rates of the host") != std::string::npos);
  const std::string fp8 = plan_of_gpt2(folder, {"--cluster", "dgx-h100", "--precision", "fp8"});
  const Called without_units = call({"simulate", fp8, "--cluster", "dgx-a100"});
  CHECK(without_units.code == 2);
  CHECK(without_units.err.find("has no units for it") != std::string::npos);
}

TEST_CASE("a plan on another cluster leaves the headroom of that one, and as much as is asked for anywhere") {
  const Folder folder;
  const std::string plan = plan_of_gpt2(folder, {"--cluster", "dgx-a100"});
  const auto usable = [&](std::vector<std::string> more) {
    more.insert(more.begin(), plan);
    const Json row = simulated(more).at("plans").at(0);
    return row.at("usable_bytes").get<double>() / row.at("memory_capacity_bytes").get<double>();
  };
  CHECK(usable({}) == doctest::Approx(0.945));
  CHECK(usable({"--cluster", "dgx-h100"}) == doctest::Approx(0.945));
  CHECK(usable({"--memory-headroom", "30%"}) == doctest::Approx(0.7));
  CHECK(usable({"--cluster", "dgx-h100", "--memory-headroom", "0%"}) == doctest::Approx(1.0));
}

TEST_CASE("what a plan's file notes of its search is not said of the plan on another cluster") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  const Called called = call({"suggest", "gpt2", "--cluster", "dgx-a100", "--devices", "5", "--global-batch", "16",
                              "--quiet", "-o", plan, "--json", folder.path("json")});
  REQUIRE_MESSAGE(called.code == 0, called.err);
  REQUIRE(Json::parse(folder.read("json")).at("notes").dump().find("uses 4 of 5 devices") != std::string::npos);
  CHECK(simulated({plan, "--cluster", "dgx-h100"}).at("notes").empty());
}

TEST_CASE("explain says that a calibration changed a plan's time, not that its file was edited") {
  const Folder folder;
  const std::string plan = plan_of_gpt2(folder, {"--cluster", "dgx-a100"});
  const std::string calibration = folder.path("calibration.yaml");
  const double step = simulated({plan}).at("plans").at(0).at("step_time_s").get<double>();
  REQUIRE(call({"simulate", plan, "--measured-step", std::to_string(1.25 * step) + "s", "--save-calibration",
                calibration, "--quiet"})
              .code == 0);
  const Called explained = call({"explain", plan, "--quick", "--calibration", calibration});
  REQUIRE_MESSAGE(explained.code == 0, explained.err);
  CHECK(explained.out.find("with the calibration this plan takes") != std::string::npos);
  CHECK(explained.out.find("it was edited") == std::string::npos);
}

}  // namespace parplan
