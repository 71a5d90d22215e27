#include "planner/program/known_blocks.h"

#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "planner/program/job.h"
#include "planner/program/lower.h"
#include "tests/planner/program/random_plans.h"

namespace parplan {

// Jobs of all precisions and backends share blocks here; one that took another's would differ.
TEST_CASE("a job that shares lowered blocks with others has the Segments, calls and memory that it has alone") {
  std::mt19937 random(29);
  for (const char* model : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = graph_of(model);
    KnownBlocks blocks;
    for (int trial = 0; trial < 40; ++trial) {
      TrainingSpec training;
      training.global_batch = 16 << random() % 2;
      training.sequence_length = graph.sequence;
      training.precision = random() % 2 == 0 ? DataType::fp32 : DataType::bf16;
      constexpr int ranks[] = {1, 2, 4};
      const ParallelSpec spec = random_spec(graph, training, ranks[trial % 3], random);
      const Job job = job_of(graph, training, spec, random() % 2 == 0 ? BackendKind::cuda : BackendKind::cpu);
      INFO(model << ": " << describe(spec));
      const std::vector<Program> alone = lower_representatives(job);
      // Twice: blocks of its own are known by then.
      for (int turn = 0; turn < 2; ++turn) {
        const std::vector<Program> shared = lower_representatives(job, &blocks);
        REQUIRE(shared.size() == alone.size());
        for (std::size_t rank = 0; rank < alone.size(); ++rank) {
          CHECK(shared[rank].segments == alone[rank].segments);
          CHECK(shared[rank].calls.size() == alone[rank].calls.size());
          CHECK(shared[rank].arena_bytes == alone[rank].arena_bytes);
          CHECK(shared[rank].communication == alone[rank].communication);
        }
      }
    }
  }
}

TEST_CASE("a block is lowered once for all contexts that are equal, and again for each other one") {
  const OpGraph graph = graph_of("tiny-gpt2");
  TrainingSpec training;
  training.global_batch = 16;
  training.sequence_length = graph.sequence;
  ParallelSpec spec;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  const BlockContext context = block_context(job_of(graph, training, spec), 1, Coordinates{});
  KnownBlocks blocks;
  const auto first = blocks.of(graph, 1, context);
  CHECK(blocks.of(graph, 1, context) == first);
  CHECK(blocks.of(graph, 2, context) == first);  // layers are alike
  CHECK(blocks.of(graph, 0, context) != first);
  BlockContext other = context;
  other.layout.recompute = Recompute::full;
  CHECK(blocks.of(graph, 1, other) != first);
  CHECK(blocks.of(graph, 0, other) == blocks.of(graph, 0, context));  // recomputes nothing
  other = context;
  other.input_apart = true;  // not in the hash
  CHECK(blocks.of(graph, 1, other) != first);
  CHECK(blocks.of(graph, 1, context) == first);
}

}  // namespace parplan
