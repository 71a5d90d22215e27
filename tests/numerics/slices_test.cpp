// Products by slices beside the ring of the tensor axis, of graphs made of every op, compared with
// the one-rank reference.
#include <doctest/doctest.h>

#include <map>
#include <random>
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

TEST_CASE("graphs with every op train by slices of products as the one-rank reference does") {
  std::mt19937 random(20261128);
  std::vector<OpGraph> graphs = op_graphs(sequence);
  graphs.push_back(normed_sums(sequence));
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
  CHECK(tried > 30);
}

}  // namespace parplan
