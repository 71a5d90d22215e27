#include "planner/search/simulate_spec.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "models/find_model.h"
#include "planner/parallel/techniques.h"
#include "planner/program/job.h"
#include "planner/program/lower.h"
#include "planner/schedule/schedules.h"
#include "planner/search/candidates.h"
#include "planner/search/simulated_steps.h"
#include "planner/search/space.h"
#include "planner/simulator/repeating_step.h"
#include "planner/simulator/schedule_chart.h"
#include "planner/simulator/simulate.h"
#include "planner/simulator/simulation_state.h"
#include "tests/planner/search/random_settings.h"
#include "tests/planner/simulator/pipelines.h"

namespace parplan {

using testing::describe;
using testing::random_cluster;
using testing::random_cut;
using testing::random_graph;
using testing::training_of;

namespace {

// Up to four stages, under 1F1B.
ParallelSpec random_layout(std::mt19937& random, const OpGraph& graph, bool gpu) {
  ParallelSpec spec;
  const int stages = 1 + static_cast<int>(random() % std::min<std::size_t>(4, graph.blocks.size()));
  spec.mesh.degree = {.pp = stages, .dp = 1 << random() % 2, .tp = stages > 2 && !gpu ? 1 : 1 << random() % 2};
  spec.sequence_parallel = spec.tp() > 1 && random() % 2;
  spec = testing::or_overlapped(spec, {}, random);
  spec.zero_stage = spec.dp() > 1 ? static_cast<int>(random() % 4) : 0;
  spec.recompute = recompute_rows()[random() % recompute_rows().size()].kind;
  spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), stages, random);
  return spec;
}

// A step's Programs, one for each rank of the pipeline, with so many micro-batches.
std::vector<Program> programs_of(const OpGraph& graph, const Cluster& cluster, TrainingSpec training,
                                 const ParallelSpec& spec, int micro_batches) {
  training.global_batch = micro_batches * spec.mesh.batch_ranks() * spec.micro_batch;
  return lower_representatives(job_of(graph, cluster, training, spec, place(graph, spec), schedule_of(spec, training)));
}

}  // namespace

TEST_CASE("a step extended from its steady state equals the step in full") {
  std::mt19937 random = testing::random_from(11);
  int steady = 0, detailed = 0, tried = 0, interleaved = 0, in_parts = 0, offloaded = 0, back = 0;
  for (int setting = 0; setting < 40; ++setting) {
    const bool gpu = setting % 3 != 0;
    OpGraph graph = random_graph(random, 16);
    Cluster cluster = random_cluster(random, gpu, gpu && setting % 4 == 1);
    TrainingSpec training = training_of(256, gpu ? DataType::bf16 : DataType::fp32);
    training.engine = testing::random_engine(static_cast<unsigned>(setting), graph);
    const bool may_offload = setting % 4 == 3;
    if (may_offload) {
      training.engine = {};
      for (NodeGroup& group : cluster.groups) {
        group.host = {.memory = {}, .memory_bandwidth = BytesPerSecond(4e11), .link = BytesPerSecond(1e10)};
        // Neither rate a multiple of the other: a path of writes is then no path of more reads.
        group.nvme = {.read = BytesPerSecond(6e9), .write = BytesPerSecond(2.9e9), .latency = {}, .capacity = {}};
      }
    }
    testing::train_random_parts(static_cast<unsigned>(setting), training, graph);
    NetworkCache networks(cluster, training.engine);
    for (int trial = 0; trial < 6; ++trial) {
      ParallelSpec spec = random_layout(random, graph, gpu);
      if (trial == 0) spec.schedule = ScheduleKind::gpipe;
      if (trial % 3 == 2 && spec.pp() > 1) {
        spec.schedule = ScheduleKind::interleaved;
        spec.virtual_stages = 2 + setting % 2;
        if (setting % 4 == 3) spec.micro_batch_group = spec.pp() + 2;
        if (spec.stages() <= static_cast<int>(graph.blocks.size()))
          spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.stages(), random);
        if (illegal(graph, training, spec)) continue;
      }
      if (trial % 3 == 1 && spec.pp() > 1 && spec.zero_stage <= 1) spec.schedule = ScheduleKind::zero_bubble_h1;
      if (trial == 4 && spec.pp() > 1 && 2 * spec.pp() <= static_cast<int>(graph.blocks.size()) &&
          spec.zero_stage <= 1) {
        spec.schedule = setting % 2 == 0 ? ScheduleKind::zero_bubble_v : ScheduleKind::dualpipe_v;
        spec.virtual_stages = 2;
        std::mt19937 apart = random;  // so that the draw changes no others
        spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.stages(), apart);
        if (illegal(graph, training, spec)) continue;
      }
      if (trial % 2 != 0) spec.input_slots = InputSlots::one_more;
      if (may_offload) spec.offload = all_offloads()[1 + (setting / 4 + trial) % (all_offloads().size() - 1)];
      if (may_offload && illegal(graph, training, spec)) spec.offload = Offload{.activations = Home::host};
      if (spec.mesh.size() > cluster.devices()) continue;
      INFO("setting " << setting << ": " << describe(spec));
      std::vector<CostModel> models;
      for (int stage = 0; stage < spec.pp(); ++stage) models.push_back(cost_model(networks, spec.mesh, stage));
      const Placements placements = place(graph, spec);
      const std::optional<SimulatedSpec> simulated =
          simulate_steady(graph, cluster, training, spec, placements, row_of(spec.schedule), models);
      ++tried;
      if (spec.schedule == ScheduleKind::gpipe)
        CHECK(!simulated);  // it holds all micro-batches at once: more of them take more memory
      if (!simulated) continue;
      if (simulated->micro_batches < micro_batches(spec, training)) {
        ++steady;
        offloaded += may_offload;
      }
      interleaved += spec.schedule == ScheduleKind::interleaved;
      back += is_v_shaped(spec.schedule);
      in_parts += runs_backward_in_parts(spec.schedule);
      const StepResult& extended = simulated->result;
      const Schedule schedule = schedule_of(spec, training);
      StepDetails details;
      simulate_spec(graph, cluster, training, spec, placements, schedule, models, nullptr, &details);
      // Calls in a row are slowed together without details, and one by one with them.
      const StepResult full =
          simulate_spec(graph, cluster, training, spec, placements, schedule, models, nullptr);
      CHECK(extended.memory == full.memory);
      CHECK(extended.memory_stage == full.memory_stage);
      CHECK(extended.communication == full.communication);
      const double total = full.time.total().value;
      CHECK(extended.time.total().value == doctest::Approx(total).epsilon(1e-9));
      const auto close = [&](Seconds a, Seconds b) { return std::abs((a - b).value) <= 1e-9 * total; };
      const auto all_close = [&](StepTime part, StepTime whole) {
        for (int label = 0; label < static_cast<int>(Label::count_); ++label)
          CHECK(close(part.part(static_cast<Label>(label)), whole.part(static_cast<Label>(label))));
        CHECK(close(part.bubble, whole.bubble));
      };
      all_close(extended.time, full.time);

      StepDetails found;
      if (!simulate_steady(graph, cluster, training, spec, placements, row_of(spec.schedule), models, &found)) continue;
      ++detailed;
      REQUIRE(found.ranks.size() == details.ranks.size());
      for (std::size_t r = 0; r < found.ranks.size(); ++r) {
        all_close(found.ranks[r].time, details.ranks[r].time);
        CHECK(found.ranks[r].memory == details.ranks[r].memory);
        CHECK(found.ranks[r].communication == details.ranks[r].communication);
      }
      // One of the paths that take equally long.
      std::int64_t runs = 0;
      Seconds path;
      for (const CriticalWork& work : found.critical_path) {
        runs += work.runs;
        path += work.time;
      }
      for (const CriticalWork& work : details.critical_path) runs -= work.runs;
      CHECK(runs == 0);
      CHECK(close(path, full.time.total()));
    }
  }
  MESSAGE(steady << " of " << tried << " were steady, " << detailed << " on every rank");
  CHECK(steady > tried / 2);
  CHECK(interleaved > 0);
  CHECK(in_parts > 10);
  CHECK(offloaded > 10);
  CHECK(back > 5);
  CHECK(detailed > tried / 4);
}

// Whether the lists of the step of `some` micro-batches repeat themselves, held to those of longer
// steps if they do.
bool repeats_as_lowered(std::mt19937& random, const OpGraph& graph, const Cluster& cluster,
                        const TrainingSpec& training, const ParallelSpec& spec, int some, int period,
                        CallsInARow in_a_row) {
  NetworkCache networks(cluster, training.engine);
  const std::vector<CostModel> models = cost_models(networks, spec);
  const std::vector<Program> few = programs_of(graph, cluster, training, spec, some);
  const std::optional<RepeatingStep> repeats = repeating_step(prepare(few, models, in_a_row, false), some, period);
  if (!repeats) return false;
  const int times = 1 + static_cast<int>(random() % 20);
  const std::vector<Program> more = programs_of(graph, cluster, training, spec, some + times * repeats->period);
  const Simulation extended = longer(*repeats, times), lowered = prepare(more, models, in_a_row, false);
  for (std::size_t r = 0; r < more.size(); ++r) {
    CHECK(more[r].memory == few[r].memory);
    const std::vector<Playable>&of_few = *extended.ranks[r].segments, &of_more = *lowered.ranks[r].segments;
    const auto duration_of = [](const Playable& playable) { return playable.costed.duration; };
    CHECK(std::ranges::equal(of_few, of_more, {}, duration_of, duration_of));
    CHECK(extended.ranks[r].list == lowered.ranks[r].list);
  }
  return true;
}

TEST_CASE("calls of a step whose middle repeats itself are those of the longer step as it is lowered") {
  std::mt19937 random = testing::random_from(29);
  int repeating = 0, tried = 0;
  for (int setting = 0; setting < 60; ++setting) {
    const bool gpu = setting % 3 != 0;
    OpGraph graph = random_graph(random, 16);
    const Cluster cluster = random_cluster(random, gpu, gpu && setting % 4 == 1);
    TrainingSpec training = training_of(256, gpu ? DataType::bf16 : DataType::fp32);
    training.engine = testing::random_engine(static_cast<unsigned>(setting), graph);
    testing::train_random_parts(static_cast<unsigned>(setting), training, graph);
    ParallelSpec spec = random_layout(random, graph, gpu);
    if (random() % 2) spec.input_slots = InputSlots::one_more;
    if (spec.mesh.size() > cluster.devices()) continue;
    INFO("setting " << setting << ": " << describe(spec));
    const int some = spec.pp() + 24 + static_cast<int>(random() % 9);
    for (const CallsInARow in_a_row : {CallsInARow::apart, CallsInARow::joined}) {
      ++tried;
      repeating += repeats_as_lowered(random, graph, cluster, training, spec, some, 2, in_a_row);
    }
  }
  MESSAGE(repeating << " of " << tried << " lists repeat themselves");
  CHECK(repeating == tried);
}

// As a search lowers them: with two periods beside the micro-batches in flight.
TEST_CASE("so are those of a step of ranks with several stages, whose periods are long") {
  std::mt19937 random = testing::random_from(37);
  const ScheduleRow& row = row_of(ScheduleKind::interleaved);
  int repeating = 0, tried = 0, twice = 0;
  for (int setting = 0; setting < 60; ++setting) {
    const bool gpu = setting % 3 != 0;
    OpGraph graph = random_graph(random, 16);
    const Cluster cluster = random_cluster(random, gpu, false);
    TrainingSpec training = training_of(256, gpu ? DataType::bf16 : DataType::fp32);
    training.engine = testing::random_engine(static_cast<unsigned>(setting), graph);
    testing::train_random_parts(static_cast<unsigned>(setting), training, graph);
    ParallelSpec spec = random_layout(random, graph, gpu);
    const int blocks = static_cast<int>(graph.blocks.size());
    if (spec.pp() == 1 || blocks < 2 * spec.pp() || spec.mesh.size() > cluster.devices()) continue;
    spec.schedule = ScheduleKind::interleaved;
    spec.virtual_stages = blocks / spec.pp();
    spec.micro_batch_group = spec.pp() + static_cast<int>(random() % 5);
    spec.stage_blocks = random_cut(blocks, spec.stages(), random);
    if (random() % 2) spec.input_slots = InputSlots::one_more;
    INFO("setting " << setting << ": " << describe(spec) << ", " << spec.virtual_stages << " stages a rank, groups of "
                    << spec.micro_batch_group);
    const PipelineShape many{spec.pp(), spec.stages(), 64 * spec.micro_batch_group, spec.micro_batch_group};
    const int period = row.period(many), in_flight = row.in_flight(0, many);
    int some = (in_flight + spec.virtual_stages - 1) / spec.virtual_stages + std::max(16, 2 * period + 4);
    some += (period - some % period) % period;
    twice += 2 * period * spec.virtual_stages > 16;
    for (const CallsInARow in_a_row : {CallsInARow::apart, CallsInARow::joined}) {
      ++tried;
      repeating += repeats_as_lowered(random, graph, cluster, training, spec, some, period, in_a_row);
    }
  }
  MESSAGE(repeating << " of " << tried << " lists repeat themselves, those of " << twice
                    << " layouts after fewer than four periods");
  CHECK(repeating > tried / 2);
  CHECK(twice > 10);
}

TEST_CASE("computations in a row take as long as one call as they do apart") {
  std::mt19937 random = testing::random_from(31);
  int fewer = 0;
  for (int setting = 0; setting < 60; ++setting) {
    const bool gpu = setting % 3 != 0;
    OpGraph graph = random_graph(random, 16);
    const Cluster cluster = random_cluster(random, gpu, gpu && setting % 4 == 1);
    TrainingSpec training = training_of(32, gpu ? DataType::bf16 : DataType::fp32);
    training.engine = testing::random_engine(static_cast<unsigned>(setting), graph);
    testing::train_random_parts(static_cast<unsigned>(setting), training, graph);
    NetworkCache networks(cluster, training.engine);
    ParallelSpec spec = random_layout(random, graph, gpu);
    if (random() % 3 == 0) spec.schedule = ScheduleKind::gpipe;
    if (spec.mesh.size() > cluster.devices()) continue;
    INFO("setting " << setting << ": " << describe(spec));
    const std::vector<CostModel> models = cost_models(networks, spec);
    const std::vector<Program> programs =
        programs_of(graph, cluster, training, spec, 1 + static_cast<int>(random() % 12));
    Simulation apart = prepare(programs, models, CallsInARow::apart, false),
               joined = prepare(programs, models, CallsInARow::joined, false);
    const StepResult in_rows = play_step(joined), by_call = play_step(apart);
    const bool slowed = std::ranges::any_of(joined.ranks, [](const PlayedRank& rank) { return rank.contends != 0; });
    if (!slowed) CHECK(in_rows == by_call);  // to the bit
    CHECK(in_rows.time.total().value == doctest::Approx(by_call.time.total().value).epsilon(1e-12));
    CHECK(in_rows.memory == by_call.memory);
    CHECK(in_rows.communication == by_call.communication);
    for (std::size_t r = 0; r < programs.size(); ++r) {
      fewer += joined.ranks[r].list.calls.size() < apart.ranks[r].list.calls.size();
      CHECK(last_of(joined.ranks[r]).time == last_of(apart.ranks[r]).time);
    }
  }
  CHECK(fewer > 50);
}

TEST_CASE("steps of long pipelines are extended with other cuts, too, and where slots come round slowly") {
  struct Case {
    std::string model;
    int devices = 0;
    Degrees degree;
    int zero_stage = 0;
    std::int64_t micro_batches = 0;
    int moves = 0;  // of a block from one stage to another, and of a stage that recomputes
  };
  std::vector<Case> cases{{"llama3-405b", 1024, {.pp = 32, .dp = 4, .tp = 8}, 1, 480, 0}};
  for (int moves = 1; moves <= 12; ++moves)
    cases.push_back({"llama3-70b", 128, {.pp = 4, .dp = 8, .tp = 4}, moves % 4, 120, moves});
  std::mt19937 random = testing::random_from(5);
  int extended = 0;
  for (const Case& one : cases) {
    const OpGraph graph = build_graph(load_model(one.model, testing::source + "/models").spec, 8192);
    const Cluster cluster = testing::cluster_of("dgx-h100", one.devices);
    NetworkCache networks(cluster);
    ParallelSpec spec;
    spec.mesh.degree = one.degree;
    spec.zero_stage = one.zero_stage;
    TrainingSpec training = training_of(one.micro_batches * spec.dp(), DataType::bf16);
    training.sequence_length = 8192;
    spec.stage_blocks = CandidateMaker(graph, cluster, training).cut_of(spec);
    if (one.moves > 0) {
      spec.recompute = Recompute::per_stage;
      spec.stage_recompute.assign(static_cast<std::size_t>(spec.pp()), Recompute::none);
      spec.stage_recompute[random() % spec.stage_recompute.size()] = Recompute::full;
      for (int move = 0; move < one.moves % 5; ++move) {
        --spec.stage_blocks[random() % spec.stage_blocks.size()];
        ++spec.stage_blocks[random() % spec.stage_blocks.size()];
      }
    }
    INFO(describe(spec) << ", " << one.moves << " moves");
    const std::vector<CostModel> models = cost_models(networks, spec);
    const Placements placements = place(graph, spec);
    const std::optional<SimulatedSpec> simulated =
        simulate_steady(graph, cluster, training, spec, placements, row_of(spec.schedule), models);
    if (!simulated || simulated->micro_batches >= one.micro_batches) continue;
    ++extended;
    const StepResult full =
        simulate_spec(graph, cluster, training, spec, placements, schedule_of(spec, training), models, nullptr);
    CHECK(simulated->result.memory == full.memory);
    CHECK(simulated->result.communication == full.communication);
    CHECK(simulated->result.time.total().value == doctest::Approx(full.time.total().value).epsilon(1e-9));
    CHECK(simulated->result.time.compute.value == doctest::Approx(full.time.compute.value).epsilon(1e-9));
    CHECK(simulated->result.time.bubble.value == doctest::Approx(full.time.bubble.value).epsilon(1e-6));
  }
  CHECK(extended >= 10);
}

namespace {

// No recipe asks for several stages a rank yet: this row stands for one that will.
// Interleaved 1F1B: rounds of as many micro-batches as there are ranks, in buffers that alternate.
const ScheduleRow interleaved_row{
    .kind = ScheduleKind::one_f_one_b,
    .name = "interleaved",
    .actions =
        [](const PipelineShape& shape) {
          return interleaved(shape.ranks, shape.stages / shape.ranks, shape.micro_batches);
        },
    .closed_form = nullptr,
    .in_flight = [](int rank,
                    const PipelineShape& shape) { return most_in_flight(interleaved_row.actions(shape).ranks[rank]); },
    .period = [](const PipelineShape& shape) { return 2 * shape.ranks; }};

}  // namespace

TEST_CASE("a step of ranks with several stages extended from its steady state equals the step in full") {
  ModelSpec model = load_model(testing::source + "/tests/data/models/tiny-gpt2.yaml", "").spec;
  model.layers = 7;
  const OpGraph graph = build_graph(model, 16);
  const Cluster cluster = testing::cluster_of("dgx-a100", 24);
  NetworkCache networks(cluster);
  int steady = 0, tried = 0;
  for (const int ranks : {2, 3, 4})
    for (const int chunks : {2, 3})
      for (const int zero_stage : {0, 1, 2, 3}) {
        const int blocks = static_cast<int>(graph.blocks.size()), stages = ranks * chunks;
        if (stages > blocks) continue;
        ParallelSpec spec;
        spec.mesh.degree = {.pp = ranks, .dp = 2, .tp = 1 + zero_stage % 2};
        spec.zero_stage = zero_stage;
        spec.virtual_stages = chunks;
        spec.stage_blocks.assign(static_cast<std::size_t>(stages), 1);
        spec.stage_blocks[static_cast<std::size_t>(zero_stage)] += blocks - stages;
        const int count = 101 * ranks;  // not a multiple of the period
        const TrainingSpec training = training_of(count * spec.dp(), DataType::bf16);
        INFO(ranks << " ranks, " << chunks << " stages each, ZeRO " << zero_stage);
        const std::vector<CostModel> models = cost_models(networks, spec);
        const Placements placements = place(graph, spec);
        const std::optional<SimulatedSpec> simulated =
            simulate_steady(graph, cluster, training, spec, placements, interleaved_row, models);
        ++tried;
        if (!simulated || simulated->micro_batches >= count) continue;
        ++steady;
        const StepResult& extended = simulated->result;
        const Schedule schedule = interleaved_row.actions(shape_of(spec, training));
        const StepResult full = simulate_spec(graph, cluster, training, spec, placements, schedule, models, nullptr);
        CHECK(extended.memory == full.memory);
        CHECK(extended.memory_stage == full.memory_stage);
        CHECK(extended.communication == full.communication);
        CHECK(extended.time.total().value == doctest::Approx(full.time.total().value).epsilon(1e-9));
        CHECK(extended.time.bubble.value == doctest::Approx(full.time.bubble.value).epsilon(1e-6));
      }
  MESSAGE(steady << " of " << tried << " were steady");
  CHECK(steady > tried / 2);
}

TEST_CASE("the spans of a simulated step are its schedule's actions, one after the other on each rank") {
  std::mt19937 random = testing::random_from(23);
  int tried = 0, updates = 0;
  for (int trial = 0; trial < 60; ++trial) {
    OpGraph graph = random_graph(random, 16);
    const Cluster cluster = random_cluster(random, trial % 3 != 0, false);
    TrainingSpec training = training_of(8, trial % 3 != 0 ? DataType::bf16 : DataType::fp32);
    training.engine = testing::random_engine(static_cast<unsigned>(trial), graph);
    testing::train_random_parts(static_cast<unsigned>(trial), training, graph);
    const std::vector<ParallelSpec> specs = enumerate_specs(graph, training, std::min(4, cluster.devices()), {});
    ParallelSpec spec = specs[random() % specs.size()];
    spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.stages(), random);
    if (trial % 2 == 1 && spec.pp() > 1 && spec.virtual_stages == 1 && spec.zero_stage <= 1)
      spec.schedule = ScheduleKind::zero_bubble_h1;
    const Schedule schedule = schedule_of(spec, training);
    NetworkCache networks(cluster, training.engine);
    Timeline timeline;
    const StepResult result = simulate_spec(graph, networks, training, spec, place(graph, spec), schedule, &timeline);
    INFO(describe(spec));
    const std::vector<ChartSpan> spans = chart_spans(timeline);
    for (int rank = 0; rank < spec.pp(); ++rank) {
      std::vector<Action> actions;
      Seconds end;
      for (const ChartSpan& span : spans) {
        if (span.rank != rank) continue;
        CHECK(span.start >= end * (1 - 1e-12));
        end = span.end;
        CHECK(end <= result.time.total() * (1 + 1e-9));
        if (span.action) actions.push_back(*span.action);
        updates += !span.action;
      }
      // The first and the last block have no weight gradients apart, so a stage of these alone.
      std::vector<Action> expected = schedule.ranks[rank];
      const int first = std::accumulate(spec.stage_blocks.begin(), spec.stage_blocks.begin() + rank, 0);
      const bool has_layers =
          first + spec.stage_blocks[rank] < static_cast<int>(graph.blocks.size()) || spec.stage_blocks[rank] > 1;
      if (spec.stages() == spec.pp() && !has_layers)
        std::erase_if(expected, [](const Action& action) { return action.phase == Phase::backward_weights; });
      // Layers without a trained product have no second part.
      const auto is_second = [](const Action& action) { return action.phase == Phase::backward_weights; };
      if (!training.trainable.all) {
        std::erase_if(expected, is_second);
        std::erase_if(actions, is_second);
      }
      // Without a trained parameter in it or before it, a stage has no backward.
      std::erase_if(expected, [&](const Action& action) {
        const int past = std::accumulate(spec.stage_blocks.begin(), spec.stage_blocks.begin() + action.stage + 1, 0);
        return action.phase != Phase::forward && !has_backward(graph, past - 1);
      });
      CHECK(actions == expected);
    }
    ++tried;
  }
  CHECK(tried == 60);
  CHECK(updates > 0);
}

TEST_CASE("a layout that was lowered once is simulated alike on other links, by other hosts and drives, and in other "
          "batches") {
  std::mt19937 random = testing::random_from(83);
  int steady = 0;
  for (int setting = 0; setting < 16; ++setting) {
    const bool gpu = setting % 3 != 0;
    const OpGraph graph = random_graph(random, 16);
    Cluster cluster = random_cluster(random, gpu, false);
    TrainingSpec training = training_of(256, gpu ? DataType::bf16 : DataType::fp32);
    ParallelSpec spec = random_layout(random, graph, gpu);
    if (setting % 4 == 1 && spec.pp() > 1) {
      spec.schedule = ScheduleKind::interleaved;
      spec.virtual_stages = 2;
      if (spec.stages() > static_cast<int>(graph.blocks.size())) continue;
      spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.stages(), random);
    }
    if (illegal(graph, training, spec) || spec.mesh.size() > cluster.devices()) continue;
    if (gpu) {
      cluster.groups.front().host =
          Host{.memory = {}, .memory_bandwidth = BytesPerSecond(4e11), .link = BytesPerSecond(1e10)};
      cluster.groups.front().nvme =
          Nvme{.read = BytesPerSecond(6e9), .write = BytesPerSecond(2.9e9), .latency = {}, .capacity = {}};
      ParallelSpec elsewhere = spec;
      elsewhere.offload = all_offloads()[static_cast<std::size_t>(setting) % all_offloads().size()];
      if (!illegal(graph, training, elsewhere)) spec = elsewhere;
    }
    INFO("setting " << setting << ": " << describe(spec));
    const Placements placements = place(graph, spec);
    SimulatedSteps steps;
    struct Rates {
      double links, host, drives;
    };
    for (const Rates& rates : {Rates{1.0, 1.0, 1.0}, Rates{0.5, 1.0, 1.0}, Rates{3.0, 1.0, 1.0}, Rates{1.0, 0.01, 1.0},
                               Rates{1.0, 1.0, 0.01}})
      for (const std::int64_t batch : {256, 512}) {
        Cluster varied = cluster;
        NodeGroup& group = varied.groups.front();
        for (Link& link : group.node.links) link.bandwidth *= rates.links;
        if (group.host) {
          *group.host->link *= rates.host;
          group.host->memory_bandwidth *= rates.host;
        }
        if (group.nvme) {
          group.nvme->read *= rates.drives;
          group.nvme->write *= rates.drives;
        }
        training.global_batch = batch;
        NetworkCache networks(varied, training.engine);
        const std::vector<CostModel> models = cost_models(networks, spec);
        const SimulatedSpec alone = simulate_soon(graph, varied, training, spec, placements, models);
        const SimulatedSpec shared = steps.simulate(graph, varied, training, spec, placements, models);
        CHECK(shared.result == alone.result);
        CHECK(shared.micro_batches == alone.micro_batches);
        steady += alone.micro_batches < micro_batches(spec, training);
      }
  }
  CHECK(steady > 12);
}

}  // namespace parplan
