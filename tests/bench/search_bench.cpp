// How fast plans are found, on one core: estimates and simulated Programs per second, and whole searches with the
// defaults of `parplan suggest` for GPUs (the model's context, 512 sequences a step, bf16, AdamW).
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/cluster/catalog.h"
#include "planner/parallel/pipeline.h"
#include "planner/parallel/techniques.h"
#include "planner/program/lower.h"
#include "planner/schedule/schedules.h"
#include "planner/search/search.h"
#include "planner/simulator/estimate.h"
#include "planner/simulator/simulate.h"

namespace parplan {
namespace {

// Wall seconds. The machine may be shared, so the processor's own time is printed beside, where it matters.
double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// Peak resident memory of this process since `forget_peak`, in MiB (Linux; 0 elsewhere).
double peak_mebibytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) / 1024.0;
  return 0.0;
}
void forget_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

struct Work {
  std::string model;
  std::string cluster;
  int devices = 0;
  std::int64_t global_batch = 0;
};

struct Setting {
  OpGraph graph;
  Cluster cluster;
  TrainingSpec training;
};

Setting setting_of(const Work& work) {
  const std::string source = PARPLAN_SOURCE_DIR;
  Setting setting;
  const ModelSpec spec = load_model(work.model, source + "/models").spec;
  setting.training.precision = DataType::bf16;
  setting.training.sequence_length = spec.context;
  setting.training.global_batch = work.global_batch;
  setting.graph = build_graph(spec, spec.context);
  setting.cluster = find_cluster(work.cluster, {.devices_folder = source + "/configs/devices", .clusters_folder = source + "/configs/clusters"},
                                 {.device = {}, .network = {}, .devices = work.devices, .nodes = {}});
  return setting;
}

struct Placed {
  ParallelSpec spec;
  Placements placements;
};

Estimate estimate(Estimator& estimator, const Placed& placed) {
  const ScheduleRow& schedule = row_of(placed.spec.schedule);
  return estimator.estimate(placed.spec, placed.placements, {schedule.closed_form, schedule.in_flight});
}

void bench_estimates(const Work& work) {
  const Setting setting = setting_of(work);
  std::vector<Placed> space;
  for (ParallelSpec& spec : enumerate_specs(setting.graph, setting.training, work.devices, {})) {
    Placed placed{spec, place(setting.graph, spec)};
    placed.spec.stage_blocks = even_stages(setting.graph, spec.pp());
    space.push_back(std::move(placed));
  }
  Estimator estimator(setting.graph, setting.cluster, setting.training);
  std::vector<std::pair<double, std::size_t>> feasible;
  const double first = seconds_of([&] {
    for (std::size_t i = 0; i < space.size(); ++i) {
      const Estimate result = estimate(estimator, space[i]);
      if (result.memory.peak() <= setting.cluster.groups.front().device.memory_capacity) feasible.push_back({result.time.total().value, i});
    }
  });
  const double again = seconds_of([&] {
    for (const Placed& placed : space) estimate(estimator, placed);
  });
  const double count = static_cast<double>(space.size());
  std::printf("%s on %d devices of %s, global batch %lld\n", work.model.c_str(), work.devices, work.cluster.c_str(),
              static_cast<long long>(work.global_batch));
  std::printf("  estimates: %zu candidates, %zu fit; %.0f a second with their Segments lowered on the way, %.0f a second once those are known\n",
              space.size(), feasible.size(), count / first, count / again);

  // What a search simulates: the 64 best estimates.
  std::sort(feasible.begin(), feasible.end());
  if (feasible.size() > 64) feasible.resize(64);
  double lowering = 0.0, playing = 0.0;
  std::size_t programs = 0, calls = 0;
  for (const auto& [time, index] : feasible) {
    const Placed& placed = space[index];
    const Job job{.graph = &setting.graph, .training = setting.training, .spec = placed.spec, .placements = placed.placements,
                  .schedule = row_of(placed.spec.schedule).actions(placed.spec.pp(), static_cast<int>(micro_batches(placed.spec, setting.training))),
                  .backend = setting.cluster.groups.front().device.backend, .overhead = setting.cluster.groups.front().device.memory_overhead};
    std::vector<Program> lowered;
    lowering += seconds_of([&] { lowered = lower_representatives(job); });
    std::vector<CostModel> models;
    for (int stage = 0; stage < placed.spec.pp(); ++stage) models.push_back(cost_model(estimator.networks(), placed.spec.mesh, stage));
    playing += seconds_of([&] { simulate(lowered, models); });
    programs += lowered.size();
    for (const Program& program : lowered) calls += program.calls.size();
  }
  const double simulated = static_cast<double>(feasible.size());
  std::printf("  Programs: the best %zu candidates are %zu Programs of %.0f calls; %.0f Programs a second (%.1f ms a candidate to lower, %.1f to play)\n",
              feasible.size(), programs, static_cast<double>(calls) / static_cast<double>(programs), static_cast<double>(programs) / (lowering + playing),
              1e3 * lowering / simulated, 1e3 * playing / simulated);
}

void bench_search(const Work& work) {
  const Setting setting = setting_of(work);
  forget_peak();
  const double processor = processor_seconds();
  SearchResult result;
  const double wall = seconds_of([&] { result = search(setting.graph, setting.cluster, setting.training, {}, {}); });
  const SearchCounts& counts = result.counts;
  std::printf("search %s on %d devices of %s, global batch %lld: %.2f s (%.2f s of processor), %lld candidates (%.0f a second), %lld do not fit, "
              "%lld simulated, %lld pruned, %s, peak memory %.0f MiB\n",
              work.model.c_str(), work.devices, work.cluster.c_str(), static_cast<long long>(work.global_batch), wall, processor_seconds() - processor,
              static_cast<long long>(counts.candidates), static_cast<double>(counts.candidates) / wall,
              static_cast<long long>(counts.infeasible_memory), static_cast<long long>(counts.simulated),
              static_cast<long long>(counts.pruned_by_bound), counts.certified ? "certified" : "not certified", peak_mebibytes());
  if (result.plans.empty()) return;
  const RankedPlan& best = result.plans.front();
  std::printf("  best: %.3f s a step, dp %d tp %d pp %d, ZeRO %d, micro-batch %lld, %s, recompute %s\n", best.result.time.total().value, best.spec.dp(),
              best.spec.tp(), best.spec.pp(), best.spec.zero_stage, static_cast<long long>(best.spec.micro_batch), name(best.spec.schedule),
              name(best.spec.recompute));
}

}  // namespace
}  // namespace parplan

int main() {
  using parplan::Work;
  for (const Work& work : {Work{"gpt3-175b", "dgx-a100", 64, 512}, Work{"llama3-70b", "dgx-h100", 512, 512}}) {
    parplan::bench_estimates(work);
    std::fflush(stdout);
  }
  for (const Work& work : {Work{"gpt3-175b", "dgx-a100", 64, 64}, Work{"gpt3-175b", "dgx-a100", 64, 512}, Work{"llama3-70b", "dgx-h100", 512, 512}}) {
    parplan::bench_search(work);
    std::fflush(stdout);
  }
  // Measured on another machine of 2 cores: Calculon's exhaustive search without offload and overlap of communication.
  std::printf("beside: Calculon, gpt3-175b on 64 A100 80 GB, batch up to 64: 419 s of processor for 88,484 candidates (211 a second)\n");
}
