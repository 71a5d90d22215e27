#include "planner/search/open_parts.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "planner/parallel/cut_stages.h"
#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"
#include "planner/search/simulate_spec.h"
#include "tests/planner/search/random_settings.h"

namespace parplan {

using testing::all_cuts;
using testing::cluster_of;
using testing::describe;
using testing::graph_of;
using testing::training_of;

namespace {

struct CheckedParts {
  int layouts = 0;
  int cut_sequences = 0;     // layouts with sequence parallelism
  int left_out = 0;          // layouts that do not fit
  double closest = 0.0;      // of a floor to its step
  std::vector<Bytes> peaks;  // of simulated layouts
};

// All cuts where stages may be of three speeds, else that in even stages.
std::vector<std::vector<int>> cuts_of(const OpGraph& graph, const Cluster& cluster, int stages) {
  if (cluster.groups.size() > 2) return all_cuts(static_cast<int>(graph.blocks.size()), stages);
  return {even_stages(graph, stages)};
}

// Looks into all parts of the space, and holds floors against simulated steps and the counts of
// parts against those of what they were found to hold.
CheckedParts check_floors(const OpGraph& graph, const TrainingSpec& training, const Cluster& cluster,
                          const LayoutRequest& request, bool balances_replicas = false) {
  SpaceWidth width = usual_width(graph, training.engine, request);
  width.balances_replicas = balances_replicas;
  CandidateMaker maker(graph, cluster, training);
  LayoutFloors floors(graph, cluster, training, request, width, maker);
  OpenParts parts(graph, cluster, training, request, width, Objective::time, cluster.devices(), floors);
  NetworkCache networks(cluster, training.engine);
  std::vector<Open> open = parts.open_all();
  CheckedParts checked;
  std::set<std::uint64_t> places;  // of layouts
  while (!open.empty()) {
    const Open part = open.back();
    open.pop_back();
    const std::int64_t left_out = parts.count_left_out(), count = parts.count(part.part);
    if (const std::optional<std::vector<Open>> inside = parts.look_into(part.part)) {
      std::int64_t found = parts.count_left_out() - left_out;
      for (const Open& one : *inside) {
        CHECK(one.bound >= part.bound);
        found += parts.count(one.part);
        open.push_back(one);
      }
      CHECK(found == count);
      continue;
    }
    const OpenParts::Layouts layout = parts.layouts(part.part);
    CHECK(layout.count == 1);
    CHECK(places.insert(layout.place).second);
    ParallelSpec spec = layout.spec;
    std::optional<Seconds> fastest;
    for (const std::vector<int>& cut : cuts_of(graph, cluster, spec.stages())) {
      spec.stage_blocks = cut;
      if (illegal(graph, training, spec)) continue;
      const StepResult simulated =
          simulate_spec(graph, networks, training, spec, place(graph, spec), schedule_of(spec, training), nullptr);
      fastest = std::min(fastest.value_or(simulated.time.total()), simulated.time.total());
      checked.peaks.push_back(simulated.memory.peak());
    }
    if (!fastest) continue;
    INFO(describe(spec));
    CHECK(layout.floor.time <= *fastest * (1 + 1e-12));
    checked.closest = std::max(checked.closest, layout.floor.time / *fastest);
    ++checked.layouts;
    checked.cut_sequences += spec.sequence_parallel;
  }
  // What was left out, one by one.
  while (const std::optional<OpenParts::Layouts> layout = parts.take_smallest_left_out(std::nullopt)) {
    CHECK(places.insert(layout->place).second);
    ++checked.left_out;
  }
  CHECK(parts.count_left_out() == 0);
  MESSAGE(checked.layouts << " layouts, " << checked.cut_sequences << " with sequence parallelism; floors up to "
                          << checked.closest << " of the step");
  return checked;
}

}  // namespace

TEST_CASE("nothing in a part is faster than its floor, where kernels that tensor parallelism repeats take longest") {
  Cluster cluster = cluster_of("dgx-h100", 4);
  // Norms and sums move bytes alone, which sequence parallelism cuts.
  for (DeviceRates& rates : cluster.groups.front().device.rates) {
    rates.memory *= 1e-4;
    rates.sustained_memory *= 1e-4;
  }
  const CheckedParts checked =
      check_floors(graph_of("tiny-llama", 16), training_of(8, DataType::bf16), cluster, LayoutRequest());
  CHECK(checked.layouts > 50);
  CHECK(checked.cut_sequences > 10);
  CHECK(checked.closest > 0.5);
}

// Stages of three speeds, of which the slowest hold a block at least.
TEST_CASE("nothing in a part is faster than its floor where pipelines run over three kinds of nodes") {
  Cluster cluster = cluster_of("dgx-a100", 4);
  for (const double speed : {0.15, 2.2}) {
    cluster.groups.push_back(cluster.groups.front());
    cluster.groups.back().device.name += fmt::format("-{}", speed);
    for (DeviceRates& rates : cluster.groups.back().device.rates) {
      for (FlopsPerSecond* rate : {&rates.matrix_half, &rates.sustained_half, &rates.sustained_weights,
                                   &rates.matrix_fp32, &rates.vector, &rates.attention, &rates.attention_gradient})
        *rate *= speed;
      for (BytesPerSecond* rate : {&rates.memory, &rates.sustained_memory}) *rate *= 0.01 * speed;
    }
  }
  for (DeviceRates& rates : cluster.groups.front().device.rates)
    for (BytesPerSecond* rate : {&rates.memory, &rates.sustained_memory}) *rate *= 0.01;
  // Many micro-batches: what the slowest stage takes for each decides.
  LayoutRequest request;
  request[Choice::micro_batch] = std::int64_t{1};
  for (const ScheduleKind schedule : {ScheduleKind::one_f_one_b, ScheduleKind::interleaved}) {
    request[Choice::schedule] = schedule;
    for (const std::int64_t pp : {3, 6}) {
      if (pp == 6 && schedule == ScheduleKind::interleaved) continue;  // two blocks a rank
      request[Choice::pp] = pp;
      const CheckedParts checked =
          check_floors(graph_of("tiny-gpt2", 16), training_of(96, DataType::bf16), cluster, request);
      CHECK(checked.layouts > 0);
      CHECK(checked.closest > 0.85);
    }
  }
}

// The slower node first, and last: in some orders of the axes stages are on nodes of one kind, in
// others replicas or tensor groups.
TEST_CASE("nothing in a part is faster than its floor on unlike nodes, in any order of the axes") {
  Cluster cluster = cluster_of("dgx-a100", 8);
  cluster.groups.push_back(cluster_of("dgx-h100", 8).groups.front());
  LayoutRequest request;
  request[Choice::schedule] = ScheduleKind::one_f_one_b;
  const OpGraph graph = graph_of("tiny-llama", 16);
  const TrainingSpec training = training_of(16, DataType::bf16);
  for (int turn = 0; turn < 2; ++turn) {
    const CheckedParts checked = check_floors(graph, training, cluster, request);
    CHECK(checked.layouts > 50);
    CHECK(checked.left_out == 0);
    CHECK(checked.closest > 0.5);
    CHECK(check_floors(graph, training, cluster, request, true).layouts == checked.layouts);
    LayoutRequest in_order = request;
    in_order[Choice::mesh_order] = parse_order("dp-pp-tp");
    const CheckedParts in_one = check_floors(graph, training, cluster, in_order);
    CHECK(in_one.layouts > 50);
    CHECK(in_one.layouts < checked.layouts);
    std::ranges::reverse(cluster.groups);
  }
  // So little memory that only some layouts fit.
  std::vector<Bytes> peaks = check_floors(graph, training, cluster, request).peaks;
  std::ranges::sort(peaks);
  for (NodeGroup& group : cluster.groups) group.device.memory_capacity = peaks[peaks.size() / 2];
  const CheckedParts tight = check_floors(graph, training, cluster, request);
  CHECK(tight.layouts > 0);
  CHECK(tight.left_out > 0);
}

}  // namespace parplan
