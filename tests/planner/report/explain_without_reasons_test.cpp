#include "planner/report/explain.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "planner/plan/reasons.h"
#include "planner/report/explain_words.h"
#include "planner/report/plan_row.h"
#include "planner/report/plan_table.h"
#include "planner/report/table.h"
#include "tests/planner/report/small_plan.h"

namespace parplan {
namespace {

using testing::small_plan;

TEST_CASE("explain says where time and memory go, what the runner-up loses on and what binds") {
  const Plan plan = small_plan();
  CHECK(explain(plan) == "plan " + plan_id(plan.model, plan.training, plan.spec) + ": small on 4 of 4 x box (four)\n" +
                             R"(layout: dp2 tp1 pp2 zero1 mb1 1f1b pp>dp; 2 micro-batches a step; layers per stage 2,1

a step takes 10.0 s (2 tokens/s, 50.0 FLOP/s a device):
  compute                      6.00 s  60.0 %
  data-parallel communication  1.00 s  10.0 %
  transfers between stages     500 ms   5.0 %
  bubble                       2.00 s  20.0 %
  optimizer                    500 ms   5.0 %

the worst rank's memory peaks at 640 B, 64.0 % of 1000 B:
  parameters                     200 B  31.2 %
  gradients                      200 B  31.2 %
  optimizer state                100 B  15.6 %
  activations                     80 B  12.5 %
  buffers                         40 B   6.2 %
  libraries (outside the arena)   20 B   3.1 %

runner-up: dp2 tp1 pp2 zero1 mb2 1f1b pp>dp, 11.5 s (15.00 % slower)
  against the plan: bubble +2.00 s, data-parallel communication -500 ms
  it needs 720 B of memory, the plan 640 B
how sure: no measured steps on such devices are published, to hold this against; `parplan run` measures a plan

binding constraint: compute: 65.0 % of the step computes; faster or more devices would help first
search: 12 candidates: 3 do not fit in memory, 5 cannot be faster by their lower bound, 4 simulated; certified: the fastest of this space
  under this cost model
)");
}

TEST_CASE("the counts of a search add up, with what was not simulated where it ended before") {
  const SearchCounts ended{.candidates = 12,
                           .infeasible_memory = 3,
                           .pruned_by_bound = 5,
                           .simulated = 1,
                           .seconds = 0.25,
                           .certified = false,
                           .gap = 0.074};
  CHECK(explain_search(ended) ==
        "12 candidates: 3 do not fit in memory, 5 cannot be faster by their lower bound, 1 simulated, 3 not simulated; "
        "gap: at most 7.4 % faster may be left");
}

TEST_CASE("the binding constraint is what could be gained most from") {
  Plan plan = small_plan();
  CHECK(binding_constraint(plan) == Constraint::compute);  // 3.25 s of 10
  // A full device says nothing if neither recompute nor sharding costs anything.
  plan.prediction.memory.activations = Bytes(340);  // 900 of 1000
  CHECK(binding_constraint(plan) == Constraint::compute);
  plan.prediction.time.bubble = Seconds(7.0);
  // Two micro-batches on two stages: a third of 15 s is idle even with equal stages, and 2 s wait
  // for what the other one communicates.
  CHECK(waiting(plan).filling.value == doctest::Approx(5.0));
  CHECK(waiting(plan).others.value == doctest::Approx(2.0));
  CHECK(binding_constraint(plan) == Constraint::compute);  // 6.5 / 2 s
  CHECK(explain(plan).find("binding constraint: compute: 43.3 % of the step computes; faster or more devices would "
                           "help first\n") != std::string::npos);  // 6.5 of 15
  plan.prediction.time.exposed.tp += Seconds(1.0);
  plan.prediction.time.bubble = Seconds(14.0);
  // In 23 s, 7.67 fill the pipeline, 6.33 wait for the other stage beside 2.5 of one's own.
  CHECK(binding_constraint(plan) == Constraint::communication);
  CHECK(explain(plan).find("binding constraint: communication: 10.9 % of the step waits for it, most for") !=
        std::string::npos);
  CHECK(explain(plan).find("27.5 % for that") != std::string::npos);
  plan.prediction.time.exposed.tp -= Seconds(1.0);
  plan.prediction.time.bubble = Seconds(7.0);
  plan.training.global_batch = 2;                         // one micro-batch: up to half of the step
  CHECK(binding_constraint(plan) == Constraint::bubble);  // 3.5 s
  CHECK(explain(plan).find("binding constraint: bubble: 46.7 % of the step waits for other stages; more micro-batches "
                           "(a larger batch) would help first\n") != std::string::npos);  // 7 of 15
  plan.prediction.time.bubble = Seconds(10.0);                                            // of 18 s: 9 and 1
  CHECK(explain(plan).find("binding constraint: bubble: 50.0 % of the step waits for other stages, 5.6 % more for "
                           "their communication; more micro-batches") != std::string::npos);
  plan.prediction.time.bubble = Seconds(7.0);
  plan.prediction.time.exposed.tp = Seconds(8.0);
  CHECK(binding_constraint(plan) == Constraint::communication);  // 4.75 s
  CHECK(
      explain(plan).find(
          "binding constraint: communication: 41.3 % of the step waits for it, most for tensor-parallel communication; "
          "faster links or a larger batch\n  would help first\n") != std::string::npos);  // 9.5 of 23
  plan.prediction.time.recompute = Seconds(7.0);                                          // computing is 13.5 then
  CHECK(binding_constraint(plan) == Constraint::memory);
  CHECK(explain(plan).find("binding constraint: memory: 23.3 % of the step recomputes activations that there is no "
                           "room to keep, the peak is 90.0 % of a "
                           "device's 1000\n  B; more memory would help first\n") != std::string::npos);  // 7 of 30
  plan.search.objective = Objective::memory;
  CHECK(binding_constraint(plan) == Constraint::compute);
  plan.search.objective = Objective::time;
  plan.prediction.time.recompute = Seconds(0.0);
  plan.prediction.time.exposed.dp = Seconds(4.0);
  plan.prediction.time.exposed.tp = Seconds(1.0);
  plan.prediction.time.bubble = Seconds(1.0);
  CHECK(binding_constraint(plan) == Constraint::compute);
  plan.spec.zero_stage = 3;  // and the device is full
  CHECK(binding_constraint(plan) == Constraint::memory);
  plan.prediction.memory.activations = Bytes(80);
  CHECK(binding_constraint(plan) == Constraint::compute);
}

TEST_CASE("the host's rates bind a plan that waits for its copies, those of its drives where it uses them") {
  Plan plan = small_plan();
  plan.cluster.groups.front().device.backend = BackendKind::cuda;
  plan.spec.offload = {.optimizer = Home::host};
  plan.prediction.time.offload = Seconds(8.0);
  // Twice the memory would save all of these, if it holds what is not on the device.
  plan.prediction.memory.host = Bytes(1360);  // beside 640 of 1000
  CHECK(binding_constraint(plan) == Constraint::memory);
  plan.prediction.memory.host = Bytes(1361);
  CHECK(binding_constraint(plan) == Constraint::host);
  // A plan of the least memory is not meant to be fast.
  plan.prediction.memory.host = Bytes(100);
  plan.search.objective = Objective::memory;
  CHECK(binding_constraint(plan) == Constraint::host);  // 4.25 s, against 3 of what computes
  CHECK(explain(plan).find("binding constraint: host: 44.4 % of the step waits for copies to and from host memory, "
                           "2.8 % updates parameters on the host; faster links to\n  the host, or faster memory there "
                           "would help first\n") != std::string::npos);  // 8 and 0.5 s of 18
  plan.spec.offload.optimizer = Home::nvme;
  CHECK(binding_constraint(plan) == Constraint::nvme);
  CHECK(explain(plan).find("binding constraint: nvme: 44.4 % of the step waits for copies to and from host memory and "
                           "NVMe, 2.8 % updates parameters on the host; faster\n  drives would help first\n") !=
        std::string::npos);
  plan.prediction.time.offload = Seconds(5.8);  // 2.9 s
  CHECK(binding_constraint(plan) == Constraint::compute);
}

TEST_CASE("what the host updates is the host's work and not the devices'") {
  Plan plan = small_plan();
  plan.cluster.groups.front().device.backend = BackendKind::cuda;
  plan.prediction.time.optimizer = Seconds(14.0);  // beside 9.5 s, 6 of which compute
  CHECK(binding_constraint(plan) == Constraint::compute);
  plan.spec.offload = {.optimizer = Home::host};
  // A device has room for all: nothing is elsewhere for want of memory.
  plan.prediction.memory.host = Bytes(360);  // beside 640 of 1000
  CHECK(binding_constraint(plan) == Constraint::host);
  CHECK(explain(plan).find("binding constraint: host: 0.0 % of the step waits for copies to and from host memory, "
                           "59.6 % updates parameters on the host;") != std::string::npos);  // 14 of 23.5
  plan.cluster.memory_headroom = 0.1;
  CHECK(binding_constraint(plan) == Constraint::memory);
  plan.cluster.memory_headroom = 0.0;
  plan.prediction.memory.host = Bytes(361);
  CHECK(binding_constraint(plan) == Constraint::memory);
  CHECK(explain(plan).find("binding constraint: memory: 59.6 % updates parameters on the host, ") !=
        std::string::npos);
  plan.search.objective = Objective::memory;  // not meant to be fast
  CHECK(binding_constraint(plan) == Constraint::host);
  plan.spec.offload.optimizer = Home::nvme;  // the host updates what the drives hold
  CHECK(binding_constraint(plan) == Constraint::host);
  plan.prediction.time.optimizer = Seconds(4.0);  // of 13.5
  CHECK(explain(plan).find("binding constraint: compute: 44.4 % of the step computes;") != std::string::npos);
  // Faster devices gain no more than half of their own 6 s, and a faster host 3.5 s.
  plan.prediction.time.optimizer = Seconds(7.0);
  const RankedPlan now{.spec = plan.spec, .result = plan.prediction};
  std::vector<Variation> twice;
  for (const auto& [resource, gain] : {std::pair(Resource::compute, 6.0), std::pair(Resource::host, 3.5)}) {
    twice.push_back({.resource = resource,
                     .factor = 2.0,
                     .global_batch = 4,
                     .plan = {.plan = now, .capacity = Bytes(1000)},
                     .best = {}});
    twice.back().plan.plan.result.time.compute -= Seconds(gain);
  }
  CHECK(binding_constraint(plan, twice, now) == Constraint::host);
  // Cores are their own host.
  plan.cluster.groups.front().device.backend = BackendKind::cpu;
  CHECK(binding_constraint(plan, twice, now) == Constraint::compute);
}

TEST_CASE("costs are compared in one unit, of the devices that each plan uses") {
  Plan plan = small_plan();
  plan.search.objective = Objective::cost;
  NodeGroup& own = plan.cluster.groups.front();
  NodeGroup other = own;
  other.price = Price{.per_device_hour = 36.0, .currency = "USD"};
  RankedPlan second{.spec = plan.spec, .result = plan.prediction};
  second.result.time.compute += Seconds(5.0);  // 15 s to 10
  second.on = OtherDevices{.cluster = plan.cluster, .training = plan.training};
  second.on->cluster.groups = {other};
  const auto more = [&] { return excess(plan, cluster_of(plan, second), second.spec, second.result); };
  const auto words = [&] {
    return measured_against(plan, second, {.spec = plan.spec, .result = plan.prediction}, 1);
  };
  CHECK(more() == doctest::Approx(0.5));  // device-seconds: the plan's devices have no price
  CHECK(words().ends_with("0.600 USD (50.0 % dearer)"));
  own.price = Price{.per_device_hour = 18.0, .currency = "USD"};
  CHECK(more() == doctest::Approx(2.0));
  CHECK(words().ends_with("0.600 USD (200.0 % dearer)"));
  // A group without a price changes nothing where neither plan uses it.
  NodeGroup unpriced = own;
  unpriced.price.reset();
  plan.cluster.groups.push_back(unpriced);
  CHECK(more() == doctest::Approx(2.0));
  plan.cluster.groups.front().price->currency = "EUR";
  CHECK(more() == doctest::Approx(0.5));
  // Half of the devices.
  second.spec.mesh.degree = {.dp = 2};
  CHECK(more() == doctest::Approx(-0.25));
}

TEST_CASE("memory binds a plan that does not fit") {
  Plan plan = small_plan();
  plan.prediction.memory.activations = Bytes(940);  // 1500 of 1000
  CHECK(binding_constraint(plan) == Constraint::memory);
  CHECK(binding_constraint(plan, {}, {.spec = plan.spec, .result = plan.prediction}) == Constraint::memory);
  CHECK(explain(plan).find("binding constraint: memory: the plan does not fit, the peak is 150.0 % of a device's 1000 "
                           "B; more memory would help first\n") != std::string::npos);
}

TEST_CASE("where the host lacks room, memory binds a plan, and the host is named") {
  Plan plan = small_plan();
  NodeGroup& group = plan.cluster.groups.front();
  plan.prediction.memory.host = Bytes(700);
  group.host.emplace().memory = Bytes(100 * std::min(plan.spec.mesh.size(), group.devices_per_machine()));
  CHECK(binding_constraint(plan) == Constraint::memory);
  CHECK(explain(plan).find("binding constraint: memory: the plan does not fit: it needs 700 B of host memory on its "
                           "worst rank, and its share of the host has 100 B, ") != std::string::npos);
}

TEST_CASE("with variations to twice of everything the binding constraint is what gains most") {
  // 6.5 s of 10 compute, 2 s are bubble, and communication is awaited for 1.5 s.
  const Plan plan = small_plan();
  const RankedPlan now{.spec = plan.spec, .result = plan.prediction};
  const auto twice = [&](Resource resource, double own, double best) {
    Variation variation{.resource = resource,
                        .factor = 2.0,
                        .global_batch = resource == Resource::global_batch ? 8 : 4,
                        .plan = {.plan = now, .capacity = Bytes(1000)},
                        .best = now,
                        .changes = best != own};
    variation.plan.plan.result.time = {};
    variation.plan.plan.result.time.compute = Seconds(own);
    variation.best->result.time = {};
    variation.best->result.time.compute = Seconds(best);
    return variation;
  };
  struct Case {
    double compute, inside, network, links, batch, memory;  // steps; for memory that of the best plan
    Constraint binding;
  };
  for (const Case& one :
       {Case{6.7, 9.5, 9.8, 9.3, 18.0, 9.97, Constraint::compute},
        Case{5.0, 9.5, 9.8, 9.3, 18.0, 6.8, Constraint::compute},  // at most 3.25 s count, against 3.2 s
        Case{5.0, 9.5, 9.8, 9.3, 18.0, 6.7, Constraint::memory},   // 3.3 s
        Case{5.0, 10.0, 10.0, 6.6, 18.0, 9.97,
             Constraint::communication},  // neither kind of links alone gains anything, both 3.4 s
        Case{9.5, 9.5, 9.8, 9.3, 13.0, 9.97, Constraint::bubble}}) {  // at most 1 s counts
    const std::vector<Variation> all = {
        twice(Resource::compute, one.compute, one.compute),  twice(Resource::node_links, one.inside, one.inside),
        twice(Resource::network, one.network, one.network),  twice(Resource::links, one.links, one.links),
        twice(Resource::global_batch, one.batch, one.batch), twice(Resource::memory, 10.0, one.memory)};
    CHECK(std::string(name(binding_constraint(plan, all, now))) == name(one.binding));
    // Whatever gains more than these does, whether or not it is a part of the step.
    for (const auto& [resource, constraint] :
         {std::pair(Resource::host, Constraint::host), std::pair(Resource::nvme, Constraint::nvme)}) {
      std::vector<Variation> more = all;
      more.push_back(twice(resource, 9.9, 9.9));
      CHECK(std::string(name(binding_constraint(plan, more, now))) == name(one.binding));
      more.back() = twice(resource, 6.0, 6.0);
      CHECK(std::string(name(binding_constraint(plan, more, now))) == name(constraint));
      Reasons reasons;
      reasons.twice = more;
      reasons.binding = constraint;
      REQUIRE(relaxed(reasons) != nullptr);
      CHECK(relaxed(reasons)->resource == resource);
    }
  }
}

TEST_CASE("with another objective it is said what it has least of") {
  Plan plan = small_plan();
  plan.cluster.groups.front().price = Price{.per_device_hour = 90.0, .currency = "EUR"};
  plan.search.objective = Objective::cost;
  RankedPlan& second = plan.alternatives.front();
  second.spec.mesh.degree = {.dp = 2};  // half of the devices
  second.result.time.bubble = Seconds(4.5);
  CHECK(explain_search(plan.search)
            .ends_with("5 cannot be better by their lower bound, 4 simulated; certified: the cheapest of this space "
                       "under this cost model"));
  // 4 devices for 10 s, 2 for 12 s, at 0.025 EUR a second.
  CHECK(explain_briefly(plan).find(
            "runner-up: dp2 tp1 pp1 zero1 mb2, 12.0 s (20.00 % slower), 0.600 EUR (40.00 % cheaper)\n") !=
        std::string::npos);
  CHECK(write_table(plan).find("exposed comm  cost a step\n") != std::string::npos);
  CHECK(write_table(plan).find("15.0 %     1.00 EUR\n") != std::string::npos);
  plan.cluster.groups.front().price.reset();
  CHECK(write_table(plan).find("15.0 %  40.0 device-seconds\n") != std::string::npos);
  plan.search.objective = Objective::memory;
  CHECK(
      explain_search(plan.search).ends_with("certified: the one of least memory of this space under this cost model"));
  CHECK(explain_briefly(plan).find("12.0 s (20.00 % slower), 720 B (12.50 % more memory)\n") != std::string::npos);
}

TEST_CASE("a plan without alternatives says why it has none") {
  Plan plan = small_plan();
  plan.alternatives.clear();
  CHECK(explain_briefly(plan).ends_with(
      "runner-up: the plan keeps no other; `parplan explain` finds the next of all layouts\n"));
  plan.search.infeasible_memory = 11;  // of 12
  CHECK(explain_briefly(plan).ends_with("runner-up: none; no other layout of the space fits\n"));
  plan.search = {};
  CHECK(explain_briefly(plan).ends_with("runner-up: none; no other layout was looked at\n"));
}

TEST_CASE("a search says how sure it is") {
  SearchCounts counts = small_plan().search;
  CHECK(explain_search(counts).ends_with("certified: the fastest of this space under this cost model"));
  counts.cut_gap = 0.25;
  CHECK(
      explain_search(counts).ends_with("certified: the fastest of this space under this cost model; with stage cuts "
                                       "that were not tried, at most 25.0 % faster may be left"));
  counts.cut_gap.reset();
  counts.certified = false;
  counts.gap = 0.125;
  CHECK(explain_search(counts).ends_with("gap: at most 12.5 % faster may be left"));
  counts.cut_gap = 0.25;
  CHECK(
      explain_search(counts).ends_with("gap: at most 12.5 % faster may be left; with stage cuts that were not tried, "
                                       "at most 25.0 % faster may be left"));
  CHECK(explain_search({}) == "no search was made: the layout was given");
  counts.space = "every dp";
  counts.left_out = {{.what = "rings", .gap = std::nullopt},
                     {.what = "slots", .gap = 0.0004},
                     {.what = "hosts", .gap = 0.125, .options = {"--on hosts", "--on ports"}}};
  CHECK(explain_space(counts) ==
        "space: every dp\nleft out: rings (not bounded), slots (not faster), "
        "hosts (at most 12.5 % faster: --on hosts or --on ports)\n");
  counts.objective = Objective::cost;
  CHECK(explain_space(counts).ends_with(
      "slots (not cheaper), hosts (at most 11.1 % cheaper: --on hosts or --on ports)\n"));
}

}  // namespace
}  // namespace parplan
