#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <random>

#include <fmt/format.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/cluster/catalog.h"
#include "planner/parallel/techniques.h"
#include "planner/program/lower.h"
#include "planner/schedule/schedules.h"
#include "planner/search/candidate.h"
#include "planner/search/search.h"
#include "planner/simulator/estimate.h"
#include "planner/suggest.h"

namespace parplan {
namespace {

const std::string source = PARPLAN_SOURCE_DIR;

OpGraph graph_of(const std::string& model, std::int64_t sequence) {
  return build_graph(load_model(source + "/tests/data/models/" + model + ".yaml", "").spec, sequence);
}

Cluster cluster_of(const std::string& name, std::optional<int> devices = {}) {
  return find_cluster(name, {source + "/configs/devices", source + "/configs/clusters"},
                      {.device = {}, .network = {}, .devices = devices, .nodes = {}});
}
Cluster eight_cores() { return cluster_of(source + "/tests/data/clusters/cpu-8.yaml"); }

TrainingSpec training_of(std::int64_t batch, DataType precision) {
  TrainingSpec training;
  training.global_batch = batch;
  training.sequence_length = 16;
  training.precision = precision;
  return training;
}

std::vector<int> random_cut(int blocks, int stages, std::mt19937& random) {
  std::vector<int> cut(static_cast<std::size_t>(stages), 1);
  for (int left = blocks - stages; left > 0; --left) ++cut[random() % cut.size()];
  return cut;
}

std::string describe(const ParallelSpec& spec) {
  return fmt::format("dp {} tp {} pp {} {} sp {} zero {} mb {} {} {}", spec.dp(), spec.tp(), spec.pp(), write_order(spec.mesh.order),
                     spec.sequence_parallel, spec.zero_stage, spec.micro_batch, name(spec.schedule), name(spec.recompute));
}

}  // namespace

TEST_CASE("an estimate has the memory that lowering plans and a bound below the simulated step") {
  std::mt19937 random(3);
  for (const std::string model : {"tiny-gpt2", "tiny-llama", "tiny-mlp"}) {
    const OpGraph graph = graph_of(model, 16);
    for (const Cluster& cluster : {eight_cores(), cluster_of("dgx-a100", 16)}) {
      const bool gpu = cluster.groups.front().device.backend == BackendKind::cuda;
      for (const double clip_norm : {0.0, 1.0}) {
        const std::array precisions = gpu ? std::array{DataType::bf16, DataType::fp16} : std::array{DataType::fp32, DataType::tf32};
        TrainingSpec training = training_of(16, precisions[random() % 2]);
        training.clip_norm = clip_norm;
        Estimator estimator(graph, cluster, training);
        const std::vector<ParallelSpec> specs = enumerate_specs(graph, training, 8, {});
        for (int trial = 0; trial < 40; ++trial) {
          ParallelSpec spec = specs[random() % specs.size()];
          spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.pp(), random);
          INFO(model << " on " << cluster.name << ": " << describe(spec));
          const Placements placements = place(graph, spec);
          const ScheduleRow& row = row_of(spec.schedule);
          const Estimate estimate = estimator.estimate(spec, placements, {row.closed_form, row.in_flight});
          const Schedule schedule = row.actions(spec.pp(), static_cast<int>(micro_batches(spec, training)));
          const StepResult simulated = simulate_spec(graph, estimator.networks(), training, spec, placements, schedule, nullptr);
          CHECK(estimate.memory == simulated.memory);
          CHECK(estimate.lower_bound.value <= simulated.time.total().value * (1 + 1e-12));
        }
      }
    }
  }
}

TEST_CASE("the search finds what simulating every candidate finds") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  const TrainingSpec training = training_of(8, DataType::fp32);
  const Cluster cluster = cluster_of(source + "/tests/data/clusters/cpu-8.yaml", 4);
  LayoutRequest request;
  SearchOptions options;
  options.fewer_devices = false;
  options.most_simulated = 1 << 20;
  const SearchResult found = search(graph, cluster, training, request, options);
  REQUIRE(!found.plans.empty());
  CHECK(found.counts.certified);
  CHECK(!found.counts.gap);
  CHECK(found.counts.candidates == found.counts.infeasible_memory + found.counts.pruned_by_bound + found.counts.simulated);

  // Brute force over the same stage cuts.
  NetworkCache networks(cluster);
  Estimator estimator(graph, cluster, training);
  Seconds best{1e300};
  std::int64_t candidates = 0;
  for (ParallelSpec spec : enumerate_specs(graph, training, 4, request)) {
    const Placements placements = place(graph, spec);
    LayoutRequest fixed;
    spec.stage_blocks = search(graph, cluster, training,
                               {.dp = spec.dp(), .tp = spec.tp(), .pp = spec.pp(), .zero_stage = spec.zero_stage,
                                .micro_batch = spec.micro_batch, .schedule = spec.schedule,
                                .sequence_parallel = spec.sequence_parallel, .recompute = spec.recompute,
                                .order = spec.mesh.order, .stage_blocks = {}},
                               options).plans.at(0).spec.stage_blocks;
    const Schedule schedule = row_of(spec.schedule).actions(spec.pp(), static_cast<int>(micro_batches(spec, training)));
    best = std::min(best, simulate_spec(graph, networks, training, spec, placements, schedule, nullptr).time.total());
    ++candidates;
  }
  CHECK(candidates == found.counts.candidates);
  CHECK(found.plans.front().result.time.total() == best);
}

TEST_CASE("what was not simulated is counted, and the gap says how far it could be") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  const TrainingSpec training = training_of(8, DataType::fp32);
  SearchOptions options;
  options.most_simulated = 1;
  options.top = 1;
  const SearchResult found = search(graph, eight_cores(), training, {}, options);
  REQUIRE(found.plans.size() == 1);
  CHECK(found.counts.simulated == 1);
  if (!found.counts.certified) {
    REQUIRE(found.counts.gap);
    CHECK(*found.counts.gap > 0.0);
  }
}

TEST_CASE("a search gives the same plans every time") {
  const OpGraph graph = graph_of("tiny-llama", 16);
  const TrainingSpec training = training_of(8, DataType::fp32);
  const SearchResult first = search(graph, eight_cores(), training, {}, {});
  const SearchResult second = search(graph, eight_cores(), training, {}, {});
  CHECK(first.plans == second.plans);
}

TEST_CASE("the space holds every factorisation once, and only orders that differ") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  const TrainingSpec training = training_of(4, DataType::fp32);
  LayoutRequest request;
  request.zero_stage = 0;
  request.micro_batch = 1;
  request.recompute = Recompute::none;
  request.schedule = ScheduleKind::gpipe;
  request.sequence_parallel = false;
  const std::vector<ParallelSpec> specs = enumerate_specs(graph, training, 4, request);
  // dp4; tp4; pp4; dp2tp2, dp2pp2, tp2pp2 in two orders each.
  CHECK(specs.size() == 3 + 3 * 2);
  for (const ParallelSpec& spec : specs) {
    CHECK(spec.mesh.size() == 4);
    CHECK(std::count(specs.begin(), specs.end(), spec) == 1);
  }
}

TEST_CASE("when nothing fits, what would fit is named and does") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  SuggestRequest request;
  request.graph = &graph;
  request.model_name = "tiny-gpt2";
  request.cluster = eight_cores();
  request.training = training_of(8, DataType::fp32);
  request.options.memory_limit = Bytes(100'000);
  const SuggestResult none = suggest(request);
  CHECK(!none.plan);
  REQUIRE(!none.changes.empty());
  const SearchResult failed = search(graph, request.cluster, request.training, {}, request.options);
  REQUIRE(failed.smallest);
  CHECK(none.changes.front().starts_with(format_bytes(failed.smallest->result.memory.peak()) + " of memory a device instead of"));
  request.options.memory_limit = failed.smallest->result.memory.peak();
  CHECK(suggest(request).plan);
}

// Closed forms of what a plan keeps and sends (those of time stand in tests/planner/{cost,schedule,simulator}). --------

TEST_CASE("ZeRO's memory follows its closed form") {
  // Rajbhandari et al. 2020, section 3: with P parameters over N ranks, in fp32 here (4 + 4 + 8 bytes a parameter):
  //   stage 0: 16 P; 1: 8 P + 8 P / N; 2: 4 P + 12 P / N; 3: 16 P / N. Buckets of tiny-llama are multiples of 16 N elements
  //   at N = 2, so nothing is padded but each of the 6 buffers of a part, to 256 bytes.
  const OpGraph graph = graph_of("tiny-llama", 16);
  const std::int64_t whole = 4 * parameter_count(graph);
  const TrainingSpec training = training_of(8, DataType::fp32);
  const auto is = [](Bytes memory, std::int64_t closed_form, int parts) {
    return memory.count >= closed_form && memory.count < closed_form + 256 * 6 * parts;
  };
  for (int zero = 0; zero <= 3; ++zero) {
    ParallelSpec spec;
    spec.mesh.degree = {1, 2, 1};
    spec.zero_stage = zero;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    const Job job{.graph = &graph, .training = training, .spec = spec, .placements = place(graph, spec),
                  .schedule = row_of(spec.schedule).actions(1, 4), .backend = BackendKind::cpu, .overhead = {}};
    const MemoryUse memory = lower(job, 0).memory;
    CHECK(is(memory.parameters, zero >= 3 ? whole / 2 : whole, 1));
    CHECK(is(memory.gradients, zero >= 2 ? whole / 2 : whole, 1));
    CHECK(is(memory.optimizer, zero >= 1 ? whole : 2 * whole, 2));
  }
}

TEST_CASE("data-parallel and tensor-parallel bytes follow their closed forms") {
  const OpGraph graph = graph_of("tiny-llama", 16);
  const TrainingSpec training = training_of(8, DataType::fp32);
  const auto lowered = [&](int dp, int tp, bool sequence_parallel, int zero) {
    ParallelSpec spec;
    spec.mesh.degree = {1, dp, tp};
    spec.sequence_parallel = sequence_parallel;
    spec.zero_stage = zero;
    spec.micro_batch = 8 / dp;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    const Job job{.graph = &graph, .training = training, .spec = spec, .placements = place(graph, spec),
                  .schedule = row_of(spec.schedule).actions(1, 1), .backend = BackendKind::cpu, .overhead = {}};
    return lower(job, 0).communication;
  };
  const std::int64_t parameters_bytes = 4 * parameter_count(graph);
  // An all-reduce sends 2 (n - 1) / n of the buffer, which is all of it over two ranks; reduce-scatter and all-gather
  // half each. Stage 3 gathers the parameters for forward and backward. The loss's one element makes rank 0 send 4 bytes.
  CHECK(lowered(2, 1, false, 0).data.count == parameters_bytes + 4);
  CHECK(lowered(2, 1, false, 1).data.count == parameters_bytes + 4);
  CHECK(lowered(2, 1, false, 2).data.count == parameters_bytes + 4);
  CHECK(lowered(2, 1, false, 3).data.count == 3 * parameters_bytes / 2 + 4);

  // Megatron (Shoeybi et al. 2019): two all-reduces of s b h forward and two backward in each of 4 layers, one forward
  // for the embedding, one backward for the head: 18, each sending 2 (n - 1) / n = 1 times 16 x 8 x 32 x 4 bytes over
  // two ranks. The vocabulary-parallel loss sends a maximum and two sums a token: 3 x 16 x 8 x 4 bytes.
  const std::int64_t activation = 16 * 8 * 32 * 4;
  const std::int64_t loss_terms = 3 * 16 * 8 * 4;
  CHECK(lowered(1, 2, false, 0).tensor.count == 18 * activation + loss_terms);
  // Korthikanti et al. 2022: with sequence parallelism an all-gather and a reduce-scatter stand for each all-reduce, and
  // the backward gathers each of the layer's two inputs (and the head's) once more for the weight gradients: per layer
  // 4 x 2 / 2 + 2 / 2 activations; embedding: 1/2 forward, 1/2 backward; head: 1/2 forward, 1/2 again and 1/2 backward.
  // At the end the norms' gradients (9 of 32 elements, each 4 bytes) are all-reduced.
  const std::int64_t norms = 9 * 32 * 4;
  CHECK(lowered(1, 2, true, 0).tensor.count == 4 * 5 * activation + activation + 3 * activation / 2 + loss_terms + norms);
}

}  // namespace parplan
