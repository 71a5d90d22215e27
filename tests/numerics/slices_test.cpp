// Products by slices beside the ring of the tensor axis, compared with the one-rank reference, and
// with products of all rows at once.
#include <doctest/doctest.h>

#include <map>
#include <random>
#include <utility>
#include <vector>

#include "tests/numerics/op_graphs.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {

using namespace testing;

namespace {

LayoutRequest sliced(int tp) {
  return {{Choice::tp, tp}, {Choice::sequence_parallel, true}, {Choice::tp_overlap, TensorOverlap::ring}};
}

}  // namespace

TEST_CASE("plans with slices of products train as the one-rank reference does, with every other technique") {
  std::mt19937 random(20261128);
  std::vector<OpGraph> graphs = op_graphs(sequence);
  graphs.push_back(normed_sums(sequence));
  for (const std::string& model : models) graphs.push_back(graph_of(model));
  int tried = 0;
  for (const OpGraph& graph : graphs) {
    std::map<std::int64_t, Outcome> references;
    for (int trial = 0; trial < 8; ++trial) {
      const TrainingSpec training = training_of();
      LayoutRequest request = sliced(trial % 4 == 3 ? 4 : 2);
      if (trial % 4 == 1) request[Choice::schedule] = ScheduleKind::zero_bubble_h1;
      if (trial % 4 == 2) request[Choice::cp] = 2;
      const int ranks = trial % 2 == 0 ? 4 : 8;
      if (enumerate_specs(graph, training, ranks, request).empty()) continue;
      ParallelSpec spec = random_spec(graph, training, ranks, request, random);
      spec.recompute = recompute_rows()[random() % recompute_rows().size()].kind;
      INFO(graph.name << ": " << describe(spec) << " cp " << spec.cp() << " by " << name(spec.cp_method));
      auto reference = references.find(spec.micro_batch);
      if (reference == references.end())
        reference = references.emplace(spec.micro_batch, run_reference(graph, training, spec.micro_batch, 3)).first;
      check_close(run_plan(graph, training, spec, 3), reference->second);
      ++tried;
    }
  }
  CHECK(tried > 50);
}

// A product of rows has each row's bits, and two ranks' sum has the same in any order.
TEST_CASE("slices of products of two ranks equal products of all rows to the bit") {
  std::mt19937 random(31);
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    if (graph.joins_sequences) continue;  // has no sequence parallelism
    const TrainingSpec training = training_of();
    for (int trial = 0; trial < 4; ++trial) {
      ParallelSpec spec = random_spec(graph, training, trial < 2 ? 2 : 4, sliced(2), random);
      INFO(model << ": " << describe(spec));
      const Outcome by_slices = run_plan(graph, training, spec, 3);
      spec.tp_overlap = TensorOverlap::none;
      check_equal(by_slices, run_plan(graph, training, spec, 3));
    }
  }
}

}  // namespace parplan
