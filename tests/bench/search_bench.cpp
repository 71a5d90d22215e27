// How fast plans are found: estimates and simulated Programs per second, and whole searches with
// the defaults of `parplan suggest` for GPUs (the model's context, 512 sequences per step, bf16,
// AdamW).
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/cluster/find_cluster.h"
#include "planner/explain/find_reasons.h"
#include "planner/parallel/cut_stages.h"
#include "planner/parallel/techniques.h"
#include "planner/program/lower.h"
#include "planner/report/error_band.h"
#include "planner/report/plan_row.h"
#include "planner/schedule/schedules.h"
#include "planner/search/node_group_arrangements.h"
#include "planner/search/search_with_headroom.h"
#include "planner/simulator/estimate.h"
#include "planner/simulator/simulate.h"
#include "planner/suggest.h"

namespace parplan {
namespace {

// Wall seconds. The machine may be shared, so the processor's own time is printed beside them where
// it matters.
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
  std::int64_t sequence = 0;  // 0: the model's context
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
  setting.training.sequence_length = work.sequence > 0 ? work.sequence : spec.context;
  setting.training.global_batch = work.global_batch;
  setting.graph = build_graph(spec, setting.training.sequence_length);
  setting.cluster = find_cluster(
      work.cluster, {.devices_folder = source + "/configs/devices", .clusters_folder = source + "/configs/clusters"},
      {.device = {}, .network = {}, .devices = work.devices, .nodes = {}});
  setting.cluster.memory_headroom = memory_headroom(setting.training.engine, setting.cluster);
  return setting;
}

struct Placed {
  ParallelSpec spec;
  Placements placements;
};

Estimate estimate(Estimator& estimator, const Placed& placed) {
  const ScheduleRow& schedule = row_of(placed.spec.schedule);
  return estimator.estimate(placed.spec, placed.placements, forms_of(schedule));
}

void bench_estimates(const Work& work) {
  const Setting setting = setting_of(work);
  std::vector<Placed> space;
  for (ParallelSpec& spec : enumerate_specs(setting.graph, setting.training, work.devices, {})) {
    Placed placed{spec, place(setting.graph, spec)};
    placed.spec.stage_blocks = even_stages(setting.graph, spec.stages());
    space.push_back(std::move(placed));
  }
  Estimator estimator(setting.graph, setting.cluster, setting.training);
  std::vector<std::pair<double, std::size_t>> feasible;
  const double first = seconds_of([&] {
    for (std::size_t i = 0; i < space.size(); ++i) {
      const Estimate result = estimate(estimator, space[i]);
      if (result.memory.peak() <= setting.cluster.groups.front().device.memory_capacity)
        feasible.push_back({result.time.total().value, i});
    }
  });
  const double again = seconds_of([&] {
    for (const Placed& placed : space) estimate(estimator, placed);
  });
  const double count = static_cast<double>(space.size());
  std::printf("%s on %d devices of %s, global batch %lld\n", work.model.c_str(), work.devices, work.cluster.c_str(),
              static_cast<long long>(work.global_batch));
  std::printf(
      "  estimates: %zu candidates, %zu fit; %.0f a second with their Segments lowered on the way, %.0f a second once "
      "those are known\n",
      space.size(), feasible.size(), count / first, count / again);

  // The candidates that a search simulates: the 64 best estimates.
  std::sort(feasible.begin(), feasible.end());
  if (feasible.size() > 64) feasible.resize(64);
  double lowering = 0.0, playing = 0.0;
  std::size_t programs = 0, calls = 0;
  for (const auto& [time, index] : feasible) {
    const Placed& placed = space[index];
    const Job job{
        .graph = &setting.graph,
        .training = setting.training,
        .layout = lay_out(placed.spec, placed.placements),
        .schedule = schedule_of(placed.spec, setting.training),
        .backend = setting.cluster.groups.front().device.backend,
        .overhead = setting.cluster.groups.front().device.memory_overhead};
    std::vector<Program> lowered;
    lowering += seconds_of([&] { lowered = lower_representatives(job); });
    std::vector<CostModel> models;
    for (int stage = 0; stage < placed.spec.pp(); ++stage)
      models.push_back(cost_model(estimator.networks(), placed.spec.mesh, stage));
    playing += seconds_of([&] { simulate(lowered, models); });
    programs += lowered.size();
    for (const Program& program : lowered) calls += program.calls.size();
  }
  const double simulated = static_cast<double>(feasible.size());
  std::printf(
      "  Programs: the best %zu candidates are %zu Programs of %.0f calls; %.0f Programs a second (%.1f ms a candidate "
      "to lower, %.1f to play)\n",
      feasible.size(), programs, static_cast<double>(calls) / static_cast<double>(programs),
      static_cast<double>(programs) / (lowering + playing), 1e3 * lowering / simulated, 1e3 * playing / simulated);
}

// One search of the space of `parplan suggest`, without what that tries with the best layouts, on
// all cores and on one.
void bench_search(const std::string& title, const Setting& setting, const LayoutRequest& request = {},
                  Objective objective = Objective::time) {
  forget_peak();
  SearchOptions options;
  options.objective = objective;
  options.top = 5;
  options.top_each = 1;
  options.threads = 1;
  SearchResult result;
  const auto searched = [&] {
    return search_with_headroom(setting.graph, setting.cluster, setting.training, request, options).found;
  };
  const double one = seconds_of(searched);
  options.threads = 0;
  const double processor = processor_seconds();
  const double all = seconds_of([&] { result = searched(); });
  const double used = processor_seconds() - processor;
  const SearchCounts& counts = result.counts;
  const std::string best = result.plans.empty()
                               ? std::string("nothing fits")
                               : fmt::format("{:.3f} s: {}", result.plans.front().result.time.total().value,
                                             layout_text(result.plans.front().spec));
  std::printf("| %s | %.3f | %.3f | %.3f | %lld | %lld | %lld | %s | %.0f | %s |\n", title.c_str(), one, all, used,
              static_cast<long long>(counts.candidates), static_cast<long long>(counts.infeasible_memory),
              static_cast<long long>(counts.simulated),
              result.plans.empty() ? "-"
              : counts.certified   ? "yes"
                                   : "no",
              peak_mebibytes(), best.c_str());
  std::fflush(stdout);
}

void search_heading(const char* what) {
  std::printf(
      "\n| %s | one thread s | all threads s | processor s | candidates | do not fit | simulated | certified | peak "
      "MiB | best |\n"
      "|---|---|---|---|---|---|---|---|---|---|\n",
      what);
}

// A deep model.
constexpr const char* deep_title = "gpt3-175b's layers, 1,000 of them, 5040 of dgx-h100, batch 15120, 2048 tokens";
Setting deep() {
  Setting setting = setting_of({"gpt3-175b", "dgx-h100", 5040, 15120});
  ModelSpec spec = load_model("gpt3-175b", std::string(PARPLAN_SOURCE_DIR) + "/models").spec;
  spec.layers = 1000;
  setting.graph = build_graph(spec, setting.training.sequence_length);
  return setting;
}

// Long steps.
constexpr const char* long_steps_title = "llama3-70b, 512 of dgx-h100, batch 16384, 131072 tokens, least memory";
Setting long_steps() { return setting_of({"llama3-70b", "dgx-h100", 512, 16384, 131072}); }

void bench_searches() {
  search_heading("search");
  for (const Work& work :
       {Work{"gpt3-175b", "dgx-a100", 64, 64}, Work{"gpt3-175b", "dgx-a100", 64, 512},
        Work{"gpt3-175b", "dgx-a100", 1024, 1536}, Work{"gpt3-175b", "dgx-a100", 4096, 4096},
        Work{"llama3-70b", "dgx-h100", 512, 512}, Work{"llama3-405b", "dgx-h100", 16384, 2048, 8192},
        Work{"llama3-405b", "dgx-h100", 131072, 512, 8192},
        // Numbers of devices that are no powers of two.
        Work{"llama3-70b", "dgx-h100", 1000, 1024, 8192}, Work{"llama3-405b", "dgx-h100", 12000, 2048, 8192}})
    bench_search(fmt::format("{}, {} of {}, batch {}, {} tokens", work.model, work.devices, work.cluster,
                             work.global_batch, setting_of(work).training.sequence_length),
                 setting_of(work));
  // Megatron-Turing NLG (Smith et al. 2022, arXiv:2201.11990, section 2.3), with GPT-3's blocks.
  Setting turing = setting_of({"gpt3-175b", "dgx-a100", 5128, 2520});
  ModelSpec spec = load_model("gpt3-175b", std::string(PARPLAN_SOURCE_DIR) + "/models").spec;
  spec.layers = 105;
  spec.heads = spec.kv_heads = 128;
  spec.head_dim = 160;
  spec.hidden = spec.heads * spec.head_dim;
  spec.feature = 4 * spec.hidden;
  turing.graph = build_graph(spec, turing.training.sequence_length);
  bench_search("530 billion parameters, 5128 of dgx-a100, batch 2520, 2048 tokens", turing);
  bench_search(deep_title, deep());
  bench_search(long_steps_title, long_steps(), {}, Objective::memory);
  // Three kinds of nodes: each choice and order of them is a space.
  for (const char* model : {"llama3-8b", "gpt3-175b"}) {
    Setting mixed = setting_of({model, "dgx-a100", 32, 512});
    for (const char* other : {"dgx-1-v100", "dgx-h100"})
      mixed.cluster.groups.push_back(setting_of({model, other, 32, 512}).cluster.groups.front());
    mixed.training.precision = DataType::fp16;
    bench_search(fmt::format("{}, 32 of dgx-a100, dgx-1-v100 and dgx-h100 each, batch 512, fp16", model), mixed);
  }
}

// The reasons of the plan that `parplan suggest` writes, with all searches of `parplan explain`.
void bench_reasons(const std::string& title, const Setting& setting, Objective objective = Objective::time) {
  SuggestRequest request;
  request.graph = &setting.graph;
  request.model_name = title;
  request.cluster = setting.cluster;
  request.training = setting.training;
  request.options.objective = objective;
  request.options.top = 5;
  request.options.top_each = 1;
  request.options.threads = 1;
  const SuggestResult suggested = suggest(request);
  if (!suggested.plan) return;
  forget_peak();
  const double before = processor_seconds();
  find_reasons(setting.graph, *suggested.plan, {});
  std::printf("| %s | %.3f | %.0f | %s |\n", title.c_str(), processor_seconds() - before, peak_mebibytes(),
              layout_text(suggested.plan->spec).c_str());
  std::fflush(stdout);
}

void bench_reasons() {
  std::printf("\n| explain | processor s | peak MiB | plan |\n|---|---|---|---|\n");
  for (const Work& work : {Work{"gpt3-175b", "dgx-a100", 64, 512}, Work{"llama3-405b", "dgx-h100", 1024, 16384, 8192}})
    bench_reasons(fmt::format("{}, {} of {}, batch {}", work.model, work.devices, work.cluster, work.global_batch),
                  setting_of(work));
  bench_reasons(long_steps_title, long_steps(), Objective::memory);
  bench_reasons(deep_title, deep());
}

// How time grows with devices, layers and techniques.
void bench_growth() {
  search_heading("devices: llama3-70b on dgx-h100, batch 4096, 8192 tokens");
  for (int devices = 8; devices <= 16384; devices *= 2)
    bench_search(fmt::format("{}", devices), setting_of({"llama3-70b", "dgx-h100", devices, 4096, 8192}));

  search_heading("layers: gpt3-175b's on 256 A100, batch 512");
  for (std::int64_t layers = 6; layers <= 768; layers *= 2) {
    Setting setting = setting_of({"gpt3-175b", "dgx-a100", 256, 512});
    ModelSpec spec = load_model("gpt3-175b", std::string(PARPLAN_SOURCE_DIR) + "/models").spec;
    spec.layers = layers;
    setting.graph = build_graph(spec, setting.training.sequence_length);
    bench_search(fmt::format("{}", layers), setting);
  }

  search_heading("techniques: gpt3-175b on 1024 A100, batch 1536");
  const Setting setting = setting_of({"gpt3-175b", "dgx-a100", 1024, 1536});
  LayoutRequest request;
  request[Choice::tp] = request[Choice::pp] = 1;
  request[Choice::zero_stage] = 0;
  request[Choice::schedule] = ScheduleKind::one_f_one_b;
  request[Choice::recompute] = Recompute::none;
  request[Choice::mesh_order] = parse_order("pp-dp-tp");
  bench_search("data parallel", setting, request);
  request[Choice::zero_stage].reset();
  bench_search("+ ZeRO 1 to 3", setting, request);
  request[Choice::recompute].reset();
  bench_search("+ recompute", setting, request);
  request[Choice::tp].reset();
  bench_search("+ tensor and sequence parallel", setting, request);
  request[Choice::pp].reset();
  bench_search("+ pipeline, 1F1B", setting, request);
  request[Choice::schedule].reset();
  bench_search("+ GPipe", setting, request);
  request[Choice::mesh_order].reset();
  bench_search("+ orders of the mesh", setting, request);
}

}  // namespace
}  // namespace parplan

int main() {
  using parplan::Work;
  parplan::bench_searches();
  parplan::bench_reasons();
  parplan::bench_growth();
  // Last: the memory that its lists leave to the allocator would be in the peaks of searches.
  for (const Work& work : {Work{"gpt3-175b", "dgx-a100", 64, 512}, Work{"llama3-70b", "dgx-h100", 512, 512}}) {
    std::printf("\n");
    parplan::bench_estimates(work);
    std::fflush(stdout);
  }
  // Measured on another machine of 2 cores: Calculon's exhaustive search without offload and
  // overlap of communication.
  std::printf(
      "beside: Calculon, gpt3-175b on 64 A100 80 GB, batch up to 64: 419 s of processor for 88,484 candidates (211 a "
      "second)\n");
}
