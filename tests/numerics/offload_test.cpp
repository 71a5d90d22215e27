// Updates by the host's processor, on state in its memory, against the same plans without.
#include <doctest/doctest.h>

#include <random>
#include <string>

#include "planner/parallel/techniques.h"
#include "planner/program/lower.h"
#include "planner/program/memory.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {

using namespace testing;

TEST_CASE("random legal plans that offload the optimizer train to the same bits as without") {
  std::mt19937 random(20261126);
  int clipped = 0, tied_apart = 0, pipelines = 0, sharded[4] = {};
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    for (int trial = 0; trial < 14; ++trial) {
      TrainingSpec training = training_of();
      if (trial % 2 == 1) training.clip_norm = 0.5;
      if (trial % 5 == 2) training.optimizer = Optimizer::adam;
      if (trial % 5 == 4) training.optimizer = Optimizer::sgd;
      if (trial % 10 == 4) training.momentum = 0.9;
      LayoutRequest request;
      if (trial % 7 == 3) request[Choice::schedule] = ScheduleKind::zero_bubble_h1;
      ParallelSpec spec = random_spec(graph, training, 1 << trial % 4, request, random);
      if (trial % 3 == 0) spec.tied_gradients = TiedGradients::apart;
      INFO(model << ": " << describe(spec) << ", clip " << training.clip_norm);
      const Outcome without = run_plan(graph, training, spec, 3);
      spec.offload = Offload::optimizer;
      REQUIRE(!illegal(graph, training, spec));
      check_equal(run_plan(graph, training, spec, 3), without);
      clipped += training.clip_norm > 0.0;
      tied_apart += spec.tied_gradients == TiedGradients::apart;
      pipelines += spec.pp() > 1;
      ++sharded[spec.zero_stage];
    }
  }
  CHECK(clipped > 10);
  CHECK(tied_apart > 5);
  CHECK(pipelines > 5);
  for (const int count : sharded) CHECK(count > 1);
}

TEST_CASE("a step copies each rank's gradients to its host once, and its parameters back") {
  const OpGraph graph = graph_of("tiny-gpt2");
  for (int zero = 0; zero <= 3; ++zero)
    for (const double clip_norm : {0.0, 0.5}) {
      TrainingSpec training = training_of();
      training.clip_norm = clip_norm;
      ParallelSpec spec;
      spec.mesh.degree = {.dp = 2, .tp = 2};
      spec.sequence_parallel = true;
      spec.zero_stage = zero;
      spec.micro_batch = 2;
      spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
      spec.offload = Offload::optimizer;
      CAPTURE(zero);
      for (const Program& program : lower_all(job_of(graph, training, spec))) {
        std::int64_t shards = 0, elements = 0;
        for (const Bucket& bucket : program.buckets) {
          shards += bucket.shard_elements;
          elements += bucket.elements;
        }
        CHECK(shards == (zero == 0 ? elements : elements / 2));
        CHECK(program.copied.host == Bytes(4 * shards + (clip_norm > 0.0 ? 4 : 0)));
        CHECK(program.copied.device == Bytes(4 * shards));
        // Two moments, the master copy and a copy of the gradients.
        CHECK(program.memory.host >= Bytes(4 * 4 * shards));
        CHECK(program.memory.host <= Bytes(4 * 4 * shards) + static_cast<std::int64_t>(4 * program.buckets.size() + 1) *
                                                                 Bytes(buffer_alignment));
        CHECK(program.memory.optimizer == Bytes(0));
      }
    }
}

}  // namespace parplan
