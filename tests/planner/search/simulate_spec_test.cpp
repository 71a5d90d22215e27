#include "planner/search/simulate_spec.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <vector>

#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"
#include "tests/planner/search/random_settings.h"

namespace parplan {

using testing::describe;
using testing::random_cluster;
using testing::random_cut;
using testing::random_graph;
using testing::training_of;

TEST_CASE("a step extended from its steady state equals the step in full") {
  std::mt19937 random(11);
  int steady = 0, tried = 0;
  for (int setting = 0; setting < 40; ++setting) {
    const bool gpu = setting % 3 != 0;
    const OpGraph graph = random_graph(random, 16);
    const Cluster cluster = random_cluster(random, gpu, gpu && setting % 4 == 1);
    TrainingSpec training = training_of(256, gpu ? DataType::bf16 : DataType::fp32);
    NetworkCache networks(cluster);
    for (int trial = 0; trial < 6; ++trial) {
      ParallelSpec spec;
      const int stages = 1 + static_cast<int>(random() % std::min<std::size_t>(4, graph.blocks.size()));
      spec.mesh.degree = {.pp = stages, .dp = 1 << random() % 2, .tp = stages > 2 && !gpu ? 1 : 1 << random() % 2};
      spec.sequence_parallel = spec.tp() > 1 && random() % 2;
      spec.zero_stage = spec.dp() > 1 ? static_cast<int>(random() % 4) : 0;
      spec.recompute = random() % 2 ? Recompute::full : Recompute::none;
      spec.schedule = trial == 0 ? ScheduleKind::gpipe : ScheduleKind::one_f_one_b;
      spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), stages, random);
      if (spec.mesh.size() > cluster.devices()) continue;
      INFO("setting " << setting << ": " << describe(spec));
      std::vector<CostModel> models;
      for (int stage = 0; stage < stages; ++stage) models.push_back(cost_model(networks, spec.mesh, stage));
      const Placements placements = place(graph, spec);
      const std::optional<StepResult> extended =
          simulate_steady(graph, cluster, training, spec, placements, row_of(spec.schedule), models);
      ++tried;
      if (spec.schedule == ScheduleKind::gpipe)
        CHECK(!extended);  // it holds all micro-batches at once: more of them take more memory
      if (!extended) continue;
      ++steady;
      const Schedule schedule = schedule_of(spec, training);
      const StepResult full = simulate_spec(graph, cluster, training, spec, placements, schedule, models, nullptr);
      CHECK(extended->memory == full.memory);
      CHECK(extended->memory_stage == full.memory_stage);
      CHECK(extended->communication == full.communication);
      const double total = full.time.total().value;
      CHECK(extended->time.total().value == doctest::Approx(total).epsilon(1e-9));
      const auto close = [&](Seconds a, Seconds b) { return std::abs((a - b).value) <= 1e-9 * total; };
      StepTime part = extended->time;
      StepTime whole = full.time;
      for (int label = 0; label < static_cast<int>(Label::count_); ++label)
        CHECK(close(part.part(static_cast<Label>(label)), whole.part(static_cast<Label>(label))));
      CHECK(close(part.bubble, whole.bubble));
    }
  }
  MESSAGE(steady << " of " << tried << " were steady");
  CHECK(steady > tried / 2);
}

}  // namespace parplan
