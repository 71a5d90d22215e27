#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/cluster/catalog.h"
#include "planner/cluster/node_layout.h"
#include "planner/parallel/techniques.h"
#include "planner/program/lower.h"
#include "planner/schedule/schedules.h"
#include "planner/search/candidates.h"
#include "planner/search/device_count_bound.h"
#include "planner/search/search.h"
#include "planner/search/simulate_spec.h"
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
  return fmt::format("dp {} tp {} pp {} {} sp {} zero {} mb {} {} {}", spec.dp(), spec.tp(), spec.pp(),
                     write_order(spec.mesh.order), spec.sequence_parallel, spec.zero_stage, spec.micro_batch,
                     name(spec.schedule), name(spec.recompute));
}

}  // namespace

// A decoder with random sizes.
OpGraph random_graph(std::mt19937& random, std::int64_t sequence) {
  const auto pick = [&](std::initializer_list<int> from) { return from.begin()[random() % from.size()]; };
  ModelSpec spec =
      load_model(source + "/tests/data/models/" + (random() % 2 ? "tiny-gpt2" : "tiny-llama") + ".yaml", "").spec;
  spec.layers = pick({1, 2, 3, 4, 5, 8});
  spec.kv_heads = spec.kv_heads == spec.heads ? 4 : 2;
  spec.heads = 4;
  spec.head_dim = pick({8, 64});
  spec.hidden = pick({32, 512, 4096});
  spec.feature = spec.hidden * pick({1, 4});
  spec.vocabulary = pick({61, 5000, 50257});
  spec.tied_embeddings = random() % 2;
  return build_graph(spec, sequence);
}

// Nodes and devices with random speeds, with and without levels above the nodes and rails; two
// kinds if `unlike`.
Cluster random_cluster(std::mt19937& random, bool gpu, bool unlike) {
  const auto upto = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most)); };
  Cluster cluster = gpu ? cluster_of("dgx-a100", 8 * (2 + upto(2))) : eight_cores();
  if (gpu && upto(3) == 0) {
    NodeGroup& group = cluster.groups.front();
    group.node = first_devices(group.node, 1 + upto(2));
    group.nodes = 6;
  }
  if (gpu && upto(2) == 0) {
    cluster.network.levels = {
        {.name = "leaf", .nodes = 2 + upto(2), .oversubscription = 1.0 + upto(2), .latency = Seconds(1e-6)},
        {.name = "spine", .nodes = {}, .oversubscription = std::exp2(upto(7)), .latency = Seconds(5e-6)}};
    cluster.network.rails = upto(2) == 0;
  }
  if (unlike) {
    cluster.groups.push_back(cluster.groups.front());
    for (NodeGroup& group : cluster.groups) group.nodes = 1;
    cluster.groups[1].device.name = "other";
    cluster.groups[1].device.memory_capacity = Bytes(20'000'000'000);
  }
  const auto factor = [&] { return std::exp2(std::uniform_real_distribution<double>(-6.0, 3.0)(random)); };
  for (NodeGroup& group : cluster.groups) {
    group.device.kernel_launch *= factor();
    for (DeviceRates& rates : group.device.rates) {
      rates.matrix_half *= factor();
      rates.matrix_fp32 *= factor();
      rates.vector *= factor();
      rates.memory *= factor();
    }
    const double inside = factor(), outside = factor();
    for (Link& link : group.node.links) {
      link.bandwidth *= link.kind == "network" ? outside : inside;
      link.latency *= inside;
    }
  }
  return cluster;
}

TEST_CASE("an estimate has the memory that lowering plans and bounds below the simulated step, for every objective") {
  std::mt19937 random(3);
  double gaps = 0.0;
  int count = 0;
  for (int setting = 0; setting < 300; ++setting) {
    const bool gpu = setting % 4 != 0;
    const OpGraph graph = setting % 10 == 0 ? graph_of("tiny-mlp", 16) : random_graph(random, 16);
    const Cluster cluster = random_cluster(random, gpu, gpu && setting % 4 == 1);
    const std::array precisions =
        gpu ? std::array{DataType::bf16, DataType::fp16} : std::array{DataType::fp32, DataType::tf32};
    TrainingSpec training = training_of(16, precisions[random() % 2]);
    training.clip_norm = setting % 2;
    training.optimizer = setting % 7 == 0 ? Optimizer::sgd : Optimizer::adamw;
    if (setting % 14 == 0) training.momentum = 0.9;
    Estimator estimator(graph, cluster, training);
    const DeviceCountBound floor(graph, cluster, training);
    const std::vector<ParallelSpec> specs = enumerate_specs(
        graph, training, cluster.groups.size() > 1 || setting % 2 ? cluster.devices() : std::min(8, cluster.devices()),
        {});
    REQUIRE(!specs.empty());
    for (int trial = 0; trial < 40; ++trial) {
      ParallelSpec spec = specs[random() % specs.size()];
      spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.pp(), random);
      if (spec.pp() > 1 && trial % 4 == 0) {
        spec.recompute = Recompute::per_stage;
        for (int s = 0; s < spec.pp(); ++s)
          spec.stage_recompute.push_back(random() % 2 ? Recompute::full : Recompute::none);
      }
      INFO("setting " << setting << " on " << cluster.name << ": " << describe(spec));
      const Placements placements = place(graph, spec);
      const ScheduleRow& row = row_of(spec.schedule);
      const Estimate estimate = estimator.estimate(spec, placements, forms_of(row));
      const Schedule schedule = row.actions({spec.pp(), static_cast<int>(micro_batches(spec, training))});
      const StepResult simulated =
          simulate_spec(graph, estimator.networks(), training, spec, placements, schedule, nullptr);
      INFO("bound " << estimate.lower_bound.value << " s, simulated " << simulated.time.total().value
                    << " s; sequential " << !cluster.groups.front().device.overlaps_communication << " cut "
                    << fmt::format("{}", fmt::join(spec.stage_blocks, ",")) << " clip " << training.clip_norm);
      CHECK(estimate.memory == simulated.memory);
      CHECK(estimate.memory_stage == simulated.memory_stage);
      CHECK(estimate.time.total().value == doctest::Approx(estimate.lower_bound.value).epsilon(1e-9));
      for (const Objective objective : {Objective::time, Objective::cost, Objective::memory}) {
        const Score bound = score(objective, cluster, spec, estimate.lower_bound, estimate.memory);
        const Score reached = score(objective, cluster, spec, simulated.time.total() * (1 + 1e-12), simulated.memory);
        CHECK(bound <= reached);
        MemoryUse least;
        least.parameters = floor.memory(spec.mesh.size());
        CHECK(score(objective, cluster, spec, floor.time(spec.mesh.size()), least) <= reached);
      }
      if (floor.lacks_room(spec.mesh.size())) CHECK(estimate.spare < Bytes(0));
      const Bound bounded = estimator.bound(spec, placements, forms_of(row));
      CHECK(bounded.memory == estimate.memory);
      CHECK(bounded.spare == estimate.spare);
      if (bounded.spare >= Bytes(0)) CHECK(bounded.lower_bound == estimate.lower_bound);
      // A row without a closed form is played: the bound is no lower, and still a bound.
      ScheduleForms played = forms_of(row);
      played.closed_form = nullptr;
      const Seconds played_bound = estimator.estimate(spec, placements, played).lower_bound;
      CHECK(played_bound >= estimate.lower_bound * (1 - 1e-12));
      CHECK(played_bound <= simulated.time.total() * (1 + 1e-12));
      if (!cluster.network.levels.empty()) continue;
      gaps += simulated.time.total() / estimate.lower_bound - 1.0;
      ++count;
    }
  }
  MESSAGE("simulated over bound: " << 100.0 * gaps / count << "% above on average");
  CHECK(gaps / count < 0.3);
}

namespace {

// Megatron-LM's interleaved order (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2): chunks
// of the model in turns of as many micro-batches as there are ranks, which divides their number.
Schedule interleaved_actions(const PipelineShape& shape) {
  const int ranks = shape.ranks, chunks = shape.stages / ranks, all = shape.micro_batches * chunks;
  Schedule schedule{.rank_of_stage = {}, .ranks = std::vector<std::vector<Action>>(static_cast<std::size_t>(ranks))};
  for (int stage = 0; stage < shape.stages; ++stage) schedule.rank_of_stage.push_back(ring_rank(stage, shape));
  for (int rank = 0; rank < ranks; ++rank) {
    const auto list = [&](int turn, Phase phase) {
      const int of_round = turn % shape.stages, chunk = of_round / ranks;
      schedule.ranks[rank].push_back({(phase == Phase::forward ? chunk : chunks - 1 - chunk) * ranks + rank, phase,
                                      turn / shape.stages * ranks + of_round % ranks});
    };
    const int warm_up = std::min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, all);
    for (int turn = 0; turn < warm_up; ++turn) list(turn, Phase::forward);
    for (int turn = warm_up; turn < all; ++turn) {
      list(turn, Phase::forward);
      list(turn - warm_up, Phase::backward);
    }
    for (int turn = all - warm_up; turn < all; ++turn) list(turn, Phase::backward);
  }
  return schedule;
}

}  // namespace

TEST_CASE("an estimate has the memory and a bound of ranks that hold several stages, too") {
  std::mt19937 random(7);
  const ScheduleForms interleaved{
      .closed_form = nullptr,
      .in_flight =
          [](int rank, const PipelineShape& shape) { return most_in_flight(interleaved_actions(shape).ranks[rank]); },
      .actions = interleaved_actions};
  int tried = 0;
  for (int setting = 0; setting < 150; ++setting) {
    const bool gpu = setting % 4 != 0;
    const OpGraph graph = random_graph(random, 16);
    const Cluster cluster = random_cluster(random, gpu, gpu && setting % 4 == 1);
    TrainingSpec training = training_of(32, gpu ? DataType::bf16 : DataType::fp32);
    training.clip_norm = setting % 2;
    Estimator estimator(graph, cluster, training);
    const std::vector<ParallelSpec> specs =
        enumerate_specs(graph, training, setting % 4 == 1 ? cluster.devices() : std::min(8, cluster.devices()), {});
    const int blocks = static_cast<int>(graph.blocks.size());
    for (int trial = 0; trial < 40; ++trial) {
      ParallelSpec spec = specs[random() % specs.size()];
      const int chunks = 2 + static_cast<int>(random() % 2), stages = spec.pp() * chunks;
      if (spec.pp() < 2 || stages > blocks || micro_batches(spec, training) % spec.pp() != 0) continue;
      spec.stage_blocks = random_cut(blocks, stages, random);
      if (trial % 4 == 0) {
        spec.recompute = Recompute::per_stage;
        for (int s = 0; s < stages; ++s)
          spec.stage_recompute.push_back(random() % 2 ? Recompute::full : Recompute::none);
      }
      const Schedule schedule = interleaved_actions(shape_of(spec, training));
      INFO("setting " << setting << " on " << cluster.name << ": " << describe(spec) << " cut "
                      << fmt::format("{}", fmt::join(spec.stage_blocks, ",")));
      // Ranks that carry out their own communication need more exchange buffers for it.
      if (find_fault(schedule, static_cast<int>(micro_batches(spec, training)))) continue;
      ++tried;
      const Placements placements = place(graph, spec);
      const Estimate estimate = estimator.estimate(spec, placements, interleaved);
      const StepResult simulated =
          simulate_spec(graph, estimator.networks(), training, spec, placements, schedule, nullptr);
      INFO("bound " << estimate.lower_bound.value << " s, simulated " << simulated.time.total().value << " s");
      CHECK(estimate.memory == simulated.memory);
      CHECK(estimate.memory_stage == simulated.memory_stage);
      CHECK(estimate.lower_bound <= simulated.time.total() * (1 + 1e-12));
      CHECK(estimate.time.total().value == doctest::Approx(estimate.lower_bound.value).epsilon(1e-9));
    }
  }
  MESSAGE(tried << " layouts");
  CHECK(tried > 100);
}

namespace {

// The lower bound over the simulated step, for one layout.
double bound_over_simulated(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                            const ParallelSpec& spec) {
  REQUIRE(!illegal(graph, training, spec));
  Estimator estimator(graph, cluster, training);
  const Placements placements = place(graph, spec);
  const ScheduleRow& row = row_of(spec.schedule);
  const Estimate estimate = estimator.estimate(spec, placements, forms_of(row));
  const StepResult simulated =
      simulate_spec(graph, estimator.networks(), training, spec, placements,
                    row.actions({spec.pp(), static_cast<int>(micro_batches(spec, training))}), nullptr);
  return estimate.lower_bound / simulated.time.total();
}

}  // namespace

TEST_CASE(
    "the bound does not count a tied parameter's reduction before the first block, whose buffer waits for the third "
    "block's own alone") {
  ModelSpec model = load_model(source + "/tests/data/models/tiny-gpt2.yaml", "").spec;
  model.layers = 4;
  model.vocabulary = 50257;
  model.tied_embeddings = true;
  const OpGraph graph = build_graph(model, 16);
  Cluster cluster = cluster_of("dgx-a100", 8);
  for (Link& link : cluster.groups.front().node.links) link.bandwidth *= 1.0 / 64;  // reductions dominate
  const TrainingSpec training = training_of(16, DataType::bf16);
  ParallelSpec spec;
  spec.mesh.degree = {.pp = 2, .dp = 4};
  spec.zero_stage = 2;
  for (const std::vector<int>& cut : {std::vector{3, 3}, {2, 4}, {4, 2}}) {
    spec.stage_blocks = cut;
    CHECK(bound_over_simulated(graph, cluster, training, spec) <= 1 + 1e-12);
  }
}

TEST_CASE("the bound knows boundaries between stages that lie nearer to each other than the first") {
  // Racks of four nodes, one node per stage, two replicas of three stages: 0 1 2 | 3 in the first
  // rack, 4 5 in the second.
  ModelSpec model = load_model(source + "/tests/data/models/tiny-llama.yaml", "").spec;
  model.layers = 1;
  model.heads = model.kv_heads = 8;
  model.head_dim = 64;
  model.hidden = 4096;
  model.feature = 4096;
  const OpGraph graph = build_graph(model, 2048);
  Cluster cluster = cluster_of("dgx-a100", 8 * 6);
  cluster.network.levels = {{.name = "leaf", .nodes = 4, .oversubscription = 1.0, .latency = Seconds(1e-6)},
                            {.name = "spine", .nodes = {}, .oversubscription = 64.0, .latency = Seconds(5e-6)}};
  TrainingSpec training = training_of(64, DataType::bf16);
  training.sequence_length = 2048;
  bool differ = false;
  for (const AxisOrder& order :
       {AxisOrder{Axis::dp, Axis::pp, Axis::tp}, AxisOrder{Axis::pp, Axis::dp, Axis::tp}})
    for (const ScheduleRow& row : schedule_rows())
      for (const int micro_batch : {1, 32}) {
        ParallelSpec spec;
        spec.mesh = {.degree = {.pp = 3, .dp = 2, .tp = 8}, .order = order};
        spec.micro_batch = micro_batch;
        spec.schedule = row.kind;
        spec.stage_blocks = {1, 1, 1};
        differ = differ || !(stage_network(cluster, spec.mesh, 0, 1) == stage_network(cluster, spec.mesh, 1, 2));
        CHECK(bound_over_simulated(graph, cluster, training, spec) <= 1 + 1e-12);
      }
  CHECK(differ);
}

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
      const std::optional<StepResult> extended = simulate_steady(graph, cluster, training, spec, placements, models);
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

// Every cut of `blocks` into `stages` runs.
std::vector<std::vector<int>> all_cuts(int blocks, int stages) {
  if (stages == 1) return {{blocks}};
  std::vector<std::vector<int>> cuts;
  for (int first = 1; first <= blocks - stages + 1; ++first)
    for (std::vector<int> rest : all_cuts(blocks - first, stages - 1)) {
      rest.insert(rest.begin(), first);
      cuts.push_back(std::move(rest));
    }
  return cuts;
}

TEST_CASE("the search finds what simulating every candidate with every cut finds") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  const int blocks = static_cast<int>(graph.blocks.size());
  for (const bool gpu : {false, true})
    for (const bool tight : {false, true}) {
      const TrainingSpec training = training_of(8, gpu ? DataType::bf16 : DataType::fp32);
      Cluster cluster = gpu ? cluster_of("dgx-a100", 4) : cluster_of(source + "/tests/data/clusters/cpu-8.yaml", 4);
      LayoutRequest request;
      SearchOptions options;
      options.fewer_devices = false;
      options.most_simulated = 1 << 20;
      options.top = 3;

      // Brute force: every spec, every cut, every choice of stages that recompute; those that fit
      // are simulated.
      NetworkCache networks(cluster);
      struct Tried {
        ParallelSpec spec;
        StepResult result;
      };
      std::vector<Tried> all;
      for (ParallelSpec spec : enumerate_specs(graph, training, 4, request)) {
        const Placements placements = place(graph, spec);
        const Schedule schedule =
            row_of(spec.schedule).actions({spec.pp(), static_cast<int>(micro_batches(spec, training))});
        for (const std::vector<int>& cut : all_cuts(blocks, spec.pp())) {
          ParallelSpec one = spec;
          one.stage_blocks = cut;
          const StepResult result = simulate_spec(graph, networks, training, one, placements, schedule, nullptr);
          all.push_back({one, result});
          if (spec.recompute != Recompute::none) continue;
          one.recompute = Recompute::per_stage;
          for (int bits = 1; bits + 1 < 1 << spec.pp(); ++bits) {
            one.stage_recompute.clear();
            for (int s = 0; s < spec.pp(); ++s)
              one.stage_recompute.push_back(bits >> s & 1 ? Recompute::full : Recompute::none);
            all.push_back({one, simulate_spec(graph, networks, training, one, placements, schedule, nullptr)});
          }
        }
      }
      // Tight: the largest memory for which no plan fits without recompute, and less than a tenth
      // of all plans fit.
      std::ranges::sort(all, {}, [](const Tried& one) { return one.result.memory.peak(); });
      const Bytes limit =
          tight ? all[all.size() / 10].result.memory.peak() : cluster.groups.front().device.memory_capacity;
      cluster.groups.front().device.memory_capacity = limit;

      for (const Objective objective : {Objective::time, Objective::cost, Objective::memory}) {
        const auto score_of = [&](const ParallelSpec& spec, const StepResult& result) {
          return score(objective, cluster, spec, result.time.total(), result.memory);
        };
        Score best{std::numeric_limits<double>::infinity(), 0.0};
        for (const auto& [spec, result] : all)
          if (result.memory.peak() <= limit) best = std::min(best, score_of(spec, result));
        options.objective = objective;
        const SearchResult found = search(graph, cluster, training, request, options);
        INFO(name(objective) << " on " << (gpu ? "gpu" : "cpu") << (tight ? ", tight" : "") << ": "
                             << found.counts.simulated << " of " << found.counts.candidates << " simulated, "
                             << all.size() << " by brute force");
        REQUIRE(!found.plans.empty());
        CHECK(found.counts.certified);
        CHECK(!found.counts.gap);
        CHECK(score_of(found.plans.front().spec, found.plans.front().result) == best);
        for (const RankedPlan& plan : found.plans) CHECK(plan.result.memory.peak() <= limit);
      }
    }
}

TEST_CASE("plans on fewer devices are looked into where more do not pay: whole nodes, and what given degrees allow") {
  const OpGraph graph = build_graph(load_model(source + "/models/gpt2.yaml", "").spec, 1024);
  TrainingSpec training = training_of(16, DataType::fp16);
  training.sequence_length = 1024;
  SearchOptions options;
  options.top = 1;
  // Slow NICs: one of four nodes is faster than all.
  const SearchResult found = search(graph, cluster_of("azure-ndv2", 32), training, {}, options);
  REQUIRE(found.counts.certified);
  const SearchResult alone = search(graph, cluster_of("azure-ndv2", 8), training, {}, options);
  CHECK(found.plans.front().result.time.total() <= alone.plans.front().result.time.total());
  CHECK(found.plans.front().spec.mesh.size() == 8);
  // Three nodes with 8 ranks each.
  LayoutRequest three;
  three[Choice::dp] = 3;
  three[Choice::tp] = 4;
  training.global_batch = 24;
  const SearchResult given = search(graph, cluster_of("dgx-a100", 64), training, three, options);
  REQUIRE(!given.plans.empty());
  CHECK(given.plans.front().spec.mesh.size() % 12 == 0);
}

TEST_CASE("numbers of devices are left out only where their floor says that none of their plans is better") {
  const OpGraph graph = graph_of("tiny-llama", 16);
  for (const Objective objective : {Objective::time, Objective::cost, Objective::memory})
    for (const std::int64_t batch : {8, 48, 4096}) {
      INFO(name(objective) << ", batch " << batch);
      const TrainingSpec training = training_of(batch, DataType::bf16);
      const Cluster cluster = cluster_of("dgx-a100", 24);
      SearchOptions options;
      options.objective = objective;
      options.most_simulated = 1 << 20;
      const SearchResult found = search(graph, cluster, training, {}, options);
      REQUIRE(found.counts.certified);
      CHECK(found.counts.candidates >=
            found.counts.infeasible_memory + found.counts.pruned_by_bound + found.counts.simulated);
      options.fewer_devices = false;
      const auto score_of = [&](const RankedPlan& plan) {
        return score(objective, cluster, plan.spec, plan.result.time.total(), plan.result.memory);
      };
      for (const int devices : {24, 16, 8, 6, 4, 3, 2, 1}) {
        const SearchResult one = search(graph, cluster_of("dgx-a100", devices), training, {}, options);
        for (std::size_t i = 0; i < one.plans.size(); ++i)
          if (found.plans.size() == static_cast<std::size_t>(options.top))
            CHECK(score_of(found.plans[i]) <= score_of(one.plans[i]));
      }
    }
}

TEST_CASE("a search goes on beyond its usual number of simulations while that is little work") {
  const OpGraph graph = build_graph(load_model(source + "/models/gpt2.yaml", "").spec, 1024);
  TrainingSpec training = training_of(16, DataType::fp16);
  training.sequence_length = 1024;
  SearchOptions options;
  const SearchResult usual = search(graph, cluster_of("azure-ndv2", 32), training, {}, options);
  options.most_simulated = 64;
  const SearchResult limited = search(graph, cluster_of("azure-ndv2", 32), training, {}, options);
  CHECK(usual.counts.certified);
  CHECK(usual.counts.simulated > limited.counts.simulated);
  CHECK(!limited.counts.certified);
}

TEST_CASE("where some cut fits, a layout is a candidate with one that does") {
  ModelSpec model = load_model(source + "/tests/data/models/tiny-gpt2.yaml", "").spec;
  model.layers = 10;
  model.vocabulary = 5000;  // the head's logits are large beside a layer
  const OpGraph graph = build_graph(model, 32);
  for (const int stages : {4, 6})
    for (const int zero : {0, 2})
      for (const Recompute recompute : {Recompute::none, Recompute::full}) {
        ParallelSpec spec;
        spec.mesh.degree = {.pp = stages, .dp = 2};
        spec.zero_stage = zero;
        spec.recompute = recompute;
        spec.micro_batch = 2;
        TrainingSpec training = training_of(64, DataType::bf16);
        training.sequence_length = 32;
        Cluster cluster = cluster_of("dgx-a100", 16);
        cluster.groups.front().device.memory_overhead = Bytes(0);
        CandidateMaker maker(graph, cluster, training);
        const ScheduleRow& row = row_of(spec.schedule);
        Bytes least(std::numeric_limits<std::int64_t>::max());
        for (const std::vector<int>& cut : all_cuts(static_cast<int>(graph.blocks.size()), stages)) {
          ParallelSpec one = spec;
          one.stage_blocks = cut;
          least = std::min(least, maker.estimator()
                                      .estimate(one, maker.placements_of(one), forms_of(row))
                                      .memory.peak());
        }
        for (const double room : {1.0, 1.01, 1.05, 1.2}) {
          cluster.groups.front().device.memory_capacity =
              Bytes(static_cast<std::int64_t>(static_cast<double>(least.count) * room));
          std::vector<Candidate> candidates;
          CandidateMaker(graph, cluster, training).add(spec, false, candidates);
          INFO(describe(spec) << ", " << room);
          CHECK(std::ranges::any_of(candidates,
                                    [](const Candidate& candidate) { return candidate.bound.spare.count >= 0; }));
        }
        cluster.groups.front().device.memory_capacity = least - Bytes(1);
        std::vector<Candidate> candidates;
        CandidateMaker(graph, cluster, training).add(spec, false, candidates);
        CHECK(std::ranges::none_of(candidates,
                                   [](const Candidate& candidate) { return candidate.bound.spare.count >= 0; }));
      }
}

TEST_CASE("plans that differ only in the order of axes with equal links are ranked once") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  const TrainingSpec training = training_of(8, DataType::bf16);
  const Cluster cluster = cluster_of("dgx-a100", 8);  // around one switch every order is the same
  SearchOptions options;
  options.top = 40;
  options.most_simulated = 1 << 20;
  const SearchResult found = search(graph, cluster, training, {}, options);
  REQUIRE(found.plans.size() == 40);
  CHECK(found.counts.certified);
  for (std::size_t i = 0; i < found.plans.size(); ++i) {
    if (i > 0) CHECK(found.plans[i - 1].result.time.total() <= found.plans[i].result.time.total());
    for (std::size_t j = 0; j < i; ++j) {
      ParallelSpec same_order = found.plans[j].spec;
      same_order.mesh.order = found.plans[i].spec.mesh.order;
      CHECK(!(same_order == found.plans[i].spec));
    }
  }
  CHECK(found.counts.candidates ==
        found.counts.infeasible_memory + found.counts.pruned_by_bound + found.counts.simulated);
}

TEST_CASE("a given cut is taken for as many stages as it has alone, and a given schedule where there is a pipeline") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  const TrainingSpec training = training_of(8, DataType::bf16);
  LayoutRequest request;
  request[Choice::stage_blocks] = std::vector{1, static_cast<int>(graph.blocks.size()) - 1};
  for (const ParallelSpec& spec : enumerate_specs(graph, training, 8, request)) CHECK(spec.pp() == 2);
  CHECK(!enumerate_specs(graph, training, 8, request).empty());
  request[Choice::stage_blocks] = std::vector{1, static_cast<int>(graph.blocks.size())};
  CHECK(enumerate_specs(graph, training, 8, request).empty());

  LayoutRequest gpipe;
  gpipe[Choice::schedule] = ScheduleKind::gpipe;
  for (const ParallelSpec& spec : enumerate_specs(graph, training, 8, gpipe))
    CHECK(spec.schedule == (spec.pp() > 1 ? ScheduleKind::gpipe : ScheduleKind::one_f_one_b));
}

TEST_CASE("the best plan by memory has the least memory that any candidate needs, by cost the least cost") {
  const OpGraph graph = graph_of("tiny-llama", 16);
  const TrainingSpec training = training_of(8, DataType::bf16);
  Cluster cluster = cluster_of("dgx-a100", 8);
  SearchOptions options;
  options.objective = Objective::memory;
  const SearchResult by_memory = search(graph, cluster, training, {}, options);
  REQUIRE(by_memory.counts.certified);
  options.objective = Objective::cost;
  const SearchResult by_cost = search(graph, cluster, training, {}, options);
  REQUIRE(by_cost.counts.certified);
  options.objective = Objective::time;
  options.top = 1000;
  options.most_simulated = 1000;
  const SearchResult by_time = search(graph, cluster, training, {}, options);
  for (const RankedPlan& plan : by_time.plans) {
    CHECK(by_memory.plans.front().result.memory.peak() <= plan.result.memory.peak());
    const auto device_seconds = [](const RankedPlan& one) {
      return one.result.time.total() * static_cast<double>(one.spec.mesh.size());
    };
    CHECK(device_seconds(by_cost.plans.front()) <= device_seconds(plan));
  }
  // Such a small model wastes most of eight GPUs: the cheapest step takes fewer.
  CHECK(by_cost.plans.front().spec.mesh.size() < by_time.plans.front().spec.mesh.size());
}

TEST_CASE("slow devices get fewer layers, and each stage is held against its own devices' memory") {
  const OpGraph graph = build_graph(load_model(source + "/models/gpt2-xl.yaml", "").spec, 1024);
  TrainingSpec training = training_of(64, DataType::bf16);
  training.sequence_length = 1024;
  Cluster cluster = cluster_of("dgx-a100", 16);
  cluster.groups.push_back(cluster.groups.front());
  for (NodeGroup& group : cluster.groups) group.nodes = 1;
  DeviceKind& slow = cluster.groups[1].device;
  slow.name = "half";
  for (DeviceRates& rates : slow.rates) {
    rates.matrix_half *= 0.5;
    rates.vector *= 0.5;
    rates.memory *= 0.5;
  }
  slow.peak_half *= 0.5;
  slow.memory_capacity = Bytes(slow.memory_capacity.count / 2);
  const LayoutRequest two{{Choice::dp, 8},
                          {Choice::tp, 1},
                          {Choice::pp, 2},
                          {Choice::zero_stage, 1},
                          {Choice::micro_batch, 1},
                          {Choice::schedule, ScheduleKind::one_f_one_b},
                          {Choice::sequence_parallel, false},
                          {Choice::recompute, Recompute::full},
                          {Choice::mesh_order, AxisOrder{Axis::pp, Axis::dp, Axis::tp}}};
  const SearchResult found = search(graph, cluster, training, two, {});
  REQUIRE(!found.plans.empty());
  const std::vector<int>& blocks = found.plans.front().spec.stage_blocks;
  // Twice as fast devices get about twice as many of the 48 layers; the head counts for the second
  // stage.
  CHECK(blocks[0] >= 31);
  CHECK(blocks[0] <= 36);
  // The other way round, the slow ones first.
  std::swap(cluster.groups[0], cluster.groups[1]);
  const std::vector<int> other = search(graph, cluster, training, two, {}).plans.front().spec.stage_blocks;
  CHECK(other[0] >= 15);
  CHECK(other[0] <= 20);
}

TEST_CASE("what was not simulated is counted, and the gap says how far it could be") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  const TrainingSpec training = training_of(8, DataType::fp32);
  SearchOptions options;
  options.top = 1;
  const SearchResult best = search(graph, eight_cores(), training, {}, options);
  REQUIRE(best.counts.certified);
  REQUIRE(best.counts.simulated > 1);
  options.most_simulated = 1;
  const SearchResult found = search(graph, eight_cores(), training, {}, options);
  REQUIRE(found.plans.size() == 1);
  REQUIRE(!found.counts.certified);
  CHECK(found.counts.simulated == 1);
  CHECK(found.counts.candidates >
        found.counts.infeasible_memory + found.counts.pruned_by_bound + found.counts.simulated);
  // The gap covers what is really left.
  REQUIRE(found.counts.gap);
  CHECK(*found.counts.gap > 0.0);
  CHECK(best.plans.front().result.time.total() * (1 + *found.counts.gap) >= found.plans.front().result.time.total());
}

TEST_CASE("a search gives the same plans every time") {
  const OpGraph graph = graph_of("tiny-llama", 16);
  const TrainingSpec training = training_of(8, DataType::fp32);
  const SearchResult first = search(graph, eight_cores(), training, {}, {});
  const SearchResult second = search(graph, eight_cores(), training, {}, {});
  CHECK(first.plans == second.plans);
  for (const int threads : {1, 2, 3, 8}) {
    SearchOptions options;
    options.threads = threads;
    const SearchResult other = search(graph, eight_cores(), training, {}, options);
    CHECK(other.plans == first.plans);
    CHECK(other.counts.candidates == first.counts.candidates);
    CHECK(other.counts.infeasible_memory == first.counts.infeasible_memory);
    CHECK(other.counts.pruned_by_bound == first.counts.pruned_by_bound);
    CHECK(other.counts.simulated == first.counts.simulated);
    CHECK(other.counts.certified == first.counts.certified);
  }
}

TEST_CASE("the space holds every factorisation once, and only orders that differ") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  const TrainingSpec training = training_of(4, DataType::fp32);
  LayoutRequest request;
  request[Choice::zero_stage] = 0;
  request[Choice::micro_batch] = 1;
  request[Choice::recompute] = Recompute::none;
  request[Choice::schedule] = ScheduleKind::gpipe;
  request[Choice::sequence_parallel] = false;
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
  request.cluster.groups.front().device.memory_capacity = Bytes(100'000);
  const SuggestResult none = suggest(request);
  CHECK(!none.plan);
  REQUIRE(!none.remedies.empty());
  const SearchResult failed = search(graph, request.cluster, request.training, {}, request.options);
  REQUIRE(failed.smallest);
  CHECK(none.remedies.front().instead.starts_with(format_bytes_up(failed.smallest->result.memory.peak()) +
                                                  " of memory a device instead of"));
  request.cluster.groups.front().device.memory_capacity = failed.smallest->result.memory.peak();
  CHECK(suggest(request).plan);
}

// Closed forms of what a plan keeps and sends -----------------------------------------------------
// (those of time are tested in tests/planner/cost, schedule and simulator)

TEST_CASE("ZeRO's memory follows its closed form") {
  // Rajbhandari et al. 2020, section 3: with P parameters over N ranks, in fp32 here (4 + 4 + 8
  // bytes per parameter):
  //   stage 0: 16 P; 1: 8 P + 8 P / N; 2: 4 P + 12 P / N; 3: 16 P / N.
  // Buckets of tiny-llama are multiples of 16 N elements at N = 2, so nothing is padded except each
  // of the 6 buffers of a part, to 256 bytes.
  const OpGraph graph = graph_of("tiny-llama", 16);
  const std::int64_t whole = 4 * parameter_count(graph);
  const TrainingSpec training = training_of(8, DataType::fp32);
  const auto is = [](Bytes memory, std::int64_t closed_form, int parts) {
    return memory.count >= closed_form && memory.count < closed_form + 256 * 6 * parts;
  };
  for (int zero = 0; zero <= 3; ++zero) {
    ParallelSpec spec;
    spec.mesh.degree = {.dp = 2};
    spec.zero_stage = zero;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    const Job job{.graph = &graph, .training = training, .layout = lay_out(spec, place(graph, spec)),
                  .schedule = row_of(spec.schedule).actions({1, 4}), .backend = BackendKind::cpu, .overhead = {}};
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
    spec.mesh.degree = {.dp = dp, .tp = tp};
    spec.sequence_parallel = sequence_parallel;
    spec.zero_stage = zero;
    spec.micro_batch = 8 / dp;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    const Job job{.graph = &graph, .training = training, .layout = lay_out(spec, place(graph, spec)),
                  .schedule = row_of(spec.schedule).actions({1, 1}), .backend = BackendKind::cpu, .overhead = {}};
    return lower(job, 0).communication;
  };
  const std::int64_t parameters_bytes = 4 * parameter_count(graph);
  // An all-reduce sends 2 (n - 1) / n of the buffer, which is all of it over two ranks;
  // reduce-scatter and all-gather send half of it each. Stage 3 gathers the parameters for forward
  // and backward. The loss's single element makes rank 0 send 4 bytes.
  CHECK(lowered(2, 1, false, 0).dp.count == parameters_bytes + 4);
  CHECK(lowered(2, 1, false, 1).dp.count == parameters_bytes + 4);
  CHECK(lowered(2, 1, false, 2).dp.count == parameters_bytes + 4);
  CHECK(lowered(2, 1, false, 3).dp.count == 3 * parameters_bytes / 2 + 4);

  // Megatron (Shoeybi et al. 2019): two all-reduces of s b h forward and two backward in each of 4
  // layers, one forward for the embedding, one backward for the head: 18, each sending 2 (n - 1) /
  // n = 1 times 16 x 8 x 32 x 4 bytes over two ranks. The vocabulary-parallel loss sends a maximum
  // and two sums per token: 3 x 16 x 8 x 4 bytes.
  const std::int64_t activation = 16 * 8 * 32 * 4;
  const std::int64_t loss_terms = 3 * 16 * 8 * 4;
  CHECK(lowered(1, 2, false, 0).tp.count == 18 * activation + loss_terms);
  // Korthikanti et al. 2022: with sequence parallelism an all-gather and a reduce-scatter replace
  // each all-reduce, and the backward gathers each of the layer's two inputs (and the head's) once
  // more for the weight gradients: per layer 4 x 2 / 2 + 2 / 2 activations; embedding: 1/2 forward,
  // 1/2 backward; head: 1/2 forward, 1/2 again and 1/2 backward. At the end the norms' gradients (9
  // of 32 elements, each 4 bytes) are all-reduced.
  const std::int64_t norms = 9 * 32 * 4;
  CHECK(lowered(1, 2, true, 0).tp.count ==
        4 * 5 * activation + activation + 3 * activation / 2 + loss_terms + norms);
}

}  // namespace parplan
