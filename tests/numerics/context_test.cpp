// Plans whose ranks share out the tokens of each sequence, compared with the one-rank reference.
#include <doctest/doctest.h>

#include <random>

#include "planner/parallel/techniques.h"
#include "tests/numerics/op_graphs.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {

using namespace testing;

namespace {

std::string describe_context(const ParallelSpec& spec) {
  return fmt::format("{} cp {} by {} in groups of {}", describe(spec), spec.cp(), name(spec.cp_method),
                     spec.mesh.cp_ulysses);
}

bool allows_ring(const OpGraph& graph) {
  ParallelSpec spec;
  spec.mesh.degree = {.cp = 2};
  spec.cp_method = ContextMethod::ring;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  return !illegal(graph, training_of(), spec);
}

}  // namespace

TEST_CASE("random legal plans with context parallelism train as the one-rank reference does") {
  std::mt19937 random(20261123);
  for (const std::string model : {"tiny-gpt2", "tiny-llama", "tiny-bert"}) {
    const OpGraph graph = graph_of(model);
    References references(graph);
    for (int trial = 0; trial < 40; ++trial) {
      TrainingSpec training = training_of();
      const bool clips = trial % 4 == 3;
      if (clips) training.clip_norm = 0.5;
      LayoutRequest request;
      request[Choice::cp] = trial % 5 == 4 ? 4 : 2;
      if (trial % 2 == 0)
        request[Choice::cp_method] = trial % 4 == 0 ? ContextMethod::all_gather : ContextMethod::ring;
      ParallelSpec spec = random_spec(graph, training, 4 << trial % 2, request, random);
      if (trial % 3 == 0) spec.input_slots = InputSlots::one_more;
      INFO(model << ": " << describe_context(spec) << (clips ? ", clipped" : ""));
      check_close(run_plan(graph, training, spec), references.of(training, spec.micro_batch));
    }
  }
}

TEST_CASE("graphs with every op train with context parallelism as the one-rank reference does") {
  std::mt19937 random(23);
  for (const OpGraph& graph : op_graphs(sequence)) {
    References references(graph);
    for (int trial = 0; trial < 12; ++trial) {
      const TrainingSpec training = training_of();
      LayoutRequest request;
      request[Choice::cp] = trial % 4 == 3 ? 4 : 2;
      if (trial % 2 == 0)
        request[Choice::cp_method] =
            trial % 4 == 0 || !allows_ring(graph) ? ContextMethod::all_gather : ContextMethod::ring;
      if (trial % 3 == 0) request[Choice::tp] = 2;
      if (trial % 6 == 0) request[Choice::sequence_parallel] = true;
      const ParallelSpec spec = random_spec(graph, training, 4 << trial % 2, request, random);
      INFO(graph.name << ": " << describe_context(spec));
      check_close(run_plan(graph, training, spec), references.of(training, spec.micro_batch));
    }
  }
}

// The ranks of both axes are one group: its reductions add in the same order, and the order of the
// tokens of a step is the same.
TEST_CASE("with context parallelism, ZeRO equals data parallelism to the bit: stage 1 always, 2 and 3 without "
          "accumulation") {
  std::mt19937 random(9);
  for (const std::string model : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = graph_of(model);
    const TrainingSpec training = training_of();
    for (int zero = 1; zero <= 3; ++zero)
      for (const int dp : {1, 2}) {
        LayoutRequest request;
        request[Choice::cp] = 2;
        request[Choice::dp] = dp;
        request[Choice::zero_stage] = zero;
        if (zero > 1) request[Choice::micro_batch] = global_batch / dp;
        ParallelSpec spec = random_spec(graph, training, 4, request, random);
        INFO(model << ": " << describe_context(spec));
        const Outcome sharded = run_plan(graph, training, spec, 3);
        spec.zero_stage = 0;
        check_equal(sharded, run_plan(graph, training, spec, 3));
      }
  }
}

// tiny-gpt2 has 4 key/value heads, tiny-llama 2. In groups of two, a rank has a chunk; in groups of
// four, half a chunk.
TEST_CASE("groups that exchange tokens for heads train as the reference does, with every other technique") {
  std::mt19937 random(20261126);
  int with_tensor = 0, with_stages = 0, sharded = 0, recomputed = 0;
  for (const std::string model : {"tiny-gpt2", "tiny-llama", "tiny-bert"}) {
    const OpGraph graph = graph_of(model);
    References references(graph);
    for (int trial = 0; trial < 14; ++trial) {
      TrainingSpec training = training_of();
      const bool clips = trial % 4 == 3, in_fours = trial % 7 == 6 && model != "tiny-llama";
      if (clips) training.clip_norm = 0.5;
      LayoutRequest request;
      request[Choice::cp] = in_fours ? 8 : 4;
      request[Choice::cp_method] = trial % 2 == 0 ? ContextMethod::ring : ContextMethod::all_gather;
      request[Choice::cp_ulysses] = in_fours ? 4 : 2;
      if (trial % 5 == 1 && !in_fours) request[Choice::schedule] = ScheduleKind::interleaved;
      if (trial % 5 == 2 && !in_fours) request[Choice::schedule] = ScheduleKind::zero_bubble_h1;
      if (trial % 5 == 3 && !in_fours && model != "tiny-llama") request[Choice::tp] = 2;
      ParallelSpec spec = random_spec(graph, training, 8, request, random);
      REQUIRE(spec.mesh.cp_ulysses == (in_fours ? 4 : 2));
      INFO(model << ": " << describe_context(spec) << (clips ? ", clipped" : ""));
      check_close(run_plan(graph, training, spec), references.of(training, spec.micro_batch));
      with_tensor += spec.tp() > 1;
      with_stages += spec.pp() > 1;
      sharded += spec.zero_stage > 0;
      recomputed += spec.recompute != Recompute::none;
    }
  }
  for (const int count : {with_tensor, with_stages, sharded, recomputed}) CHECK(count > 2);
}

// Steps around a ring of many ranks, each with its own sum of key gradients on the way.
TEST_CASE("keys go around rings of up to eight ranks, with every other technique") {
  std::mt19937 random(20261125);
  for (const std::string model : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = graph_of(model);
    References references(graph);
    const TrainingSpec training = training_of();
    for (const int cp : {2, 4, 8}) {
      for (int trial = 0; trial < (cp == 8 ? 1 : 3); ++trial) {
        LayoutRequest request;
        request[Choice::cp] = cp;
        request[Choice::cp_method] = ContextMethod::ring;
        if (trial == 1) request[Choice::tp] = 2;
        if (trial == 2) request[Choice::pp] = 2;
        const ParallelSpec spec = random_spec(graph, training, trial == 0 ? cp : 2 * cp, request, random);
        INFO(model << ": " << describe_context(spec));
        check_close(run_plan(graph, training, spec), references.of(training, spec.micro_batch));
      }
    }
  }
}

}  // namespace parplan
