#include <doctest/doctest.h>

#include <string>

#include "planner/graph/engine_graph.h"
#include "planner/parallel/techniques.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {
namespace {

using namespace testing;

TEST_CASE("a padded vocabulary trains as the one-rank reference does, which pads none") {
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    // 61 and 64 rows become 96 on one rank, and twice 48 on two; or the first of two ranks has all
    // of them, and the other nothing but padding.
    for (const int multiple : {48, 64}) {
      const OpGraph padded = as_run_by(Engine{.vocabulary_multiple = multiple}, graph);
      TrainingSpec training = training_of();
      training.clip_norm = 0.5;
      for (const char* layout : {"one", "tensor", "sharded", "stages"}) {
        ParallelSpec spec;
        spec.micro_batch = 2;
        const int blocks = static_cast<int>(graph.blocks.size());
        spec.stage_blocks = {blocks};
        const std::string chosen = layout;
        if (chosen == "tensor") spec.mesh.degree.tp = 2;
        if (chosen == "sharded") {
          spec.mesh.degree.dp = 2;
          spec.zero_stage = 3;
        }
        if (chosen == "stages") {
          spec.mesh.degree.pp = 2;
          spec.stage_blocks = {blocks - blocks / 2, blocks / 2};
        }
        if (illegal(padded, training, spec)) continue;
        INFO(model << ", multiples of " << multiple << ": " << describe(spec));
        check_close(run_plan(padded, training, spec), run_reference(graph, training, spec.micro_batch));
      }
    }
  }
}

}  // namespace
}  // namespace parplan
