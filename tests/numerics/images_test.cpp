// A classifier of images under every kind of plan.
#include <doctest/doctest.h>

#include <random>

#include "planner/parallel/techniques.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {

using namespace testing;

TEST_CASE("random legal plans of a classifier of images train as the one-rank reference does") {
  std::mt19937 random(20261126);
  const OpGraph graph = graph_of("tiny-vit");
  References references(graph, 3);
  for (int trial = 0; trial < 16; ++trial) {
    TrainingSpec training = training_of();
    if (trial % 4 == 3) training.clip_norm = 0.5;
    LayoutRequest request;
    if (trial % 5 == 2) request[Choice::schedule] = ScheduleKind::zero_bubble_h1;
    ParallelSpec spec = random_spec(graph, training, 1 << trial % 4, request, random);
    if (trial == 9) {
      spec = {};
      spec.mesh.degree.dp = 2;
      spec.dp_method = DataMethod::master;
      spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    }
    INFO(describe(spec));
    CHECK(spec.cp() == 1);
    CHECK(!spec.sequence_parallel);
    check_close(run_plan(graph, training, spec, 3), references.of(training, spec.micro_batch));
  }
}

TEST_CASE("a classifier of images in stages and in shards equals one rank to the bit") {
  std::mt19937 random(2);
  const OpGraph graph = graph_of("tiny-vit");
  const TrainingSpec training = training_of();
  for (const int stages : {2, 4}) {
    LayoutRequest request;
    request[Choice::dp] = request[Choice::tp] = 1;
    request[Choice::pp] = stages;
    const ParallelSpec spec = random_spec(graph, training, stages, request, random);
    INFO(describe(spec));
    check_equal(run_plan(graph, training, spec, 3), run_reference(graph, training, spec.micro_batch, 3));
  }
  ParallelSpec spec;
  spec.mesh.degree.dp = 2;
  spec.micro_batch = 4;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  const Outcome plain = run_plan(graph, training, spec, 3);
  spec.zero_stage = 3;
  spec.offload = Offload{.optimizer = Home::host, .parameters = Home::host};
  check_equal(run_plan(graph, training, spec, 3), plain);
}

TEST_CASE("what would cut the rows of an image is refused") {
  const OpGraph graph = graph_of("tiny-vit");
  const TrainingSpec training = training_of();
  ParallelSpec spec;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  spec.mesh.degree.cp = 2;
  CHECK(illegal(graph, training, spec));
  spec.mesh.degree = {.tp = 2};
  CHECK(!illegal(graph, training, spec));
  spec.sequence_parallel = true;
  CHECK(illegal(graph, training, spec));
}

}  // namespace parplan
