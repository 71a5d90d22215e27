#include "planner/search/open_parts.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "planner/parallel/cut_stages.h"
#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"
#include "planner/search/simulate_spec.h"
#include "tests/planner/search/random_settings.h"

namespace parplan {

using testing::cluster_of;
using testing::describe;
using testing::graph_of;
using testing::training_of;

TEST_CASE("nothing in a part is faster than its floor, where kernels that tensor parallelism repeats take longest") {
  const OpGraph graph = graph_of("tiny-llama", 16);
  const TrainingSpec training = training_of(8, DataType::bf16);
  Cluster cluster = cluster_of("dgx-h100", 4);
  // Norms and sums move bytes alone, which sequence parallelism cuts.
  for (DeviceRates& rates : cluster.groups.front().device.rates) {
    rates.memory *= 1e-4;
    rates.sustained_memory *= 1e-4;
  }
  const LayoutRequest request;
  const SpaceWidth width = usual_width(graph, training.engine, request);
  CandidateMaker maker(graph, cluster, training);
  LayoutFloors floors(graph, cluster, training, request, width, maker);
  OpenParts parts(graph, cluster, training, request, width, Objective::time, cluster.devices(), floors);
  NetworkCache networks(cluster, training.engine);
  std::vector<Open> open = parts.open_all();
  int layouts = 0, cut_sequences = 0;
  double closest = 0.0;
  while (!open.empty()) {
    const Open part = open.back();
    open.pop_back();
    if (const std::optional<std::vector<Open>> inside = parts.look_into(part.part)) {
      for (const Open& one : *inside) {
        CHECK(one.bound >= part.bound);
        open.push_back(one);
      }
      continue;
    }
    const OpenParts::Layouts layout = parts.layouts(part.part);
    ParallelSpec spec = layout.spec;
    spec.stage_blocks = even_stages(graph, spec.stages());
    if (illegal(graph, training, spec)) continue;
    const StepResult simulated =
        simulate_spec(graph, networks, training, spec, place(graph, spec), schedule_of(spec, training), nullptr);
    INFO(describe(spec));
    CHECK(layout.floor.time <= simulated.time.total() * (1 + 1e-12));
    closest = std::max(closest, layout.floor.time / simulated.time.total());
    ++layouts;
    cut_sequences += spec.sequence_parallel;
  }
  MESSAGE(layouts << " layouts, " << cut_sequences << " with sequence parallelism; floors up to " << closest
                  << " of the step");
  CHECK(layouts > 50);
  CHECK(cut_sequences > 10);
  CHECK(closest > 0.5);
}

}  // namespace parplan
