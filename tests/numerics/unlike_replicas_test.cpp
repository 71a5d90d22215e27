// Replicas with unlike numbers of micro-batches: they train as one rank does, each sample once, and
// keep what their Programs promise.
#include <doctest/doctest.h>

#include <random>
#include <utility>
#include <vector>

#include "planner/parallel/techniques.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/program/lower.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {

using namespace testing;

namespace {

// At least one each, not all alike; their sum is `micro_batches`.
std::vector<int> random_shares(int replicas, int micro_batches, std::mt19937& random) {
  for (;;) {
    std::vector<int> shares(static_cast<std::size_t>(replicas), 1);
    for (int left = micro_batches - replicas; left > 0; --left) ++shares[random() % shares.size()];
    for (const int share : shares)
      if (share != shares.front()) return shares;
  }
}

ParallelSpec of_replicas(const OpGraph& graph, std::vector<int> micro_batches) {
  ParallelSpec spec;
  spec.mesh.degree = {.dp = static_cast<int>(micro_batches.size())};
  spec.replica_micro_batches = std::move(micro_batches);
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  return spec;
}

}  // namespace

TEST_CASE("random plans with unlike replicas train as the one-rank reference does") {
  std::mt19937 random(20261126);
  int pipelines = 0, tensor = 0, sharded = 0, interleaved = 0, odd = 0;
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    for (int trial = 0; trial < 12; ++trial) {
      TrainingSpec training = training_of();
      if (trial % 2 == 1) training.clip_norm = 0.5;
      const int dp = 2 + trial % 3;
      const bool whole_groups = trial % 6 == 5;
      std::vector<int> shares =
          random_shares(dp, static_cast<int>(global_batch) / (trial % 4 == 0 && dp == 2 ? 2 : 1), random);
      if (whole_groups) shares = {4, 2, 2};
      LayoutRequest request;
      request[Choice::replica_micro_batches] = shares;
      if (trial % 4 == 1) request[Choice::schedule] = ScheduleKind::zero_bubble_h1;
      if (whole_groups) {
        request[Choice::schedule] = ScheduleKind::interleaved;
        request[Choice::pp] = 2;
      }
      const int replica_ranks = whole_groups ? 2 : 1 + trial / 3 % 2;
      ParallelSpec spec =
          random_spec(graph, training, static_cast<int>(shares.size()) * replica_ranks, request, random);
      if (trial % 3 == 0) spec.input_slots = InputSlots::one_more;
      INFO(model << ": " << describe(spec) << ", clip " << training.clip_norm << ", " << layout_text(spec));
      REQUIRE(spec.replica_micro_batches == shares);
      check_close(run_plan(graph, training, spec), run_reference(graph, training, spec.micro_batch));
      pipelines += spec.pp() > 1;
      tensor += spec.tp() > 1;
      sharded += spec.zero_stage == 1;
      interleaved += spec.schedule == ScheduleKind::interleaved && spec.pp() > 1;
      odd += spec.dp() == 3;
    }
  }
  CHECK(pipelines > 10);
  CHECK(tensor > 3);
  CHECK(sharded > 10);
  CHECK(interleaved > 2);
  CHECK(odd > 10);
}

TEST_CASE("replicas are unlike where the ranks that shard are alike") {
  for (const std::string model : {"tiny-gpt2", "tiny-llama"})
    for (const int zero_stage : {2, 3}) {
      const OpGraph graph = graph_of(model);
      const TrainingSpec training = training_of();
      ParallelSpec spec = of_replicas(graph, {3, 3, 1, 1});
      spec.zero_stage = zero_stage;
      spec.mesh.dp_shard = 2;
      INFO(model << ": " << describe(spec));
      REQUIRE(illegal(graph, training, spec).value_or("legal") == "legal");
      check_close(run_plan(graph, training, spec), run_reference(graph, training, 1));
    }
}

TEST_CASE("a pipeline of unlike replicas equals them without a pipeline to the bit") {
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    const TrainingSpec training = training_of();
    ParallelSpec flat = of_replicas(graph, {5, 3});
    flat.tied_gradients = TiedGradients::apart;
    ParallelSpec spec = flat;
    spec.mesh.degree.pp = 2;
    spec.stage_blocks = {1, static_cast<int>(graph.blocks.size()) - 1};
    for (const ScheduleKind schedule : {ScheduleKind::gpipe, ScheduleKind::one_f_one_b, ScheduleKind::zero_bubble_h1}) {
      spec.schedule = schedule;
      INFO(model << ": " << describe(spec));
      check_equal(run_plan(graph, training, spec, 3), run_plan(graph, training, flat, 3));
    }
  }
}

TEST_CASE("each replica calls its own micro-batches, reduces once, and holds as many as it has in flight") {
  const OpGraph graph = graph_of("tiny-gpt2");
  const TrainingSpec training = training_of();
  ParallelSpec spec = of_replicas(graph, {6, 2});
  spec.mesh.degree.pp = 2;
  spec.schedule = ScheduleKind::gpipe;
  spec.stage_blocks = {1, static_cast<int>(graph.blocks.size()) - 1};
  const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
  Bytes sent;
  for (const Program& program : programs) {
    CAPTURE(program.rank);
    int forwards = 0;
    for (const Task& task : program.tasks) forwards += task.action && task.action->phase == Phase::forward;
    CHECK(forwards == spec.replica_micro_batches[static_cast<std::size_t>(program.replica)]);
    if (program.pipeline_rank == 0) CHECK((sent == Bytes(0) || sent == program.communication.dp));
    if (program.pipeline_rank == 0) sent = program.communication.dp;
  }
  // GPipe holds all micro-batches at once: six, or two.
  const auto held = [&](int replica) {
    for (const Program& program : programs)
      if (program.replica == replica && program.pipeline_rank == 1) return program.memory.activations;
    return Bytes(0);
  };
  CHECK(held(0) > 2 * held(1));
  ParallelSpec alike = spec;
  alike.replica_micro_batches.clear();
  CHECK(lower_all(job_of(graph, training, alike)).front().communication.dp == sent);
}

}  // namespace parplan
