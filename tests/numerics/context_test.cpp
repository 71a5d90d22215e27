// Plans whose ranks share out the tokens of each sequence, of graphs made of every op, compared
// with the one-rank reference.
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

// Many steps around a ring, each with its own sum of key gradients on the way: the random plans
// over all techniques need no more than two ranks of an axis.
TEST_CASE("keys go around rings of four and eight ranks, and heads to groups of four") {
  struct Case {
    const char* model;
    int cp, ulysses, tp;
  };
  std::mt19937 random(20261125);
  for (const auto& [model, cp, ulysses, tp] :
       {Case{"tiny-gpt2", 4, 1, 1}, Case{"tiny-llama", 4, 1, 2}, Case{"tiny-gpt2", 8, 1, 1},
        Case{"tiny-llama", 8, 1, 1}, Case{"tiny-gpt2", 8, 4, 1}, Case{"tiny-bert", 4, 4, 1}}) {
    const OpGraph graph = graph_of(model);
    const TrainingSpec training = training_of();
    LayoutRequest request;
    request[Choice::cp] = cp;
    request[Choice::cp_method] = cp > ulysses ? ContextMethod::ring : ContextMethod::ulysses;
    if (cp > ulysses) request[Choice::cp_ulysses] = ulysses;
    request[Choice::tp] = tp;
    const ParallelSpec spec = random_spec(graph, training, cp * tp, request, random);
    INFO(model << ": " << describe_context(spec));
    REQUIRE(spec.cp() == cp);
    REQUIRE(spec.tp() == tp);
    if (cp > ulysses) REQUIRE(spec.mesh.cp_ulysses == ulysses);
    check_close(run_plan(graph, training, spec), run_reference(graph, training, spec.micro_batch));
  }
}

}  // namespace parplan
