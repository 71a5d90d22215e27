// One process with a master (DataParallel): what its ranks compute, send and hold.
#include <doctest/doctest.h>


#include "planner/graph/trained_graph.h"
#include "planner/program/lower.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {

using namespace testing;

namespace {

ParallelSpec with_master(const OpGraph& graph, int dp, std::int64_t micro_batch) {
  ParallelSpec spec;
  spec.mesh.degree = {.dp = dp};
  spec.micro_batch = micro_batch;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  spec.dp_method = DataMethod::master;
  return spec;
}

}  // namespace

// The backward ends in the head, on the master: the replicas' last buffer, for gradients, is empty.
TEST_CASE("replicas of a master that trains the head alone hold what they touch") {
  for (const std::string model : {"tiny-gpt2", "tiny-t5"}) {
    TrainingSpec training = training_of();
    training.trainable = {.all = false, .patterns = {"head*"}};
    if (model == "tiny-gpt2") training.trainable.patterns = {"norm"};
    const OpGraph graph = as_trained(training, graph_of(model));
    for (const int dp : {2, 4}) {
      const ParallelSpec spec = with_master(graph, dp, 1);
      INFO(model << ": " << describe(spec));
      check_close(run_plan(graph, training, spec), run_reference(graph, training, 1));
    }
  }
}

TEST_CASE("with one micro-batch a master's sums are those of an all-reduce, to the bit") {
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    for (const int dp : {2, 4, 8})
      for (const Optimizer optimizer : {Optimizer::adamw, Optimizer::sgd}) {
        TrainingSpec training = training_of();
        training.optimizer = optimizer;
        training.clip_norm = dp == 4 ? 0.5 : 0.0;
        ParallelSpec spec = with_master(graph, dp, global_batch / dp);
        INFO(model << ": " << describe(spec));
        const Outcome master = run_plan(graph, training, spec);
        spec.dp_method = DataMethod::all_reduce;
        check_equal(master, run_plan(graph, training, spec));
      }
  }
}

TEST_CASE("a master holds the optimizer and the logits of all, and each rank sends what is counted by hand") {
  const OpGraph graph = graph_of("tiny-gpt2");
  for (const int dp : {2, 4})
    for (const std::int64_t micro_batch : {1, 2}) {
      TrainingSpec training = training_of();
      training.clip_norm = 0.5;
      const ParallelSpec spec = with_master(graph, dp, micro_batch);
      const std::int64_t micro = micro_batches(spec, training);
      const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
      std::int64_t elements = 0;
      for (const Bucket& bucket : programs[0].buckets) elements += bucket.elements;
      const std::int64_t logits = 4 * sequence * micro_batch * graph.vocabulary;
      for (const Program& program : programs) {
        CAPTURE(program.rank);
        const bool is_master = program.rank == 0;
        // Parameters to each replica and the gradient of its logits, or logits and gradients back.
        CHECK(program.communication.dp == Bytes(micro * (is_master ? dp - 1 : 1) * (4 * elements + logits)));
        for (const Bucket& bucket : program.buckets) {
          CHECK(bucket.first_moment.has_value() == is_master);
          CHECK(bucket.second_moment.has_value() == is_master);
          CHECK(program.buffers[*bucket.gradients].bytes == 4 * bucket.elements);
        }
        CHECK(program.norm_buffer.has_value() == is_master);
        CHECK(program.loss_buffer.has_value() == is_master);
        if (!is_master) CHECK(program.memory.optimizer == Bytes(0));
      }
      // A replica keeps no logits; the master keeps those of all between forward and backward.
      const Bytes of_master = programs[0].memory.activations, of_replica = programs[1].memory.activations;
      CHECK(of_master - of_replica >= Bytes(dp * logits));
      for (const Program& program : programs)
        if (program.rank > 1) CHECK(program.memory == programs[1].memory);
    }
}

}  // namespace parplan
