#include "planner/simulator/estimate.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/cluster/group_network.h"
#include "planner/graph/engine_file.h"
#include "planner/parallel/techniques.h"
#include "planner/plan/objective.h"
#include "planner/schedule/schedules.h"
#include "planner/search/device_count_bound.h"
#include "planner/search/simulate_spec.h"
#include "planner/search/space.h"
#include "tests/planner/search/random_settings.h"

namespace parplan {

using testing::cluster_of;
using testing::describe;
using testing::graph_of;
using testing::or_overlapped;
using testing::random_cluster;
using testing::random_cut;
using testing::random_graph;
using testing::source;
using testing::training_of;

TEST_CASE("an estimate has the memory that lowering plans and bounds below the simulated step, for every objective") {
  std::mt19937 random = testing::random_from(3);
  double gaps = 0.0;
  int count = 0, in_parts = 0, some_layers = 0, with_muon = 0;
  for (int setting = 0; setting < 300; ++setting) {
    const bool gpu = setting % 4 != 0;
    OpGraph graph = setting % 10 == 0 ? graph_of("tiny-mlp", 16) : random_graph(random, 16);
    const Cluster cluster = random_cluster(random, gpu, gpu && setting % 4 == 1);
    const std::array precisions =
        gpu ? std::array{DataType::bf16, DataType::fp16} : std::array{DataType::fp32, DataType::tf32};
    TrainingSpec training = training_of(16, precisions[random() % 2]);
    training.engine = testing::random_engine(static_cast<unsigned>(setting), graph);
    testing::train_random_parts(static_cast<unsigned>(setting), training, graph);
    training.clip_norm = setting % 2;
    training.optimizer = setting % 7 == 0                              ? Optimizer::sgd
                         : setting % 7 == 4                            ? Optimizer::adamw_8bit
                         : setting % 7 == 2 && is_own(training.engine) ? Optimizer::muon
                                                                       : Optimizer::adamw;
    if (setting % 14 == 0) training.momentum = 0.9;
    with_muon += training.optimizer == Optimizer::muon;
    Estimator estimator(graph, cluster, training);
    const DeviceCountBound floor(graph, cluster, training);
    const std::vector<ParallelSpec> specs = enumerate_specs(
        graph, training, cluster.groups.size() > 1 || setting % 2 ? cluster.devices() : std::min(8, cluster.devices()),
        {});
    if (specs.empty()) continue;  // of an engine whose stages do not divide so
    for (int trial = 0; trial < 40; ++trial) {
      ParallelSpec spec = or_overlapped(specs[random() % specs.size()], training.engine, random);
      spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.stages(), random);
      if (trial % 3 == 1 && spec.pp() > 1 && spec.virtual_stages == 1 && spec.zero_stage <= 1) {
        spec.schedule = ScheduleKind::zero_bubble_h1;
        ++in_parts;
      }
      if (trial % 3 == 0) spec.tied_gradients = TiedGradients::apart;
      if (trial % 5 < 2) spec.input_slots = InputSlots::one_more;
      // Hybrid sharding, over the smallest groups or the largest.
      if (const int ranks = spec.replicas(); spec.zero_stage > 0 && ranks % 2 == 0 && ranks > 2 && trial % 2 == 0)
        spec.mesh.dp_shard = trial % 4 == 0 ? 2 : ranks / 2;
      if (spec.pp() > 1 && trial % 4 == 0) {
        spec.recompute = Recompute::per_stage;
        for (int s = 0; s < spec.stages(); ++s)
          spec.stage_recompute.push_back(recompute_rows()[random() % recompute_rows().size()].kind);
      }
      testing::recompute_some_layers(spec, random);
      some_layers += recomputes_some_layers(spec);
      INFO("setting " << setting << " on " << cluster.name << ": " << describe(spec));
      const Placements placements = place(graph, spec);
      const ScheduleRow& row = row_of(spec.schedule);
      const Estimate estimate = estimator.estimate(spec, placements, forms_of(row));
      const Schedule schedule = schedule_of(spec, training);
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
  CHECK(in_parts > 300);
  CHECK(some_layers > 300);
  CHECK(with_muon > 10);
}

TEST_CASE("an estimate has the memory of every home that lowering plans, and only the device's must fit") {
  std::mt19937 random = testing::random_from(5);
  for (int setting = 0; setting < 30; ++setting) {
    const bool gpu = setting % 4 != 0;
    OpGraph graph = random_graph(random, 16);
    Cluster cluster = random_cluster(random, gpu, gpu && setting % 4 == 1);
    for (NodeGroup& group : cluster.groups) {
      group.host = {.memory = {}, .memory_bandwidth = BytesPerSecond(4e11), .link = BytesPerSecond(1e10)};
      group.nvme = {.read = BytesPerSecond(6e9), .write = BytesPerSecond(3e9), .latency = {}, .capacity = {}};
    }
    TrainingSpec training = training_of(16, gpu ? DataType::bf16 : DataType::fp32);
    training.engine = testing::random_engine(static_cast<unsigned>(setting), graph);
    testing::train_random_parts(static_cast<unsigned>(setting), training, graph);
    Estimator estimator(graph, cluster, training);
    const std::vector<ParallelSpec> specs = enumerate_specs(graph, training, std::min(8, cluster.devices()), {});
    if (specs.empty()) continue;
    for (int trial = 0; trial < 20; ++trial) {
      ParallelSpec spec = or_overlapped(specs[random() % specs.size()], training.engine, random);
      spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.stages(), random);
      Placements placements = place(graph, spec);
      const ScheduleRow& row = row_of(spec.schedule);
      const Estimate on_device = estimator.estimate(spec, placements, forms_of(row));
      CHECK(on_device.memory.host == Bytes(0));
      const auto in_memory = [&] { return random() % 2 == 0 ? Home::device : Home::host; };
      const auto any = [&] { return all_homes[random() % all_homes.size()]; };
      const bool all_state = trial % 4 == 0;
      if (all_state) placements.state.homes.optimizer = Home::host;
      else
        placements.state.homes = {.parameters = in_memory(), .gradients = in_memory(), .optimizer = any()};
      // In a file, sums are those of updates by the host.
      if (trial % 4 == 3 && placements.state.homes.optimizer != Home::device)
        placements.state.homes.gradients = Home::nvme;
      INFO("setting " << setting << " on " << cluster.name << ": " << describe(spec));
      // An estimator of its own: what one knows of the recipe does not hold for homes for which it
      // does not ask.
      const Estimate estimate = Estimator(graph, cluster, training).estimate(spec, placements, forms_of(row));
      const Schedule schedule = schedule_of(spec, training);
      const StepResult simulated =
          simulate_spec(graph, estimator.networks(), training, spec, placements, schedule, nullptr);
      CHECK(estimate.memory == simulated.memory);
      CHECK(estimate.memory_stage == simulated.memory_stage);
      CHECK(estimate.lower_bound <= simulated.time.total() * (1 + 1e-12));
      // Buffers for what is on the device only while it is used may take more than they save.
      const bool stays = placements.state.homes.parameters == Home::device &&
                         placements.state.homes.gradients == Home::device;
      if (stays) CHECK(estimate.spare >= on_device.spare);
      const Bytes capacity = estimator.capacity(spec.mesh, estimate.memory_stage);
      if (spec.pp() == 1) CHECK(estimate.spare == capacity - estimate.memory.peak());
      if (!all_state || spec.pp() > 1) continue;
      // The state has moved from one home to the other, and copies of gradients and parameters have
      // come; the last buffer of an arena is not padded. What an engine keeps beside state is of
      // the device's.
      CHECK(estimate.memory.optimizer == Bytes(0));
      CHECK(estimate.memory.host > on_device.memory.optimizer);
      const auto others = [](const MemoryUse& use) { return use.peak() - use.parameters - use.reserve; };
      CHECK(others(estimate.memory) == others(on_device.memory) - on_device.memory.optimizer);
      // Shards that were cast from the master copy stay behind without it.
      if (training.engine.casts_shards)
        CHECK(estimate.memory.parameters >= on_device.memory.parameters);
      else
        CHECK(estimate.memory.parameters == on_device.memory.parameters);
    }
  }
}

TEST_CASE("the bound stays below the step of what uses the host's memory, and close to it") {
  std::mt19937 random = testing::random_from(11);
  double gaps = 0.0;
  int count = 0, of_some = 0;
  for (int setting = 0; setting < 60; ++setting) {
    const bool gpu = setting % 4 != 0;
    const OpGraph graph = random_graph(random, 16);
    Cluster cluster = random_cluster(random, gpu, gpu && setting % 8 == 1);
    const auto factor = [&] { return std::exp2(std::uniform_real_distribution<double>(-6.0, 6.0)(random)); };
    for (NodeGroup& group : cluster.groups) {
      group.host = {.memory = Bytes(std::int64_t{1} << 40),
                    .memory_bandwidth = BytesPerSecond(4e11 * factor()),
                    .link = BytesPerSecond(1e10 * factor())};
      group.nvme = {.read = BytesPerSecond(6e9 * factor()),
                    .write = BytesPerSecond(3e9 * factor()),
                    .latency = Seconds(setting % 7 == 0 ? 1e-4 : 0.0),
                    .capacity = Bytes(std::int64_t{1} << 42)};
    }
    TrainingSpec training = training_of(16, gpu ? DataType::bf16 : DataType::fp32);
    training.clip_norm = setting % 3 == 0 ? 0.0 : 1.0;
    const Offload offload = all_offloads()[1 + setting % (all_offloads().size() - 1)];
    training.optimizer = setting % 5 == 0                                      ? Optimizer::sgd
                         : setting % 5 == 3 && offload.optimizer != Home::nvme ? Optimizer::adamw_8bit
                                                                               : Optimizer::adamw;
    Estimator estimator(graph, cluster, training);
    const std::vector<ParallelSpec> specs =
        enumerate_specs(graph, training, std::min(8, cluster.devices()), {{Choice::offload, offload}});
    REQUIRE(!specs.empty());
    for (int trial = 0; trial < 20; ++trial) {
      ParallelSpec spec = or_overlapped(specs[random() % specs.size()], training.engine, random);
      CHECK(spec.offload == offload);
      spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.stages(), random);
      if (trial % 4 == 1 && spec.pp() > 1 && spec.virtual_stages == 1 && spec.zero_stage <= 1)
        spec.schedule = ScheduleKind::zero_bubble_h1;
      if (trial % 3 == 1) spec.tied_gradients = TiedGradients::apart;
      if (trial % 5 == 2 && spec.pp() > 1) spec.input_slots = InputSlots::one_more;
      testing::offload_some_layers(spec, random);
      if (illegal(graph, training, spec)) continue;
      of_some += spec.offload_layers > 0;
      const Placements placements = place(graph, spec);
      INFO("setting " << setting << " on " << cluster.name << ": " << describe(spec) << " stages "
                      << fmt::format("{}", spec.stage_blocks));
      const Estimate estimate = estimator.estimate(spec, placements, forms_of(row_of(spec.schedule)));
      const StepResult simulated = simulate_spec(graph, estimator.networks(), training, spec, placements,
                                                 schedule_of(spec, training), nullptr);
      CHECK(estimate.memory == simulated.memory);
      CHECK(estimate.lower_bound <= simulated.time.total() * (1 + 1e-12));
      CHECK(estimate.time.total() <= simulated.time.total() * (1 + 1e-9));
      // What the schedule's actions show is no less than its closed form, nor above the step.
      const Bound played = estimator.bound(spec, placements, as_played(forms_of(row_of(spec.schedule))));
      CHECK(played.lower_bound <= simulated.time.total() * (1 + 1e-12));
      if (played.spare.count >= 0) CHECK(played.lower_bound >= estimate.lower_bound * (1 - 1e-12));
      gaps += simulated.time.total() / estimate.lower_bound - 1.0;
      ++count;
    }
  }
  MESSAGE("simulated over bound: " << 100.0 * gaps / count << "% above on average of " << count);
  CHECK(gaps / count < 0.3);
  CHECK(of_some > 50);
}

TEST_CASE("what the first layers save leaves and returns while the others compute") {
  ModelSpec model = load_model(source + "/tests/data/models/tiny-gpt2.yaml", "").spec;
  model.layers = 8;
  const OpGraph graph = build_graph(model, 16);
  const TrainingSpec training = training_of(4, DataType::bf16);
  ParallelSpec spec;
  spec.micro_batch = 4;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  bool hides_half = false;
  // From links that hide no copy to such as hide all.
  for (const double power : {1.0, 3.0, 4.5, 7.0}) {
    Cluster cluster = cluster_of("dgx-a100", 1);
    for (NodeGroup& group : cluster.groups)
      group.host = {.memory = Bytes(std::int64_t{1} << 40),
                    .memory_bandwidth = BytesPerSecond(4e11),
                    .link = BytesPerSecond(1e8 * std::exp2(power))};
    Estimator estimator(graph, cluster, training);
    const auto step = [&](Offload offload, int layers) {
      spec.offload = offload;
      spec.offload_layers = layers;
      return simulate_spec(graph, estimator.networks(), training, spec, place(graph, spec), schedule_of(spec, training),
                           nullptr);
    };
    const Offload activations{.activations = Home::host};
    const StepResult none = step({}, 0), half = step(activations, 4), all = step(activations, 0);
    INFO("links of 1e8 B/s x 2^" << power);
    CHECK(none.time.total() <= half.time.total() * (1 + 1e-12));
    CHECK(half.time.total() <= all.time.total() * (1 + 1e-12));
    // Four places hold what eight layers save, and no others.
    const std::int64_t saved = half.memory.host.count / 4;
    CHECK(none.memory.activations - half.memory.activations == Bytes(4 * saved));
    CHECK(none.memory.activations - all.memory.activations == Bytes((8 - staging_buffers) * saved));
    hides_half = hides_half ||
                 (half.time.total() <= none.time.total() * (1 + 1e-9) && all.time.total() > none.time.total() * 1.01);
  }
  CHECK(hides_half);
}

TEST_CASE("the bound stays below the step of a master with replicas, and close to it") {
  std::mt19937 random = testing::random_from(13);
  double gaps = 0.0;
  int count = 0;
  for (int setting = 0; setting < 60; ++setting) {
    const bool gpu = setting % 4 != 0;
    OpGraph graph = random_graph(random, 16);
    const Cluster cluster = random_cluster(random, gpu, false);
    TrainingSpec training = training_of(16, setting % 8 == 1 ? DataType::fp16 : DataType::bf16);
    if (!gpu) training.precision = DataType::fp32;
    training.engine = testing::random_engine(static_cast<unsigned>(setting), graph);
    testing::train_random_parts(static_cast<unsigned>(setting), training, graph);
    training.clip_norm = setting % 3 == 0 ? 0.0 : 1.0;
    training.engine.copies_to_buckets = false;  // no rank has any under a master
    Estimator estimator(graph, cluster, training);
    std::vector<ParallelSpec> specs = enumerate_specs(graph, training, std::min(8, cluster.devices()),
                                                      {{Choice::dp_method, DataMethod::master}});
    std::erase_if(specs, [](const ParallelSpec& spec) { return spec.dp_method != DataMethod::master; });
    if (specs.empty()) continue;  // the batch has no share for each device
    for (int trial = 0; trial < 10; ++trial) {
      ParallelSpec spec = or_overlapped(specs[random() % specs.size()], training.engine, random);
      spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
      if (trial % 3 == 1) spec.tied_gradients = TiedGradients::apart;
      const Placements placements = place(graph, spec);
      INFO("setting " << setting << " on " << cluster.name << ": " << describe(spec));
      const Estimate estimate = estimator.estimate(spec, placements, forms_of(row_of(spec.schedule)));
      const StepResult simulated = simulate_spec(graph, estimator.networks(), training, spec, placements,
                                                 schedule_of(spec, training), nullptr);
      CHECK(estimate.memory == simulated.memory);
      CHECK(estimate.lower_bound <= simulated.time.total() * (1 + 1e-12));
      CHECK(estimate.time.total() <= simulated.time.total() * (1 + 1e-9));
      gaps += simulated.time.total() / estimate.lower_bound - 1.0;
      ++count;
      // No rank holds more than the master, whose step is simulated.
      ParallelSpec flat = spec;
      flat.dp_method = DataMethod::all_reduce;
      const Estimate of_flat = estimator.estimate(flat, placements, forms_of(row_of(flat.schedule)));
      CHECK(estimate.memory.peak() >= of_flat.memory.peak());
    }
  }
  MESSAGE("simulated over bound: " << 100.0 * gaps / count << "% above on average of " << count);
  CHECK(count > 400);
  CHECK(gaps / count < 0.3);
}

namespace {

constexpr Offload sums_in_files{.optimizer = Home::host, .gradients = Home::nvme};

void give_host_and_drives(Cluster& cluster) {
  for (NodeGroup& group : cluster.groups) {
    group.host = {.memory = {}, .memory_bandwidth = BytesPerSecond(4e11), .link = BytesPerSecond(1e10)};
    group.nvme = {.read = BytesPerSecond(6e9), .write = BytesPerSecond(3e9), .latency = {}, .capacity = {}};
  }
}

}  // namespace

TEST_CASE("an estimate has the memory and a bound of ranks that hold several stages, too") {
  std::mt19937 random = testing::random_from(7);
  const ScheduleForms interleaved = forms_of(row_of(ScheduleKind::interleaved));
  ScheduleForms played = interleaved;
  played.closed_form = nullptr;
  int tried = 0, some_layers = 0, sums = 0;
  double gaps = 0.0;
  for (int setting = 0; setting < 150; ++setting) {
    const bool gpu = setting % 4 != 0;
    OpGraph graph = random_graph(random, 16);
    Cluster cluster = random_cluster(random, gpu, gpu && setting % 4 == 1);
    TrainingSpec training = training_of(32, gpu ? DataType::bf16 : DataType::fp32);
    training.engine = testing::random_engine(static_cast<unsigned>(setting), graph);
    const bool may_offload = setting % 5 == 4;
    if (may_offload) {
      training.engine = {};
      give_host_and_drives(cluster);
    }
    testing::train_random_parts(static_cast<unsigned>(setting), training, graph);
    training.clip_norm = setting % 2;
    Estimator estimator(graph, cluster, training);
    const std::vector<ParallelSpec> specs =
        enumerate_specs(graph, training, setting % 4 == 1 ? cluster.devices() : std::min(8, cluster.devices()), {});
    if (specs.empty()) continue;
    const int blocks = static_cast<int>(graph.blocks.size());
    for (int trial = 0; trial < 40; ++trial) {
      ParallelSpec spec = or_overlapped(specs[random() % specs.size()], training.engine, random);
      const int chunks = 2 + static_cast<int>(random() % 2), stages = spec.pp() * chunks;
      if (spec.pp() < 2) continue;
      spec.schedule = ScheduleKind::interleaved;
      spec.virtual_stages = chunks;
      if (trial % 3 == 1) spec.micro_batch_group = spec.pp() + static_cast<int>(random() % 4);
      if (illegal(graph, training, spec)) continue;
      if (trial % 3 == 0) spec.tied_gradients = TiedGradients::apart;
      if (trial % 5 < 2) spec.input_slots = InputSlots::one_more;
      spec.stage_blocks = random_cut(blocks, stages, random);
      if (trial % 4 == 0) {
        spec.recompute = Recompute::per_stage;
        for (int s = 0; s < stages; ++s)
          spec.stage_recompute.push_back(recompute_rows()[random() % recompute_rows().size()].kind);
      }
      testing::recompute_some_layers(spec, random);
      some_layers += recomputes_some_layers(spec);
      if (may_offload && trial % 2 == 0) spec.offload = Offload{.activations = Home::host};
      if (may_offload && trial % 4 == 1) spec.offload = sums_in_files;
      if (illegal(graph, training, spec)) spec.offload = {};
      sums += spec.offload == sums_in_files;
      const Schedule schedule = schedule_of(spec, training);
      INFO("setting " << setting << " on " << cluster.name << ": " << describe(spec) << " cut "
                      << fmt::format("{}", fmt::join(spec.stage_blocks, ",")));
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
      const Seconds played_bound = estimator.estimate(spec, placements, played).lower_bound;
      CHECK(played_bound >= estimate.lower_bound * (1 - 1e-12));
      CHECK(played_bound <= simulated.time.total() * (1 + 1e-12));
      gaps += simulated.time.total() / estimate.lower_bound - 1.0;
    }
  }
  MESSAGE(tried << " layouts; simulated over bound: " << 100.0 * gaps / tried << "% above on average");
  CHECK(tried > 100);
  CHECK(some_layers > 30);
  CHECK(sums > 30);
  CHECK(gaps / tried < 0.35);
}

TEST_CASE("an estimate has the memory and a bound of pipelines down the ranks and back, too") {
  std::mt19937 random = testing::random_from(17);
  int tried = 0, whole = 0, some_layers = 0, sums = 0;
  double gaps = 0.0;
  for (int setting = 0; setting < 120; ++setting) {
    const bool gpu = setting % 4 != 0;
    OpGraph graph = random_graph(random, 16);
    Cluster cluster = random_cluster(random, gpu, gpu && setting % 4 == 1);
    TrainingSpec training = training_of(32, gpu ? DataType::bf16 : DataType::fp32);
    training.engine = testing::random_engine(static_cast<unsigned>(setting), graph);
    const bool may_offload = setting % 5 == 4;
    if (may_offload) {
      training.engine = {};
      give_host_and_drives(cluster);
    }
    testing::train_random_parts(static_cast<unsigned>(setting), training, graph);
    training.clip_norm = setting % 2;
    Estimator estimator(graph, cluster, training);
    const ScheduleKind kind = setting % 3 == 0 ? ScheduleKind::dualpipe_v : ScheduleKind::zero_bubble_v;
    const std::vector<ParallelSpec> specs =
        enumerate_specs(graph, training, setting % 4 == 1 ? cluster.devices() : std::min(8, cluster.devices()),
                        {{Choice::schedule, kind}});
    for (int trial = 0; trial < 40 && !specs.empty(); ++trial) {
      ParallelSpec spec = or_overlapped(specs[random() % specs.size()], training.engine, random);
      if (spec.pp() < 2) continue;
      if (trial % 3 == 0) spec.tied_gradients = TiedGradients::apart;
      if (trial % 5 < 2) spec.input_slots = InputSlots::one_more;
      spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.stages(), random);
      if (trial % 4 == 0) {
        spec.recompute = Recompute::per_stage;
        for (int s = 0; s < spec.stages(); ++s)
          spec.stage_recompute.push_back(recompute_rows()[random() % recompute_rows().size()].kind);
      }
      testing::recompute_some_layers(spec, random);
      some_layers += recomputes_some_layers(spec);
      if (may_offload && trial % 2 == 0) spec.offload = sums_in_files;
      if (illegal(graph, training, spec)) spec.offload = {};
      sums += spec.offload == sums_in_files;
      INFO("setting " << setting << " on " << cluster.name << ": " << describe(spec) << " cut "
                      << fmt::format("{}", fmt::join(spec.stage_blocks, ",")) << " clip " << training.clip_norm);
      const Placements placements = place(graph, spec);
      const Estimate estimate = estimator.estimate(spec, placements, forms_of(row_of(spec.schedule)));
      const StepResult simulated =
          simulate_spec(graph, estimator.networks(), training, spec, placements, schedule_of(spec, training), nullptr);
      INFO("bound " << estimate.lower_bound.value << " s, simulated " << simulated.time.total().value << " s");
      CHECK(estimate.memory == simulated.memory);
      CHECK(estimate.memory_stage == simulated.memory_stage);
      CHECK(estimate.lower_bound <= simulated.time.total() * (1 + 1e-12));
      CHECK(estimate.time.total().value == doctest::Approx(estimate.lower_bound.value).epsilon(1e-9));
      gaps += simulated.time.total() / estimate.lower_bound - 1.0;
      ++tried;
      whole += kind == ScheduleKind::dualpipe_v;
    }
  }
  MESSAGE(tried << " layouts; simulated over bound: " << 100.0 * gaps / tried << "% above on average");
  CHECK(tried > 300);
  CHECK(whole > 50);
  CHECK(some_layers > 50);
  CHECK(sums > 30);
  CHECK(gaps / tried < 0.35);
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
                    schedule_of(spec, training), nullptr);
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

TEST_CASE("the bound is close to the step under every engine that a file describes") {
  const OpGraph graph = build_graph(load_model("gpt2-medium", source + "/models").spec, 1024);
  const Cluster cluster = cluster_of("dgx-a100", 8);
  for (const std::string& name : engine_names(source + "/configs/engines")) {
    CAPTURE(name);
    TrainingSpec training = training_of(64, DataType::bf16);
    training.sequence_length = 1024;
    training.engine = find_engine(name, source + "/configs/engines");
    const bool has_pipeline = training.engine.has_pipeline;
    ParallelSpec spec;
    spec.mesh.degree = has_pipeline ? Degrees{.pp = 2, .dp = 4} : Degrees{.dp = 8};
    spec.micro_batch = has_pipeline ? 2 : 8;
    spec.stage_blocks = has_pipeline ? std::vector{13, 13} : std::vector{26};
    if (illegal(graph, training, spec)) continue;
    const double ratio = bound_over_simulated(graph, cluster, training, spec);
    CHECK(ratio <= 1 + 1e-12);
    CHECK(ratio > 0.8);
  }
}

TEST_CASE("an estimator that was asked for one offload bounds another as if it had not been") {
  const OpGraph graph = graph_of("tiny-llama", 64);
  Cluster cluster = cluster_of("dgx-a100", 8);
  cluster.groups.front().nvme = {
      .read = BytesPerSecond(1e6), .write = BytesPerSecond(1e6), .latency = {}, .capacity = {}};
  const TrainingSpec training = training_of(32, DataType::bf16);
  ParallelSpec spec;
  spec.mesh.degree.dp = 8;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  const auto bound = [&](Estimator& estimator, Home home) {
    ParallelSpec one = spec;
    one.offload.activations = home;
    REQUIRE(!illegal(graph, training, one));
    return estimator.estimate(one, place(graph, one), forms_of(row_of(one.schedule))).lower_bound;
  };
  Estimator first_host(graph, cluster, training), first_nvme(graph, cluster, training);
  const Seconds host = bound(first_host, Home::host), nvme = bound(first_nvme, Home::nvme);
  CHECK(host < nvme);
  CHECK(bound(first_host, Home::nvme) == nvme);
  CHECK(bound(first_nvme, Home::host) == host);
}

TEST_CASE("the bound counts the kernels that reductions slow, and what follows the last backward of any stage") {
  ModelSpec model = load_model("llama3-8b", source + "/models").spec;
  model.vocabulary = 8192;
  const OpGraph graph = build_graph(model, 2048);
  Cluster cluster = cluster_of("dgx-h100", 64);
  TrainingSpec training = training_of(128, DataType::bf16);
  training.sequence_length = 2048;
  ParallelSpec spec;
  spec.mesh.degree = {.pp = 4, .dp = 16};
  spec.zero_stage = 1;
  spec.input_slots = InputSlots::one_more;
  const auto gap = [&](const std::vector<int>& cut, bool plays) {
    spec.stage_blocks = cut;
    REQUIRE(!illegal(graph, training, spec));
    Estimator estimator(graph, cluster, training);
    const Placements placements = place(graph, spec);
    const ScheduleForms forms = forms_of(row_of(spec.schedule));
    const Bound bound = estimator.bound(spec, placements, plays ? as_played(forms) : forms);
    REQUIRE(bound.spare >= Bytes(0));
    const StepResult simulated =
        simulate_spec(graph, estimator.networks(), training, spec, placements, schedule_of(spec, training), nullptr);
    return simulated.time.total() / bound.lower_bound - 1.0;
  };
  // Cuts of which the second leaves the first stage little to reduce.
  for (const ScheduleKind schedule : {ScheduleKind::one_f_one_b, ScheduleKind::gpipe, ScheduleKind::interleaved}) {
    const bool interleaves = schedule == ScheduleKind::interleaved;
    spec.schedule = schedule;
    spec.virtual_stages = interleaves ? 2 : 1;
    const std::vector<int> even = interleaves ? std::vector{5, 4, 4, 4, 4, 4, 4, 5} : std::vector{9, 9, 8, 8};
    const std::vector<int> uneven = interleaves ? std::vector{1, 4, 4, 5, 5, 5, 5, 5} : std::vector{1, 11, 11, 11};
    for (const std::vector<int>& cut : {even, uneven}) {
      INFO(row_of(schedule).name << ", stages " << fmt::format("{}", cut));
      CHECK(gap(cut, true) >= -1e-12);
      CHECK(gap(cut, true) < 0.012);
      CHECK(gap(cut, false) >= -1e-12);
      CHECK(gap(cut, false) < (interleaves ? 0.045 : 0.03));
    }
  }
  // Long reductions of the second stage end after the first stage's.
  for (Link& link : cluster.groups.front().node.links) link.bandwidth *= 1.0 / 32;
  spec.mesh.degree = {.pp = 16, .dp = 4};
  spec.virtual_stages = 1;
  spec.schedule = ScheduleKind::one_f_one_b;
  CHECK(gap({1, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2}, false) >= -1e-12);
  CHECK(gap({1, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2}, false) < 0.1);
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
        if (illegal(graph, training, spec)) continue;  // one stage a rank
        differ = differ || !(stage_network(cluster, spec.mesh, 0, 1) == stage_network(cluster, spec.mesh, 1, 2));
        CHECK(bound_over_simulated(graph, cluster, training, spec) <= 1 + 1e-12);
      }
  CHECK(differ);
}

TEST_CASE("each layer more that recomputes takes its work once more and frees what it saves") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  const Cluster cluster = cluster_of("dgx-a100", 1);
  const TrainingSpec training = training_of(8, DataType::bf16);
  Estimator estimator(graph, cluster, training);
  for (const Recompute rule : {Recompute::norms | Recompute::mlp, Recompute::full}) {
    ParallelSpec spec;
    spec.micro_batch = 2;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    const Placements placements = place(graph, spec);
    const auto kind = static_cast<std::size_t>(graph.blocks[1].kind);
    const std::int64_t saved = estimator.lowered_blocks(spec, placements, Recompute::none)[kind].saved_bytes -
                               estimator.lowered_blocks(spec, placements, rule)[kind].saved_bytes;
    const auto simulated = [&] {
      return simulate_spec(graph, estimator.networks(), training, spec, placements, schedule_of(spec, training),
                           nullptr);
    };
    const StepResult none = simulated();
    CHECK(none.time.recompute == Seconds(0.0));
    spec.recompute = rule;
    const StepResult all = simulated();
    const int layers = static_cast<int>(graph.blocks.size()) - 2;
    std::int64_t before = none.memory.activations.count;
    for (int number = 1; number <= layers; ++number) {
      INFO(std::string(name(rule)) << " of " << number);
      spec.recompute_layers = number;
      const StepResult some = simulated();
      const double share = static_cast<double>(number) / layers;
      CHECK(some.time.recompute.value == doctest::Approx(share * all.time.recompute.value).epsilon(1e-9));
      CHECK(some.time.total().value ==
            doctest::Approx((none.time.total() + share * (all.time.total() - none.time.total())).value).epsilon(1e-9));
      // The first one may need more scratch, in which it computes again.
      const std::int64_t freed = before - some.memory.activations.count;
      CHECK((number == 1 ? freed <= saved : freed == saved));
      before = some.memory.activations.count;
    }
    CHECK(all.memory.activations.count == before);
  }
}

}  // namespace parplan
