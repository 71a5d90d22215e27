// Replicas with unlike numbers of micro-batches do no more than these take.
#include <doctest/doctest.h>

#include <utility>
#include <vector>

#include "planner/program/lower.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {

using namespace testing;

namespace {

ParallelSpec of_replicas(const OpGraph& graph, std::vector<int> micro_batches) {
  ParallelSpec spec;
  spec.mesh.degree = {.dp = static_cast<int>(micro_batches.size())};
  spec.replica_micro_batches = std::move(micro_batches);
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  return spec;
}

}  // namespace

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
