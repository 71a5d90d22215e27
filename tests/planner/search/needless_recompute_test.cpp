#include "planner/search/needless_recompute.h"

#include <doctest/doctest.h>

#include <array>
#include <random>
#include <vector>

#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"
#include "planner/search/simulate_spec.h"
#include "planner/search/space.h"
#include "planner/simulator/estimate.h"
#include "tests/planner/search/random_settings.h"

namespace parplan {

using testing::describe;
using testing::or_hierarchical;
using testing::or_overlapped;

TEST_CASE("what keeps no tensor that another recompute does not is what recomputes all that the other does") {
  const OpGraph graph = testing::graph_of("tiny-llama", 16);
  const Block& block = graph.blocks[1];
  for (const RecomputeRow& more : recompute_rows())
    for (const RecomputeRow& less : recompute_rows()) {
      bool keeps_no_other = true;
      for (TensorId tensor = 0; tensor < static_cast<TensorId>(graph.tensors.size()); ++tensor)
        keeps_no_other =
            keeps_no_other && (!more.keeps(graph, block, tensor) || less.keeps(graph, block, tensor));
      INFO(more.name << " and " << less.name);
      if (recomputes_all_of(more.kind, less.kind)) CHECK(keeps_no_other);
    }
  CHECK(recomputes_all_of(Recompute::norms | Recompute::mlp, Recompute::norms | Recompute::activation));
  CHECK(!recomputes_all_of(Recompute::norms, Recompute::core_attn));
}

TEST_CASE("a layout is no faster where stages recompute more") {
  std::mt19937 random(17);
  int count = 0, longer = 0;
  for (int setting = 0; setting < 300; ++setting) {
    const bool gpu = setting % 4 != 0;
    OpGraph graph = testing::random_graph(random, 16);
    const Cluster cluster = testing::random_cluster(random, gpu, gpu && setting % 4 == 1);
    const std::array precisions =
        gpu ? std::array{DataType::bf16, DataType::fp16} : std::array{DataType::fp32, DataType::tf32};
    TrainingSpec training = testing::training_of(16, precisions[random() % 2]);
    training.engine = testing::random_engine(static_cast<unsigned>(setting), graph);
    testing::train_random_parts(static_cast<unsigned>(setting), training, graph);
    Estimator estimator(graph, cluster, training);
    LayoutRequest request;
    if (setting % 3 == 0) request[Choice::cp] = std::int64_t{2};
    if (setting % 5 == 0) request[Choice::schedule] = ScheduleKind::interleaved;
    const std::vector<ParallelSpec> specs = enumerate_specs(graph, training, std::min(8, cluster.devices()), request);
    if (specs.empty()) continue;
    for (int trial = 0; trial < 20; ++trial) {
      ParallelSpec less = or_overlapped(specs[random() % specs.size()], training.engine, random);
      less = or_hierarchical(less, graph, training, random);
      less.stage_blocks = testing::random_cut(static_cast<int>(graph.blocks.size()), less.stages(), random);
      if (trial % 5 == 1 && less.pp() > 1 && less.virtual_stages == 1 && less.zero_stage <= 1)
        less.schedule = ScheduleKind::zero_bubble_h1;
      if (trial % 5 < 2) less.input_slots = InputSlots::one_more;
      less.recompute = Recompute::per_stage;
      less.recompute_layers = 0;
      less.stage_recompute.clear();
      ParallelSpec more = less;
      for (int s = 0; s < less.stages(); ++s) {
        Recompute of_less = recompute_rows()[random() % recompute_rows().size()].kind;
        const Recompute of_more = recompute_rows()[random() % recompute_rows().size()].kind;
        if (!recomputes_all_of(of_more, of_less)) of_less = of_more;
        less.stage_recompute.push_back(of_less);
        more.stage_recompute.push_back(of_more);
      }
      if (!is_legal(graph, training, less) || !is_legal(graph, training, more)) continue;
      if (!recomputes_more(more, less)) continue;
      const auto time_of = [&](const ParallelSpec& spec) {
        const Placements placements = place(graph, spec);
        return simulate_spec(graph, estimator.networks(), training, spec, placements, schedule_of(spec, training),
                             nullptr)
            .time.total();
      };
      const Seconds with_less = time_of(less), with_more = time_of(more);
      INFO("setting " << setting << ": " << describe(less) << " and " << describe(more));
      INFO(training.engine.name << " ratio-1 " << with_more.value / with_less.value - 1.0);
      CHECK(with_more >= with_less * (1 - 1e-9));
      ++count;
      longer += with_more > with_less;
    }
  }
  MESSAGE(count << " pairs, " << longer << " longer");
  CHECK(count > 1500);
  CHECK(longer > count / 2);
}

}  // namespace parplan
