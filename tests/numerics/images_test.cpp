// Plans that a classifier of images cannot have.
#include <doctest/doctest.h>

#include "planner/parallel/techniques.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {

using namespace testing;

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
