// The whole text of explain with everything that was found out about a plan.
#include "planner/report/explain.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "planner/base/file.h"
#include "planner/report/error_band.h"
#include "planner/report/explain_json.h"
#include "planner/report/explain_rules.h"
#include "planner/report/plan_row.h"
#include "planner/report/plan_table.h"
#include "tests/planner/report/small_plan.h"

namespace parplan {
namespace {

using testing::small_plan;

CriticalWork work(int rank, const char* segment, Label label, std::int64_t runs, double seconds) {
  return {.rank = rank, .segment = segment, .label = label, .runs = runs, .time = Seconds(seconds)};
}

// Whether its device has room for it.
void judge(Rival& rival) {
  rival.shortage.reset();
  if (const Bytes peak = rival.plan.result.memory.peak(); peak > rival.capacity)
    rival.shortage = Shortage{.home = Home::device, .needed = peak, .available = rival.capacity};
}

// Reasons for the plan of 10 s and 640 bytes: two stages, of which the second finishes after 8 s
// and holds less.
Reasons small_reasons() {
  const Plan plan = small_plan();
  const auto rival = [&](auto change) {
    Rival other{.plan = {.spec = plan.spec, .result = plan.prediction}, .capacity = Bytes(1000)};
    change(other.plan);
    judge(other);
    return other;
  };
  Reasons reasons;
  RankResult second{.time = plan.prediction.time,
                    .memory = plan.prediction.memory,
                    .communication = plan.prediction.communication,
                    .kernels = {},
                    .collectives = {}};
  second.kernels[Origin::interpolated] = Seconds(4.0);
  second.kernels[Origin::datasheet] = Seconds(1.0);
  second.collectives[CommunicationOrigin::formula] = Seconds(1.5);
  second.collectives[CommunicationOrigin::links] = Seconds(0.5);
  reasons.details.ranks.push_back(second);
  second.time.bubble = Seconds(0.0);
  second.memory.activations = Bytes(40);
  second.pipeline_rank = 1;
  reasons.details.ranks.push_back(second);
  reasons.capacities = {Bytes(1000), Bytes(1000)};
  reasons.details.critical_path = {work(0, "pipeline.receive.gradient", Label::pp, 1, 0.5),
                                   work(0, "layers.forward", Label::compute, 1, 1.0),
                                   work(0, "layers.backward", Label::compute, 2, 4.0),
                                   work(0, "data.reduce_scatter.gradients", Label::dp, 1, 1.0),
                                   work(0, "optimizer", Label::optimizer, 1, 0.5),
                                   work(1, "layers.forward", Label::compute, 1, 1.0),
                                   work(1, "head.forward", Label::compute, 1, 2.0)};
  reasons.neighbours = {{.change = "ZeRO-0", .rival = rival([](RankedPlan& other) {
                           other.spec.zero_stage = 0;
                           other.result.time.exposed.dp = Seconds(1.5);
                         })},
                        {.change = "micro-batch 2", .rival = rival([](RankedPlan& other) {
                           other.spec.micro_batch = 2;
                           other.result.memory.activations = Bytes(540);  // 1100 of 1000
                         })}};
  reasons.guide.one_device = {.cluster = plan.cluster, .least = rival([](RankedPlan& other) {
    other.spec = {};
    other.result.memory.parameters = Bytes(2060);  // 2500
  })};
  reasons.guide.largest_block = {.block = "head", .state = Bytes(1500), .capacity = Bytes(1000)};
  reasons.guide.beyond_node = {.inside_ranks = 4,
                               .inside = BytesPerSecond(300.0),
                               .across_ranks = 8,
                               .across = BytesPerSecond(100.0),
                               .best = rival([](RankedPlan& other) {
                                 other.spec.mesh.degree = {.tp = 8};
                                 other.result.time.exposed.tp = Seconds(5.0);
                               })};
  reasons.guide.sharded_pipeline = {{.rival = rival([](RankedPlan& other) {
                                       other.spec.zero_stage = 2;
                                       other.result.communication.dp = Bytes(600);
                                       other.result.time.exposed.dp = Seconds(2.0);
                                     }),
                                     .sent = Bytes(300),
                                     .micro_batches = 2}};
  reasons.guide.bubble = {.stages = 2,
                          .micro_batches = 2,
                          .closed_form = 1.0 / 3.0,
                          .simulated = 0.2,
                          .enough = 8,
                          .closed_form_then = 1.0 / 9.0};
  reasons.families = {{.family = "data parallel, ZeRO-1", .best = rival([](RankedPlan& other) {
                         other.spec.mesh.degree = {.dp = 4};
                         other.result.time.bubble = Seconds(0.0);
                         other.result.time.exposed.dp = Seconds(4.0);
                       })},
                      {.family = "pipeline alone", .best = {}},
                      {.family = "pipeline x data parallel", .best = rival([](RankedPlan&) {}), .of_the_plan = true}};
  const auto variation = [&](Resource resource, double factor, auto change) {
    Variation varied{.resource = resource,
                     .factor = factor,
                     .global_batch = 4,
                     .cluster = plan.cluster,
                     .plan = rival([](RankedPlan&) {}),
                     .best = {},
                     .changes = false,
                     .certified = true};
    change(varied);
    return varied;
  };
  const auto compute_takes = [](double seconds) {
    return [seconds](Variation& varied) {
      varied.plan.plan.result.time.compute = Seconds(seconds);
      varied.best = varied.plan.plan;
    };
  };
  reasons.binding = Constraint::compute;
  reasons.twice = {variation(Resource::compute, 2.0, compute_takes(3.0)),
                   variation(Resource::memory, 2.0, [](Variation& varied) { varied.best = varied.plan.plan; })};
  reasons.sensitivity = {variation(Resource::compute, 0.8, compute_takes(7.5)),
                         variation(Resource::memory, 0.6,
                                   [](Variation& varied) {
                                     varied.plan.capacity = Bytes(600);
                                     judge(varied.plan);
                                     varied.best = varied.plan.plan;
                                     varied.best->spec.micro_batch = 2;
                                     varied.best->result.time.bubble = Seconds(3.0);
                                     varied.changes = true;
                                   }),
                         variation(Resource::memory, 1.2,
                                   [](Variation& varied) {
                                     varied.best = varied.plan.plan;
                                     varied.best->spec.recompute = Recompute::full;
                                     varied.best->result.time.bubble = Seconds(1.0);
                                     varied.changes = true;
                                   }),
                         variation(Resource::global_batch, 1.5, [](Variation& varied) {
                           varied.global_batch = 6;
                           varied.plan.plan.result.time.compute = Seconds(8.0);  // 12 s for 6 sequences
                           varied.best = varied.plan.plan;
                         })};
  return reasons;
}

TEST_CASE("explain with reasons says it all") {
  const Plan plan = small_plan();
  const std::string text = explain(plan, small_reasons());
  const std::string short_text = explain(plan);
  // The beginning is that of the plan alone.
  const std::string beginning = short_text.substr(0, short_text.find("\nrunner-up:"));
  REQUIRE(text.starts_with(beginning));
  // Stage 1 is done after 8 s and waits for 2 s. With a fifth more memory 9 s instead of 10; with
  // half more of the batch 12 s for 6 sequences instead of 10 s for 4: 0.5 per second instead of
  // 0.4.
  CHECK(text.substr(beginning.size()) == R"(
each stage's time, communication as far as it is waited for:
  stage  layers  compute  data-parallel  transfers  waiting  optimizer
  0           2   6.00 s         1.00 s     500 ms   2.00 s     500 ms
  1           1   6.00 s         1.00 s     500 ms   2.00 s     500 ms

each stage's memory:
  stage  parameters  gradients  optimizer state  activations  buffers  libraries   peak  of capacity
  0           200 B      200 B            100 B         80 B     40 B       20 B  640 B       64.0 %
  1           200 B      200 B            100 B         40 B     40 B       20 B  600 B       60.0 %

the critical path: what the end of the step hangs on, 10.0 s in all:
  stage 0: layers                    3 x  5.00 s  50.0 %
  stage 0: reductions of gradients   1 x  1.00 s  10.0 %
  stage 0: transfers between stages  1 x  500 ms   5.0 %
  stage 0: optimizer                 1 x  500 ms   5.0 %
  stage 1: head                      1 x  2.00 s  20.0 %
  stage 1: layers                    1 x  1.00 s  10.0 %

kernels, 10.0 s of work on all stages together: 80.0 % interpolated between kernels measured on such devices, 20.0 % from datasheets, or
  assumed for a class of devices

communication, 4.00 s of work on all stages together: 75.0 % by NCCL's own model of its algorithms, 25.0 % from the rates and latencies of
  links

binding constraint: compute: 65.0 % of the step computes
  with twice  the plan        then
  compute     7.00 s (-30 %)  the plan stays the best
  memory      as now          the plan stays the best

runner-up: dp2 tp1 pp2 zero1 mb2 1f1b pp>dp, 11.5 s (15.00 % slower)
  against the plan: bubble +2.00 s, data-parallel communication -500 ms
  it needs 720 B of memory, the plan 640 B
how sure: no measured steps on such devices are published, to hold this against; `parplan run` measures a plan

  one choice away    step  vs plan  memory peak  against the plan
  ZeRO-0           10.5 s   +5.0 %        640 B  data-parallel communication +500 ms
  micro-batch 2         -        -     1.07 KiB  does not fit: 100 B more than the 1000 B of a device

  best of its family, and what it loses on    step   vs plan  memory peak  layout
  data parallel, ZeRO-1                     11.0 s     +10 %        640 B  dp4 tp1 pp1 zero1 mb1
      data-parallel communication +3.00 s, bubble -2.00 s
  pipeline alone                                 -         -            -  no layout is legal
  pipeline x data parallel                  10.0 s  the plan        640 B  dp2 tp1 pp2 zero1 mb1 1f1b pp>dp

what the rules of the guides come to here:
  - one device is not enough: at least 2.44 KiB are needed (dp1 tp1 pp1 mb1), 2.5 times its 1000 B; something has to be divided
  - parameters, gradients and optimizer state of 'head' alone take 1.46 KiB of a device's 1000 B: only tensor parallelism or ZeRO divides
    them
  - tensor parallelism beyond a node: rings over 8 devices reach 100 B/s a device, 3.0 times less than the 300 B/s inside a node; the best
    such layout, dp1 tp8 pp1 mb1, takes 15.0 s (+50 %)
  - ZeRO-2 in this pipeline reduces gradients in each of 2 micro-batches: a device sends 600 B a step for it instead of 300 B, 2.0 times as
    much; the step takes 11.0 s (+10 %)
  - a pipeline of p = 2 stages and m = 2 micro-batches is idle for (p - 1) / (m + p - 1) = 33.3 % of its time; simulated, 20.0 % of the step
    waits: too few; 4 p = 8 micro-batches (a larger batch, smaller micro-batches or fewer data-parallel ranks) would leave 11.1 %
  - schedules were compared by simulating them, as Varuna does (arXiv:2111.04007), not by that formula

  with                        the plan                      then
  compute 20 % less           11.5 s (+15 %)                the plan stays the best
  memory 40 % less            does not fit: 640 B of 600 B  best: dp2 tp1 pp2 zero1 mb2 1f1b pp>dp, 11.0 s
  memory 20 % more            as now                        best: dp2 tp1 pp2 zero1 mb1 1f1b recompute=full pp>dp, 9.00 s (11.1 % faster)
  global batch 6 (50 % more)  12.0 s, tokens/s +25 %        the plan stays the best
  global batch less           -                             no smaller batch near it is legal in this layout

search: 12 candidates: 3 do not fit in memory, 5 cannot be faster by their lower bound, 4 simulated; certified: the fastest of this space
  under this cost model
)");
}

TEST_CASE("the JSON has the same numbers, and parts that sum") {
  const Plan plan = small_plan();
  const Reasons reasons = small_reasons();
  const Json json = explain_json(
      {.version = "1.2.3", .model = plan.model, .cluster = plan.cluster, .training = plan.training, .defaults = {}},
      plan, reasons);
  CHECK(json.at("schema") == "parplan.explain/1");
  std::vector<std::string> keys;
  for (const auto& item : json.items()) keys.push_back(item.key());
  CHECK(keys == std::vector<std::string>{"schema",        "tool",
                                         "inputs",        "search",
                                         "columns",       "plans",
                                         "notes",         "stages",
                                         "critical_path", "deciding_devices",
                                         "kernels",       "communication",
                                         "binding_constraint",
                                         "relaxed",       "twice",
                                         "error_band",    "undecided_below",
                                         "runner_up",     "one_choice_away",
                                         "families",      "guide",
                                         "sensitivity",   "unrestricted"});
  CHECK(json.at("deciding_devices") == Json::array());  // all are alike
  CHECK(json.at("kernels") == Json{{"measured_s", 0.0},
                                   {"interpolated_s", 8.0},
                                   {"datasheet_s", 2.0},
                                   {"at_rates_of_loops", Json::array()}});  // cores
  CHECK(json.at("communication") == Json{{"fitted_s", 0.0}, {"formula_s", 3.0}, {"links_s", 1.0}});
  REQUIRE(json.at("stages").size() == 2);
  for (const Json& stage : json.at("stages")) {
    double seconds = 0.0;
    for (const auto& [key, value] : stage.items())
      if (key.starts_with("time_")) seconds += value.get<double>();
    CHECK(seconds == doctest::Approx(10.0));
  }
  CHECK(json.at("stages")[1].at("time_bubble_s") == 2.0);  // done after 8 s, it waits
  CHECK(json.at("stages")[1].at("memory_peak_bytes") == 600);
  CHECK(
      json.at("critical_path")[3].dump() ==
      R"({"stage":0,"what":"reductions of gradients","segment":"data.reduce_scatter.gradients","label":"data","runs":1,"time_s":1.0})");
  CHECK(json.at("binding_constraint") == "compute");
  CHECK(json.at("relaxed").at("plan").at("step_time_s") == 7.0);
  CHECK(json.at("twice")[1].at("resource") == "memory");
  CHECK(json.at("runner_up").at("slower").get<double>() == doctest::Approx(0.15));
  CHECK(json.at("error_band").is_null());
  CHECK(json.at("undecided_below").is_null());  // CPUs, which no published run is of
  CHECK(json.at("one_choice_away")[1].at("change") == "micro-batch 2");
  CHECK(json.at("one_choice_away")[1].at("fits") == false);
  CHECK(json.at("one_choice_away")[0].at("slower").get<double>() == doctest::Approx(0.05));
  CHECK(json.at("families")[1].at("best").is_null());
  CHECK(json.at("families")[2].at("of_the_plan") == true);
  std::vector<std::string> rules;
  for (const Json& rule : json.at("guide")) rules.push_back(rule.at("rule"));
  CHECK(rules == std::vector<std::string>{"one_device", "largest_block", "tensor_parallel_beyond_node",
                                          "sharding_in_pipeline", "bubble"});
  CHECK(json.at("sensitivity")[3].at("plan").at("global_batch") == 6);
  CHECK(json.at("unrestricted").is_null());
}

// The plan of 4 devices in two stages, the first on boxes, the second on crates.
Plan plan_on_boxes_and_crates() {
  Plan plan = small_plan();
  NodeGroup& boxes = plan.cluster.groups.front();
  boxes.device.title = "Box";
  boxes.node.devices = {0, 1};
  plan.cluster.groups.push_back(boxes);
  plan.cluster.groups.back().device.title = "Crate";
  return plan;
}

TEST_CASE("the device decides on which most of the critical path's computation lies, whoever waits least") {
  const Plan plan = plan_on_boxes_and_crates();
  Reasons reasons = small_reasons();
  // Boxes wait 1 s more than crates: 3 s. On the path they compute 5 of 8 s.
  reasons.details.ranks[0].time.bubble += Seconds(1.0);
  reasons.details.ranks[0].time.compute -= Seconds(1.0);
  CHECK(explain(plan, reasons).find(R"(
which device decides: Box, with 62.5 % of the computation on the critical path:
  device  stage  computes on it   share   waits
  Box         0          5.00 s  62.5 %  3.00 s
  Crate       1          3.00 s  37.5 %  2.00 s
)") != std::string::npos);
  // 3 s of a crate's are now boxes' transfers: nothing that anybody computes.
  reasons.details.critical_path[2] = work(0, "pipeline.receive.gradient", Label::pp, 2, 4.0);
  reasons.details.critical_path[6] = work(1, "layers.backward", Label::recompute, 1, 2.0);
  CHECK(explain(plan, reasons).find(R"(
which device decides: Crate, with 75.0 % of the computation on the critical path:
  device  stage  computes on it   share   waits
  Crate       1          3.00 s  75.0 %  2.00 s
  Box         0          1.00 s  25.0 %  3.00 s
)") != std::string::npos);
  const Json json = explain_json(
      {.version = "1.2.3", .model = plan.model, .cluster = plan.cluster, .training = plan.training, .defaults = {}},
      plan, reasons);
  REQUIRE(json.at("deciding_devices").size() == 2);
  CHECK(
      json.at("deciding_devices")[0].dump() ==
      R"({"device":"Crate","ranks":[{"stage":1}],"critical_path_compute_s":3.0,"critical_path_share":0.75,"least_waiting_s":2.0,"most_waiting_s":2.0})");
  CHECK(explain(small_plan(), reasons).find("which device decides") == std::string::npos);
}

TEST_CASE("replicas with unlike micro-batches decide by what all of their stages compute on the critical path") {
  Plan plan = plan_on_boxes_and_crates();
  plan.spec.mesh.order = {Axis::dp, Axis::pp, Axis::cp, Axis::ep, Axis::tp};
  plan.spec.replica_micro_batches = {3, 1};
  plan.spec.zero_stage = 0;
  Reasons reasons = small_reasons();
  // Each replica has both stages; the path's last 3 s are the second replica's.
  for (int i = 0; i < 2; ++i) {
    reasons.details.ranks.push_back(reasons.details.ranks[static_cast<std::size_t>(i)]);
    reasons.details.ranks.back().replica = 1;
    reasons.capacities.push_back(Bytes(1000));
  }
  reasons.details.ranks[3].time.compute -= Seconds(1.5);
  for (std::size_t i = 5; i < 7; ++i) reasons.details.critical_path[i].rank = 3;
  CHECK(explain(plan, reasons).find(R"(
which device decides: Box, with 62.5 % of the computation on the critical path:
  device  replica.stage  micro-batches  computes on it   share             waits
  Box          0.0, 0.1              3          5.00 s  62.5 %            2.00 s
  Crate        1.0, 1.1              1          3.00 s  37.5 %  2.00 s to 3.50 s
)") != std::string::npos);
}

// The same with one replica on boxes and one on crates, which share both stages.
Plan plan_shared_by_boxes_and_crates() {
  Plan plan = plan_on_boxes_and_crates();
  plan.spec.mesh.order = {Axis::dp, Axis::pp, Axis::cp, Axis::ep, Axis::tp};
  return plan;
}

Reasons reasons_of_shared(Seconds boxes_on_second_stage) {
  Reasons reasons = small_reasons();
  reasons.shared = {{.rank = 0, .group = 0, .kernels = Seconds(3.0)},
                    {.rank = 1, .group = 0, .kernels = boxes_on_second_stage},
                    {.rank = 0, .group = 1, .kernels = Seconds(5.0)},
                    {.rank = 1, .group = 1, .kernels = Seconds(4.5)}};
  return reasons;
}

TEST_CASE("devices that share a stage go at the pace of the slowest, which decides, and the others wait for it") {
  Plan plan = plan_shared_by_boxes_and_crates();
  CHECK(explain(plan, reasons_of_shared(Seconds(2.0))).find(R"(
which device decides: Crate, with 100.0 % of the computation on the critical path:
  device  stage  computes on it    share             waits
  Crate     0-1          8.00 s  100.0 %            2.00 s
  Box       0-1             0 s    0.0 %  4.00 s to 4.50 s
  Box waits for Crate, with which it shares stages 0-1
)") != std::string::npos);
  // The boxes are the slower ones in the second stage, with 3 of 8 s.
  const Reasons mixed = reasons_of_shared(Seconds(6.0));
  CHECK(explain(plan, mixed).find(R"(
which device decides: Crate, with 62.5 % of the computation on the critical path:
  device  stage  computes on it   share             waits
  Crate     0-1          5.00 s  62.5 %  2.00 s to 3.50 s
  Box       0-1          3.00 s  37.5 %  2.00 s to 4.00 s
  Crate waits for Box, with which it shares stage 1
  Box waits for Crate, with which it shares stage 0
)") != std::string::npos);
  const auto decide = [](const Plan& of, const Reasons& reasons) {
    return explain_json(
               {.version = "1.2.3", .model = of.model, .cluster = of.cluster, .training = of.training, .defaults = {}},
               of, reasons)
        .at("deciding_devices");
  };
  const Json json = decide(plan, mixed);
  REQUIRE(json.size() == 2);
  CHECK(
      json[1].dump() ==
      R"({"device":"Box","ranks":[{"stage":0,"waits_for":"Crate"},{"stage":1}],"critical_path_compute_s":3.0,"critical_path_share":0.375,"least_waiting_s":2.0,"most_waiting_s":4.0})");
  // As fast as one another: nobody waits for the other.
  Reasons equal = reasons_of_shared(Seconds(4.5));
  equal.shared.front().kernels = Seconds(5.0);
  CHECK(decide(plan, equal).size() == 2);
  CHECK(explain(plan, equal).find("with which it shares") == std::string::npos);
  // Unlike devices of one title have the number of their group.
  plan.cluster.groups.back().device.title = "Box";
  plan.cluster.groups.back().device.peak_fp32 = FlopsPerSecond(50.0);
  CHECK(decide(plan, mixed)[0].at("device") == "Box of group 1");
  CHECK(decide(plan, mixed)[1].at("device") == "Box of group 0");
  plan.cluster.groups.back().device = plan.cluster.groups.front().device;
  CHECK(decide(plan, mixed).empty());  // all are alike
}

TEST_CASE("the rows of a variation are of its own devices") {
  const Plan plan = small_plan();
  Reasons reasons = small_reasons();
  // Twice as fast, 4 sequences of 500 FLOP on 4 devices of 200 FLOP/s in 7 s; and with two kinds of
  // devices, the second stage's with 700 bytes.
  Variation& twice = reasons.twice.front();
  twice.cluster.groups.front().device.peak_fp32 = FlopsPerSecond(200.0);
  NodeGroup& group = twice.cluster.groups.front();
  group.node.devices = {0, 1};
  twice.cluster.groups.push_back(group);
  twice.cluster.groups.back().device.memory_capacity = Bytes(700);
  twice.best->result.memory_stage = 1;
  twice.certified = false;
  const Json json = explain_json(
      {.version = "1.2.3", .model = plan.model, .cluster = plan.cluster, .training = plan.training, .defaults = {}},
      plan, reasons);
  const Json& compute = json.at("twice")[0];
  CHECK(compute.at("plan").at("mfu").get<double>() == doctest::Approx(2000.0 / 7.0 / 4.0 / 200.0));
  CHECK(compute.at("plan").at("memory_capacity_bytes") == 1000);
  CHECK(compute.at("best").at("mfu") == compute.at("plan").at("mfu"));
  CHECK(compute.at("best").at("memory_capacity_bytes") == 700);
  CHECK(compute.at("best").at("fits") == true);
  CHECK(compute.at("best").at("slower").get<double>() == doctest::Approx(-0.3));
  CHECK(compute.at("certified") == false);
  CHECK(json.at("twice")[1].at("certified") == true);
}

TEST_CASE("what a search found that a limit cut is not called the best") {
  Reasons reasons = small_reasons();
  const std::string meaning =
      "  (found: of the most promising candidates, which were simulated; others may be better)\n";
  CHECK(explain(small_plan(), reasons).find("found") == std::string::npos);
  reasons.twice[1].certified = false;
  reasons.sensitivity[1].certified = reasons.sensitivity[2].certified = false;
  reasons.families[0].certified = reasons.families[2].certified = false;
  reasons.unrestricted = reasons.sensitivity[2];
  const std::string text = explain(small_plan(), reasons);
  CHECK(text.find("  compute     7.00 s (-30 %)  the plan stays the best\n"
                  "  memory      as now          the plan stays the best found\n" + meaning) != std::string::npos);
  CHECK(text.find("best found: dp2 tp1 pp2 zero1 mb2 1f1b pp>dp, 11.0 s\n") != std::string::npos);
  CHECK(text.find("best found: dp2 tp1 pp2 zero1 mb1 1f1b recompute=full pp>dp, 9.00 s") != std::string::npos);
  CHECK(text.find("no smaller batch near it is legal in this layout\n" + meaning) != std::string::npos);
  CHECK(text.find("9.00 s (11.1 % faster); others may be") != std::string::npos);
  CHECK(text.find("\n      best found: data-parallel communication") != std::string::npos);
  CHECK(text.find("pp>dp\n      best found\n" + meaning) != std::string::npos);
}

TEST_CASE(
    "it is said on how many devices families were looked for, where the plan leaves some idle or another objective "
    "may") {
  Plan plan = small_plan();
  const std::string which = "  (of layouts on 4 devices, and of the plan's alternatives)\n";
  CHECK(explain(plan, small_reasons()).find("(of layouts on") == std::string::npos);
  plan.search.objective = Objective::cost;
  CHECK(explain(plan, small_reasons()).find(which) != std::string::npos);
  plan.search.objective = Objective::time;
  plan.cluster.groups.front().nodes = 2;
  CHECK(explain(plan, small_reasons()).find(which) != std::string::npos);
}

TEST_CASE("without searches what binds is what simulations say, with what would help") {
  Reasons reasons = small_reasons();
  reasons.twice.clear();
  reasons.binding = Constraint::communication;  // and not by the parts
  CHECK(explain(small_plan(), reasons)
            .find("binding constraint: communication: 15.0 % of the step waits for it, most for data-parallel "
                  "communication; faster links or a larger batch\n"
                  "  would help first\n") != std::string::npos);
}

TEST_CASE("of unlike devices it is said which is enough, or the largest") {
  Plan plan = small_plan();
  plan.cluster.groups.push_back(plan.cluster.groups.front());
  plan.cluster.groups.back().device.name = "crate";
  Reasons reasons = small_reasons();
  reasons.guide.one_device->cluster.groups = {plan.cluster.groups.back()};
  const std::string text = explain(plan, reasons);
  CHECK(text.find("  - one device is not enough, not even crate: at least 2.44 KiB are needed (dp1 tp1 pp1 mb1), 2.5 "
                  "times its 1000 B;") != std::string::npos);
  CHECK(text.find("'head' alone take 1.46 KiB of the largest device's 1000 B: ") != std::string::npos);
  reasons.guide.one_device->least.capacity = Bytes(4000);
  judge(reasons.guide.one_device->least);
  CHECK(explain(plan, reasons).find("  - one device (crate) is enough: dp1 tp1 pp1 mb1 needs 2.44 KiB of 3.91 KiB") !=
        std::string::npos);
}

TEST_CASE("the JSON Schema has exactly the keys that are written") {
  const Plan plan = small_plan();
  const Json json = explain_json(
      {.version = "1.2.3", .model = plan.model, .cluster = plan.cluster, .training = plan.training, .defaults = {}},
      plan, small_reasons());
  const Json schema = Json::parse(read_file(std::string(PARPLAN_SOURCE_DIR) + "/docs/schemas/explain.schema.json"));
  // `optional`: keys that only other objects of the kind have.
  const auto check = [](const Json& described, const Json& object, std::size_t optional = 0) {
    std::vector<std::string> keys;
    for (const auto& item : object.items()) keys.push_back(item.key());
    CHECK(described.at("required").get<std::vector<std::string>>() == keys);
    CHECK(described.at("properties").size() == keys.size() + optional);
    CHECK(described.at("additionalProperties") == false);
  };
  const auto has_all = [](const Json& described, const Json& object) {
    for (const auto& item : object.items()) {
      INFO(item.key());
      CHECK(described.at("properties").contains(item.key()));
    }
  };
  check(schema, json);
  CHECK(schema.at("properties").at("schema").at("const") == json.at("schema"));
  const auto items_of = [&](const char* list) -> const Json& { return schema.at("properties").at(list).at("items"); };
  check(items_of("families"), json.at("families")[0]);
  Plan of_replicas = plan;
  of_replicas.spec.replica_micro_batches = {3, 1};
  of_replicas.spec.zero_stage = 0;
  const Json by_replica = explain_json({.version = "1.2.3",
                                        .model = plan.model,
                                        .cluster = plan.cluster,
                                        .training = plan.training,
                                        .defaults = {}},
                                       of_replicas, small_reasons());
  for (const char* list : {"stages", "critical_path"}) {
    check(items_of(list), json.at(list)[0], 1);
    REQUIRE(by_replica.at(list)[0].contains("replica"));
    has_all(items_of(list), by_replica.at(list)[0]);
  }
  const Plan unlike = plan_on_boxes_and_crates();
  const Json of_unlike = explain_json({.version = "1.2.3",
                                       .model = unlike.model,
                                       .cluster = unlike.cluster,
                                       .training = unlike.training,
                                       .defaults = {}},
                                      unlike, small_reasons());
  const Json& deciding = items_of("deciding_devices");
  check(deciding, of_unlike.at("deciding_devices").at(0));
  const Plan shared = plan_shared_by_boxes_and_crates();
  const Json of_shared = explain_json({.version = "1.2.3",
                                       .model = shared.model,
                                       .cluster = shared.cluster,
                                       .training = shared.training,
                                       .defaults = {}},
                                      shared, reasons_of_shared(Seconds(2.0)));
  const Json& waiting = of_shared.at("deciding_devices").at(1).at("ranks").at(0);
  REQUIRE(waiting.contains("waits_for"));
  has_all(deciding.at("properties").at("ranks").at("items"), waiting);
  check(schema.at("$defs").at("variation"), json.at("relaxed"));
  check(schema.at("$defs").at("variation"), json.at("twice")[1]);
  const Json& resources = schema.at("$defs").at("variation").at("properties").at("resource").at("enum");
  CHECK(resources.size() == static_cast<std::size_t>(Resource::count_));
  for (int resource = 0; resource < static_cast<int>(Resource::count_); ++resource) {
    Reasons reasons = small_reasons();
    reasons.twice.front().resource = static_cast<Resource>(resource);
    const Json written = explain_json(
        {.version = "1.2.3", .model = plan.model, .cluster = plan.cluster, .training = plan.training, .defaults = {}},
        plan, reasons);
    CHECK(written.at("twice")[0].at("resource") == resources.at(static_cast<std::size_t>(resource)));
  }
  const Json& rules = schema.at("properties").at("guide").at("items").at("oneOf");
  for (const Json& rule : json.at("guide")) {
    const auto described = std::ranges::find_if(
        rules, [&](const Json& one) { return one.at("properties").at("rule").at("const") == rule.at("rule"); });
    REQUIRE(described != rules.end());
    check(*described, rule);
  }
  for (const std::string key : schema.at("$defs").at("rival").at("required"))
    CHECK(json.at("one_choice_away")[0].contains(key));
}

TEST_CASE("explain says beside the step what published runs make of it, and which runs these are") {
  Plan plan = small_plan();
  for (NodeGroup& group : plan.cluster.groups) {
    group.device.backend = BackendKind::cuda;
    group.device.name = "a100-sxm4-80gb";
  }
  plan.training.engine.name = "megatron-2022";
  const auto check = [&] {
    const StepBand band = *step_band(plan);
    for (const std::string& text : {explain(plan, small_reasons()), explain(plan)}) {
      std::string flat = text;
      for (std::size_t at = 0; (at = flat.find("\n  ", at)) != std::string::npos;) flat.replace(at, 3, " ");
      CHECK(flat.find(fmt::format("a step takes 10.0 s ({} to {} by published runs; ",
                                  format_duration(Seconds(10.0 * band.low)),
                                  format_duration(Seconds(10.0 * band.high)))) != std::string::npos);
      CHECK(flat.find("how sure: " + words_of(band)) != std::string::npos);
    }
    Json json = explain_json(
        {.version = "1.2.3", .model = plan.model, .cluster = plan.cluster, .training = plan.training, .defaults = {}},
        plan, small_reasons()).at("error_band");
    CHECK(json.at("low") == band.low);
    CHECK(json.at("high") == band.high);
    CHECK(json.at("words") == words_of(band));
    CHECK(json.at("spans").size() == band.spans.size());
    const Json schema = Json::parse(read_file(PARPLAN_SOURCE_DIR "/docs/schemas/explain.schema.json"))
                            .at("properties").at("error_band").at("oneOf")[0];
    for (const auto& [key, value] : json.items()) CHECK(schema.at("properties").contains(key));
    for (const Json& span : json.at("spans"))
      for (const auto& [key, value] : span.items())
        CHECK(schema.at("properties").at("spans").at("items").at("properties").contains(key));
    for (const std::string key : schema.at("required")) CHECK(json.contains(key));
    for (const std::string key : schema.at("properties").at("spans").at("items").at("required"))
      for (const Json& span : json.at("spans")) CHECK(span.contains(key));
    // All that the words have.
    CHECK(json.at("engine") == plan.training.engine.name);
    CHECK(json.at("device") == "a100-sxm4-80gb");
    CHECK(json.at("devices") == plan.spec.mesh.size());
    for (std::size_t i = 0; i < band.spans.size(); ++i) {
      const std::string size(band.spans[i].size);
      CHECK(json.at("spans")[i].at("size") == (size.empty() ? Json(nullptr) : Json(size)));
    }
    return json;
  };
  CHECK(check().at("spans").size() == 1);
  CHECK(check().at("pairs_engine").is_null());
  plan.training.engine.name = "parplan";
  CHECK(check().at("spans").size() == 2);  // of the device, and of all
  CHECK(check().at("spans")[1].at("device").is_null());
  plan.cluster.calibrated = "kernels 0.9 of their files' rates";
  CHECK(check().at("pairs").get<int>() >= least_pairs);
  CHECK(check().at("pairs_engine").is_null());
  CHECK(check().at("pairs_device") == "a100-sxm4-80gb");
  plan.training.engine.name = "bloom";
  CHECK(check().at("pairs_engine") == "bloom");
  // What decides by the memory has no band.
  plan.search.objective = Objective::memory;
  for (const std::string& text : {explain(plan, small_reasons()), explain(plan)}) {
    CHECK(text.find("how sure: memory is counted as the runtime allocates it") != std::string::npos);
    CHECK(text.find("of 10 of the") == std::string::npos);
  }
}

double undecided_below(const Plan& plan, const Reasons& reasons) {
  return explain_json({.version = "1.2.3",
                       .model = plan.model,
                       .cluster = plan.cluster,
                       .training = plan.training,
                       .defaults = {}},
                      plan, reasons)
      .at("undecided_below")
      .get<double>();
}

TEST_CASE("explain says where products have the rates of loops, beside where kernels' times come from") {
  Plan plan = small_plan();
  plan.training.precision = DataType::bf16;
  DeviceKind& device = plan.cluster.groups.front().device;
  device.rates = {{.active = 1,
                   .matrix_fp32 = FlopsPerSecond(1.0),
                   .matrix_half = FlopsPerSecond(2.0),
                   .vector = FlopsPerSecond(1.0),
                   .memory = BytesPerSecond(1.0)}};
  Reasons reasons = small_reasons();
  // Situations in which its devices are others.
  reasons.guide = {};
  reasons.twice.clear();
  reasons.sensitivity.clear();
  const std::string said =
      "assumed for a class of devices\nproducts in bf16 on box are timed as in benchmark loops, since no "
      "training rate is known: predicted steps are too short\n";
  const auto says = [&] {
    std::string text = explain(plan, reasons);
    // Lines that were folded go on two columns further.
    for (std::size_t at = text.find("\n  "); at != std::string::npos; at = text.find("\n  ", at))
      text.replace(at, 3, " ");
    return text.find(said) != std::string::npos;
  };
  CHECK_FALSE(says());  // cores
  device.backend = BackendKind::cuda;
  CHECK(says());
  const Json json = explain_json(
      {.version = "1.2.3", .model = plan.model, .cluster = plan.cluster, .training = plan.training, .defaults = {}},
      plan, reasons);
  CHECK(json.at("kernels").at("at_rates_of_loops") == Json::array({"box"}));
  device.rates.front().sustained_half = FlopsPerSecond(1.5);
  CHECK_FALSE(says());
}

TEST_CASE("the model cannot tell apart what is near, on either side") {
  Plan plan = small_plan();
  for (NodeGroup& group : plan.cluster.groups) group.device.backend = BackendKind::cuda;
  const double spread = pair_spreads().back().spread;
  plan.alternatives.push_back(plan.alternatives.front());
  const auto of = [&](double bubble) {
    plan.alternatives.front().result.time.bubble = Seconds(bubble);
    const std::string text = explain(plan, small_reasons());
    CHECK(undecided_below(plan, small_reasons()) == spread);
    const std::size_t begin = std::min(text.find("  the runner-up is "), text.find("  the plan is "));
    return text.substr(begin, text.find_first_of(":;", begin) - begin) +
           (text.find("cannot tell") != std::string::npos ? ": close" : ": apart");
  };
  REQUIRE(spread > 0.05);
  REQUIRE(spread < 0.25);
  CHECK(of(3.0) == "  the runner-up is 5.00 % slower: close");
  CHECK(of(2.5) == "  the runner-up is as fast: close");
  CHECK(of(2.0) == "  the runner-up is 5.26 % faster: close");
  // By the objective of a plan that was given, say. It is 10 s to 7.5.
  CHECK(of(0.0) == "  the plan is 33.3 % slower than the runner-up: apart");
  // What is less than the spread off the plan's 10 s may be more than the spread over the other's.
  const auto faster_by = [&](double share) { return of(2.5 - 10.0 * share); };
  const double between = 0.5 * (spread + spread / (1.0 + spread));
  CHECK(faster_by(between) == fmt::format("  the plan is {:.1f} % slower than the runner-up: apart",
                                          100.0 * (1.0 / (1.0 - between) - 1.0)));
  CHECK(faster_by(0.99 * spread / (1.0 + spread)).ends_with(": close"));
  plan.search.objective = Objective::cost;
  CHECK(of(2.5 + 15.0 * spread).ends_with(" % dearer than the plan: apart"));
}

TEST_CASE("which plans can be told apart on unlike devices follows from the devices that any of them uses") {
  const PairSpread& all = pair_spreads().back();
  const auto own = std::ranges::find_if(
      pair_spreads(), [](const PairSpread& one) { return one.engine.empty() && one.device == "a100-sxm4-80gb"; });
  REQUIRE(own != pair_spreads().end());
  REQUIRE(own->spread != all.spread);
  Plan plan = small_plan();
  for (NodeGroup& group : plan.cluster.groups) {
    group.device.backend = BackendKind::cuda;
    group.device.name = "a100-sxm4-80gb";
  }
  // Behind the nodes that the plan uses are others.
  NodeGroup others = plan.cluster.groups.front();
  others.device.name = "other";
  plan.cluster.groups.push_back(others);
  const auto check_with = [&](const PairSpread& pairs) {
    const double between = 0.5 * (own->spread + all.spread), step = plan.prediction.time.total().value;
    for (RankedPlan& one : plan.alternatives) {
      one.result.time = {};
      one.result.time.compute = Seconds(step * (1.0 + between));
    }
    const bool apart = between > pairs.spread;
    CHECK(row(subject_of(plan, 2)).at("told_from_first") == apart);
    const Reasons reasons = small_reasons();
    const std::string table = write_table(plan), text = explain(plan, reasons);
    CHECK(table.find(words_of(pairs)) != std::string::npos);
    CHECK(text.find(words_of(pairs)) != std::string::npos);
    CHECK((table.find("cannot be told apart") == std::string::npos) == apart);
    CHECK((text.find("cannot tell the two apart") == std::string::npos) == apart);
    CHECK(undecided_below(plan, reasons) == pairs.spread);
  };
  check_with(*own);
  RankedPlan elsewhere = plan.alternatives.front();
  elsewhere.on = OtherDevices{.cluster = plan.cluster, .training = plan.training};
  elsewhere.on->cluster.groups = {others};
  plan.alternatives.push_back(elsewhere);
  check_with(all);
}

TEST_CASE("one micro-batch is naive model parallelism, and virtual stages shorten the bubble, in words") {
  Plan plan = small_plan();
  Reasons reasons = small_reasons();
  reasons.guide.bubble->micro_batches = 1;
  CHECK(rules_of_thumb(plan, reasons).find("naive model parallelism") != std::string::npos);
  reasons.guide.bubble->micro_batches = 2;
  const std::string one = rules_of_thumb(plan, reasons);
  CHECK(one.find("naive") == std::string::npos);
  CHECK(one.find("(p - 1) / (m + p - 1)") != std::string::npos);
  plan.spec.virtual_stages = 3;
  const std::string several = rules_of_thumb(plan, reasons);
  CHECK(several.find("v = 3") != std::string::npos);
  CHECK(several.find("(v m + p - 1)") != std::string::npos);
}

TEST_CASE("a bubble is judged by four micro-batches a stage") {
  Reasons reasons = small_reasons();
  reasons.guide.bubble->micro_batches = 8;
  reasons.guide.bubble->closed_form = 1.0 / 9.0;
  reasons.guide.bubble->simulated = 0.125;
  CHECK(explain(small_plan(), reasons).find("waits: enough, at least 4 p = 8 micro-batches\n") != std::string::npos);
  reasons.guide.bubble->simulated = 0.2;
  CHECK(explain(small_plan(), reasons)
            .find("waits: enough, at least 4 p = 8 micro-batches, the rest for other stages' communication\n") !=
        std::string::npos);
}

TEST_CASE(
    "of a long pipeline like neighbours share a row, and the ends are shown with the stage that computes or holds "
    "most") {
  Plan plan = small_plan();
  plan.spec.mesh.degree = {.pp = 40};
  plan.spec.stage_blocks.assign(40, 2);
  Reasons reasons;
  RankResult stage;
  stage.time.compute = Seconds(1.0);
  stage.memory.parameters = Bytes(100);
  reasons.details.ranks.assign(40, stage);
  reasons.details.ranks[20].time.compute = Seconds(2.0);
  for (int i = 0; i < 40; ++i) {
    reasons.details.ranks[i].pipeline_rank = i;
    reasons.details.ranks[i].memory.parameters = Bytes(i == 25 ? 200 : 100 + i);
  }
  reasons.capacities.assign(40, Bytes(1000));
  const std::string text = explain(plan, reasons);
  const std::size_t begin = text.find("each stage's time");
  REQUIRE(begin != std::string::npos);
  CHECK(text.substr(begin, text.find("\n\nthe critical", begin) + 1 - begin) ==
        R"(each stage's time, communication as far as it is waited for:
  stage  layers  compute  waiting
  0           1   1.00 s   9.00 s
  1-19        2   1.00 s   9.00 s
  20          2   2.00 s   8.00 s
  21-38       2   1.00 s   9.00 s
  39          1   1.00 s   9.00 s

each stage's memory:
  stage  parameters   peak  of capacity
  0           100 B  100 B       10.0 %
  1           101 B  101 B       10.1 %
  2           102 B  102 B       10.2 %
  3           103 B  103 B       10.3 %
  ...
  25          200 B  200 B       20.0 %
  ...
  36          136 B  136 B       13.6 %
  37          137 B  137 B       13.7 %
  38          138 B  138 B       13.8 %
  39          139 B  139 B       13.9 %
)");
}

}  // namespace
}  // namespace parplan
