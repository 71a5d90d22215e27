#include "planner/report/suggest_and_run_json.h"

#include <doctest/doctest.h>

#include "planner/plan/reasons.h"
#include "planner/report/plan_row.h"
#include "planner/report/remedy.h"
#include "planner/report/run_comparison.h"
#include "tests/planner/report/small_plan.h"

namespace parplan {
namespace {

using testing::small_plan;

TEST_CASE("the JSON of a run has both rows with the same keys") {
  const Plan plan = small_plan();
  const RunComparison comparison{.measured = plan.prediction,
                                 .loss = {2.5, 2.25},
                                 .step_times = {Seconds(11.0), Seconds(10.0)},
                                 .promised = {.device = {Bytes(620)}},
                                 .touched = {.device = {Bytes(620)}},
                                 .process_growth = Bytes(5),
                                 .hosted = {0},
                                 .instructions = {}};
  const Json json = run_json(
      {.version = "1.2.3", .model = plan.model, .cluster = plan.cluster, .training = plan.training, .defaults = {}},
      plan, comparison);
  CHECK(json.at("schema") == "parplan.run/1");
  CHECK(json.at("tool").dump() == R"({"name":"parplan","version":"1.2.3"})");
  CHECK(json.at("loss").dump() == "[2.5,2.25]");
  CHECK(json.at("predicted") == json.at("measured"));
}

TEST_CASE("the JSON of a failed search has no plans and says what to change") {
  const Plan plan = small_plan();
  const ReportInputs inputs{.version = "1.2.3",
                            .model = plan.model,
                            .cluster = plan.cluster,
                            .training = plan.training,
                            .defaults = {"global_batch"}};
  const Remedy remedy{.of = "memory",
                      .instead = "2.00 GiB of memory a device instead of 1.00 GiB",
                      .value = std::int64_t{2} << 30,
                      .model = plan.model,
                      .cluster = plan.cluster,
                      .training = plan.training,
                      .plan = {.spec = plan.spec, .result = plan.prediction}};
  const Json json = suggest_json(inputs,
                                 {.candidates = 7,
                                  .infeasible_memory = 7,
                                  .pruned_by_bound = 0,
                                  .simulated = 0,
                                  .seconds = 0.5,
                                  .certified = false,
                                  .gap = {}},
                                 nullptr,
                                 std::vector<Remedy>{remedy,
                                                     {.of = "recompute",
                                                      .instead = "recompute full instead of none",
                                                      .value = "full",
                                                      .model = plan.model,
                                                      .cluster = plan.cluster,
                                                      .training = plan.training,
                                                      .plan = remedy.plan}});
  std::vector<std::string> keys;
  for (const auto& item : json.items()) keys.push_back(item.key());
  CHECK(keys == std::vector<std::string>{"schema", "tool", "inputs", "search", "columns", "plans", "changes", "notes",
                                         "environment", "launch"});
  CHECK(json.at("plans").dump() == "[]");
  Json unranked = row(subject_of(plan));
  unranked["rank"] = nullptr;
  Json wanted = {{"change", "memory"}, {"value", 2147483648}, {"text", describe(remedy)}, {"plan", unranked}};
  CHECK(json.at("changes").size() == 2);
  CHECK(json.at("changes")[0].dump() == wanted.dump());
  CHECK(json.at("changes")[1].at("value") == "full");
  CHECK(json.at("inputs").at("objective") == "time");
  CHECK(
      json.at("search").dump() ==
      R"({"space":null,"candidates":7,"infeasible_memory":7,"pruned_by_bound":0,"simulated":0,"seconds":0.5,"certified":false,"gap":null,"cut_gap":null,"left_out":[]})");
  CHECK(
      json.at("inputs").at("training").dump() ==
      R"({"global_batch":4,"sequence_length":5,"precision":"fp32","optimizer":"adamw","engine":"parplan","trained":"all","defaults":["global_batch"]})");
}

}  // namespace
}  // namespace parplan
