#include "planner/calibrate/fit_calibration.h"

#include <doctest/doctest.h>

#include <array>
#include <string>

#include "cli/data_folder.h"
#include "cli/model_graph.h"
#include "models/find_model.h"
#include "planner/base/enum_index.h"
#include "planner/base/error.h"
#include "planner/calibrate/calibration_report.h"
#include "planner/graph/engine_file.h"
#include "planner/suggest.h"
#include "tests/planner/base/error_of.h"

namespace parplan {
namespace {

struct Simulated {
  OpGraph graph;
  Plan plan;
};

// A GPT-2, data-parallel over all devices.
Simulated simulated(const std::string& cluster, int devices, std::int64_t batch, const std::string& engine = "parplan",
                    const std::string& size = "gpt2-xl", std::int64_t sequence = 1024) {
  Simulated result;
  SuggestRequest request;
  ClusterOptions options;
  options.devices = devices;
  request.cluster = find_cluster(cluster, cluster_catalog(), options);
  request.training = {.global_batch = batch, .sequence_length = sequence, .precision = DataType::bf16};
  request.training.engine = find_engine(engine, engines_folder());
  const ModelSpec model = load_model(size, zoo_folder()).spec;
  result.graph = graph_of(model, request.training);
  request.graph = &result.graph;
  request.model_name = model.name;
  request.layout[Choice::dp] = std::int64_t{devices};
  request.layout[Choice::tp] = std::int64_t{1};
  request.layout[Choice::pp] = std::int64_t{1};
  result.plan = simulate_layout(request);
  return result;
}

// The step of a machine that reaches these shares.
Seconds step_at(const Simulated& one, const std::array<double, constant_count>& shares) {
  Plan plan = one.plan;
  for (const ClusterConstantRow& row : cluster_constants())
    row.take(plan.cluster, plan.training.engine, shares[index_of(row.constant)]);
  return simulate_plan(one.graph, plan).time.total();
}

CalibrationFit fit(const Simulated& one, Seconds measured) {
  const MeasuredPlan step{.graph = &one.graph, .plan = &one.plan, .measured = measured};
  return fit_calibration({&step, 1});
}

}  // namespace

TEST_CASE("the step of one device tells what its kernels sustain") {
  const Simulated one = simulated("dgx-a100", 1, 16);
  const CalibrationFit found = fit(one, step_at(one, {0.8, 1.0, 1.0, 1.0}));
  REQUIRE(found.calibration.shares.size() == 1);
  CHECK(found.calibration.shares[0].constant == ClusterConstant::kernels);
  CHECK(found.calibration.shares[0].share == doctest::Approx(0.8).epsilon(0.001));
  // Most of the step are products and data that kernels move, so that an error of the step is one
  // of the share.
  CHECK(*found.calibration.shares[0].percent_per_percent == doctest::Approx(1.0).epsilon(0.1));
  CHECK(found.calibration.cluster == "dgx-a100");
  CHECK(found.calibration.devices == std::vector<std::string>{"a100-sxm4-80gb"});
  CHECK(found.plans[0].after.total() / found.plans[0].measured == doctest::Approx(1.0).epsilon(0.001));
  CHECK(found.plans[0].reach[index_of(ClusterConstant::network)] == 0.0);
}

TEST_CASE("a step that waits for the network tells what NICs reach, and leaves kernels as they are") {
  const Simulated many = simulated("azure-ndv2", 64, 64);  // eight V100 behind one NIC of 100 Gbit/s
  const CalibrationFit found = fit(many, step_at(many, {1.0, 1.0, 0.6, 1.0}));
  REQUIRE(found.calibration.shares.size() == 1);
  CHECK(found.calibration.shares[0].constant == ClusterConstant::network);
  CHECK(found.calibration.shares[0].share == doctest::Approx(0.6).epsilon(0.002));
  // But that slower collectives take less of the memory beside them.
  CHECK(found.plans[0].after.compute / found.plans[0].before.compute == doctest::Approx(1.0).epsilon(0.001));
  CHECK(describe(found).find("1 measured step tells 1 of 4 constants") != std::string::npos);
}

TEST_CASE("a step of many small kernels tells how fast the host submits them") {
  const Simulated small = simulated("dgx-a100", 1, 1, "megatron-deepspeed", "gpt2", 128);
  const CalibrationFit found = fit(small, step_at(small, {1.0, 1.0, 1.0, 0.5}));
  REQUIRE(found.calibration.shares.size() == 1);
  CHECK(found.calibration.shares[0].constant == ClusterConstant::host);
  CHECK(found.calibration.shares[0].share == doctest::Approx(0.5).epsilon(0.01));
}

TEST_CASE("steps of two layouts tell two constants") {
  const Simulated one = simulated("azure-ndv2", 8, 64);
  const Simulated many = simulated("azure-ndv2", 64, 64);
  const std::array<double, constant_count> truth{0.85, 1.0, 0.7, 1.0};
  const std::array<MeasuredPlan, 2> steps{
      MeasuredPlan{.graph = &one.graph, .plan = &one.plan, .measured = step_at(one, truth)},
      MeasuredPlan{.graph = &many.graph, .plan = &many.plan, .measured = step_at(many, truth)}};
  const CalibrationFit found = fit_calibration(steps);
  REQUIRE(found.calibration.shares.size() == 2);
  CHECK(found.calibration.shares[0].constant == ClusterConstant::kernels);
  CHECK(found.calibration.shares[0].share == doctest::Approx(0.85).epsilon(0.003));
  CHECK(found.calibration.shares[1].constant == ClusterConstant::network);
  CHECK(found.calibration.shares[1].share == doctest::Approx(0.7).epsilon(0.003));
  CHECK(calibration_json(found).at("steps").size() == 2);
}

TEST_CASE("no share takes a device beyond its datasheet") {
  const Simulated one = simulated("dgx-a100", 1, 16);
  const DeviceKind& device = one.plan.cluster.groups.front().device;
  const double most = device.peak_half / device.rates.front().sustained_half;  // of an A100: 312 over what it sustains
  // With all products at the peak there is still what kernels move.
  const Seconds fastest = step_at(one, {most, 1.0, 1.0, 1.0});
  const CalibrationFit found = fit(one, fastest * 0.99);
  CHECK(found.calibration.shares[0].share == doctest::Approx(most));
  CHECK_FALSE(found.calibration.shares[0].percent_per_percent);
  const std::string refused = error_of<ConfigError>([&] { fit(one, fastest * 0.5); });
  CHECK(refused.starts_with("error: a step of "));
  CHECK(refused.find(" is not explained by what kernels sustain: with 1.3") != std::string::npos);
  CHECK(refused.find(" times the rates in the files, the datasheet's peak, it would take ") != std::string::npos);
  const std::string slow = error_of<ConfigError>([&] { fit(one, fastest * 100.0); });
  CHECK(slow.find("with a tenth of the rates in the files, the least that is believed") != std::string::npos);
}

TEST_CASE("a step that follows a rate one way alone is explained by another, or refused") {
  // A slower NIC would lengthen it, and a faster one does not shorten it: PCIe is as slow.
  Simulated one = simulated("aws-p5", 32, 64, "parplan", "gpt2-xl");
  for (Link& link : one.plan.cluster.groups.front().node.links)
    if (link.kind == "PCIe") link.bandwidth *= 0.2;
  const Seconds predicted = simulate_plan(one.graph, one.plan).time.total();
  for (const double share : {0.5, 0.9, 1.5}) {
    CAPTURE(share);
    const Seconds measured = share * predicted;
    try {
      const CalibrationFit found = fit(one, measured);
      CHECK(found.plans.front().after.total() / measured == doctest::Approx(1.0).epsilon(0.021));
    } catch (const ConfigError& error) {
      CHECK(std::string(error.what()).find("is not explained by") != std::string::npos);
    }
  }
  // No rate that is believed makes a step a fifth as long.
  CHECK(error_of<ConfigError>([&] { fit(one, 0.2 * predicted); }).find("is not explained by") != std::string::npos);
}

TEST_CASE("steps of unlike clusters and engines are not fitted together, nor to a calibrated cluster") {
  const Simulated one = simulated("dgx-a100", 1, 16), other = simulated("dgx-h100", 1, 16),
                  engine = simulated("dgx-a100", 1, 16, "fsdp");
  const auto together = [&](const Simulated& a, const Simulated& b) {
    const std::array<MeasuredPlan, 2> steps{MeasuredPlan{.graph = &a.graph, .plan = &a.plan, .measured = Seconds(1.0)},
                                            MeasuredPlan{.graph = &b.graph, .plan = &b.plan, .measured = Seconds(1.0)}};
    return error_of<ConfigError>([&] { fit_calibration(steps); });
  };
  CHECK(together(one, other) ==
        "error: one measured step is of cluster 'dgx-a100' with a100-sxm4-80gb, another of 'dgx-h100' with "
        "h100-sxm-80gb; steps are fitted together where they ran on one cluster");
  CHECK(together(one, engine) ==
        "error: one measured step is of engine parplan, another of fsdp; steps are fitted together where one engine "
        "ran them");
  Simulated again = one;
  const CalibrationFit found = fit(one, step_at(one, {0.8, 1.0, 1.0, 1.0}));
  calibrate(again.plan.cluster, again.plan.training.engine, found.calibration);
  CHECK(
      error_of<ConfigError>([&] { fit(again, Seconds(1.0)); }) ==
      "error: cluster 'dgx-a100' is calibrated already (kernels 0.8 of their files' rates, by 1 measured step of "
      "parplan); a calibration is fitted to the rates of files: give the layout with the cluster that it was made of");
}

}  // namespace parplan
