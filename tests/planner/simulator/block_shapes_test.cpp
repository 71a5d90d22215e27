#include "planner/simulator/block_shapes.h"

#include <random>

#include <doctest/doctest.h>

#include "planner/program/job.h"
#include "tests/planner/program/random_plans.h"

namespace parplan {

// Recompute changes nothing of the first and the last block, which are taken from known shapes.
TEST_CASE("shapes that follow from those with another recompute are those that are lowered alone") {
  std::mt19937 random(47);
  for (const char* model : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = graph_of(model);
    TrainingSpec training;
    training.global_batch = 16;
    training.sequence_length = graph.sequence;
    int differing = 0;
    for (int trial = 0; trial < 12; ++trial) {
      const ParallelSpec spec = random_spec(graph, training, 1 << trial % 3, random);
      const Placements placements = place(graph, spec);
      INFO(model << ": " << describe(spec));
      KnownBlockShapes together;
      const auto none = together.of(graph, training, BackendKind::cuda, spec, placements, Recompute::none);
      for (const RecomputeRow& row : recompute_rows()) {
        const auto shapes = together.of(graph, training, BackendKind::cuda, spec, placements, row.kind);
        const auto alone = KnownBlockShapes().of(graph, training, BackendKind::cuda, spec, placements, row.kind);
        REQUIRE(shapes->kinds.size() == alone->kinds.size());
        for (std::size_t kind = 0; kind < alone->kinds.size(); ++kind) {
          CHECK(shapes->kinds[kind].forward == alone->kinds[kind].forward);
          CHECK(shapes->kinds[kind].backward == alone->kinds[kind].backward);
          CHECK(shapes->kinds[kind].backward_weights == alone->kinds[kind].backward_weights);
          CHECK(shapes->kinds[kind].saved_bytes == alone->kinds[kind].saved_bytes);
          CHECK(shapes->own_elements[kind].all == alone->own_elements[kind].all);
          CHECK(shapes->frozen_elements[kind].all == alone->frozen_elements[kind].all);
          differing += shapes->kinds[kind].saved_bytes != none->kinds[kind].saved_bytes;
        }
        CHECK(shapes->tied_elements.all == alone->tied_elements.all);
      }
    }
    CHECK(differing > 0);
  }
}

}  // namespace parplan
