// The details of each rank of a simulated step, and its critical path.
#include <doctest/doctest.h>

#include <cmath>
#include <random>

#include "planner/cluster/find_cluster.h"
#include "planner/simulator/simulate.h"
#include "tests/planner/program/random_plans.h"
#include "tests/planner/simulator/hand_built.h"
#include "tests/planner/simulator/pipelines.h"

namespace parplan {
namespace {

StepDetails details_of(const std::vector<Program>& programs, const CostModel& model) {
  const std::vector<CostModel> models(programs.size(), model);
  StepDetails details;
  simulate(programs, models, nullptr, &details);
  return details;
}

CriticalWork work(int rank, const char* segment, Label label, std::int64_t runs, double seconds) {
  return {.rank = rank, .segment = segment, .label = label, .runs = runs, .time = Seconds(seconds)};
}

Seconds sum(const std::vector<CriticalWork>& path) {
  Seconds all;
  for (const CriticalWork& one : path) all += one.time;
  return all;
}

TEST_CASE(
    "the critical path goes through a communication that hides behind computation, if what comes next awaits it") {
  HandBuilt built;
  // 0 to 3, in transfer from 3 to 7, a kernel beside it from 3 to 6, the last one from 7 to 9.
  // Computation hides all but one second, but the path back from the end is 2, 4 and 3 seconds.
  built.call(built.segment(
      "layer.forward", Stream::compute,
      {after(kernel(3), {}, 0), after(all_reduce(4, all_along(Axis::tp), Stream::tp, Label::tp), {0}, 1),
       kernel(3), after(kernel(2), {1})}));
  const StepDetails details = details_of({built.program}, concurrent());
  CHECK(details.ranks.front().time.compute == Seconds(8));
  CHECK(details.ranks.front().time.exposed.tp == Seconds(1));
  CHECK(details.critical_path ==
        std::vector{work(0, "layer.forward", Label::compute, 1, 5), work(0, "layer.forward", Label::tp, 1, 4)});
}

TEST_CASE("the critical path changes ranks where a transfer made the partner wait") {
  const std::vector<Program> programs =
      pipeline_ranks(one_stage_a_rank({gpipe(0, 2), gpipe(1, 2)}), {{1, 2}, {1, 2}}, 1);
  // GPipe; forward 1 s, backward 2 s, transfer 1 s:
  //   stage 0   F0 0-1  F1 1-2                    B0 7-9  B1 9-11
  //   transfer  1-2     2-3             6-7  8-9
  //   stage 1           F0 2-3  F1 3-4  B0 4-6  B1 6-8
  // Back from 11: B1 and B0 on stage 0, which awaited the transfer of 6 to 7, which awaited B0 on
  // stage 1; that awaited F1 and F0 of its stage; these awaited the transfer of 1 to 2, and that F0
  // of stage 0.
  const StepDetails details = details_of(programs, concurrent());
  CHECK(details.critical_path ==
        std::vector{work(0, "receive backward", Label::pp, 1, 1), work(0, "forward", Label::compute, 1, 1),
                    work(0, "backward", Label::compute, 2, 4), work(1, "receive forward", Label::pp, 1, 1),
                    work(1, "forward", Label::compute, 2, 2), work(1, "backward", Label::compute, 1, 2)});
  CHECK(sum(details.critical_path) == Seconds(11));
  REQUIRE(details.ranks.size() == 2);
  CHECK(details.ranks[0].time.total() == Seconds(11));
  // Its last work is the second gradient's transfer, which ends at 9.
  CHECK(details.ranks[1].time.total() == Seconds(9));
  CHECK(details.ranks[1].time.compute == Seconds(6));
}

TEST_CASE("on every plan the critical path sums to the step, and no rank takes longer than it") {
  std::mt19937 random(4);
  const std::string source = PARPLAN_SOURCE_DIR;
  for (const char* model : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = graph_of(model);
    for (const std::string& name : {source + "/tests/data/clusters/cpu-8.yaml", std::string("dgx-a100")}) {
      ClusterOptions options;
      if (name == "dgx-a100") options.devices = 16;
      const Cluster cluster = find_cluster(name, {source + "/configs/devices", source + "/configs/clusters"}, options);
      TrainingSpec training;
      training.global_batch = 16;
      training.sequence_length = 16;
      training.clip_norm = 1.0;
      training.precision = cluster.backend() == BackendKind::cpu ? DataType::fp32 : DataType::bf16;
      for (int trial = 0; trial < 60; ++trial) {
        const ParallelSpec spec = or_with_master(random_spec(graph, training, 8, random), random);
        INFO(model << " on " << cluster.name << ": " << describe(spec));
        const std::vector<Program> programs = lower_representatives(job_of(graph, training, spec, cluster.backend()));
        std::vector<CostModel> models;
        for (int stage = 0; stage < spec.pp(); ++stage) models.push_back(cost_model(cluster, spec.mesh, stage));
        StepDetails details;
        const StepResult result = simulate(programs, models, nullptr, &details);
        // Where computations in a row are one, they are slowed together: parts of their time may be
        // others.
        const StepResult in_rows = simulate(programs, models);
        CHECK(result.memory == in_rows.memory);
        CHECK(result.memory_stage == in_rows.memory_stage);
        CHECK(result.communication == in_rows.communication);
        CHECK(result.time.total().value == doctest::Approx(in_rows.time.total().value).epsilon(1e-12));
        CHECK(std::abs((result.time.compute - in_rows.time.compute).value) <= 1e-3 * result.time.total().value);
        if (cluster.backend() == BackendKind::cpu) CHECK(result == in_rows);
        const double step = result.time.total().value;
        CHECK(sum(details.critical_path).value == doctest::Approx(step).epsilon(1e-9));
        REQUIRE(static_cast<int>(details.ranks.size()) == spec.pp());
        double longest = 0.0;
        for (std::size_t s = 0; s < details.ranks.size(); ++s) {
          longest = std::max(longest, details.ranks[s].time.total().value);
          CHECK(details.ranks[s].memory == programs[s].memory);
        }
        CHECK(longest == doctest::Approx(step).epsilon(1e-9));
        CHECK(details.ranks[result.memory_stage].memory == result.memory);
      }
    }
  }
}

}  // namespace
}  // namespace parplan
