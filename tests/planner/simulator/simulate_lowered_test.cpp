// Lowered Programs of seeded random plans, simulated on both kinds of device.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/base/error.h"
#include "planner/parallel/techniques.h"
#include "planner/program/lower.h"
#include "planner/program/lower_block.h"
#include "planner/program/verify.h"
#include "planner/schedule/schedules.h"
#include "planner/simulator/segment_cost.h"
#include "planner/simulator/simulate.h"
#include "planner/simulator/simulation_state.h"
#include "planner/simulator/steady_state.h"
#include "tests/planner/schedule/random_orders.h"
#include "tests/planner/simulator/hand_built.h"
#include "tests/planner/simulator/pipelines.h"

namespace parplan {
namespace {

// Rates at which kernels and communication of a tiny model take about the same time.
CostModel model_of(const Program& program, bool overlaps_communication) {
  CostModel model = unit_model(overlaps_communication);
  DeviceKind device = *model.device;
  device.kernel_launch = Seconds(1e-6);
  model.device = std::make_shared<const DeviceKind>(device);
  model.rates.matrix_fp32 = model.rates.matrix_half = FlopsPerSecond(1e9);
  model.rates.vector = FlopsPerSecond(1e9);
  model.rates.memory = BytesPerSecond(1e9);
  for (auto& [group, network] : model.networks) {
    const bool neighbour = is_neighbour(group);
    network = {.ranks = neighbour ? 2 : std::max(1, static_cast<int>(program.group(group).size())),
               .nodes = 1,
               .ring_bandwidth = BytesPerSecond(1e9),
               .tree_bandwidth = BytesPerSecond(1e9),
               .intra_latency = Seconds(1e-6),
               .inter_latency = Seconds(0.0)};
  }
  return model;
}

TEST_CASE("fused Segments take less by the bytes that are not moved") {
  const std::string folder = PARPLAN_SOURCE_DIR "/tests/data/models";
  const OpGraph graph = build_graph(load_model(folder + "/tiny-gpt2.yaml", folder).spec, 16);
  CostModel model = unit_model(false);  // a byte takes a second, arithmetic takes nothing
  model.rates.matrix_fp32 = model.rates.vector = FlopsPerSecond(1e30);
  model.rates.memory = BytesPerSecond(1.0);
  ParallelSpec spec;
  spec.micro_batch = 2;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  TrainingSpec training;
  training.global_batch = 2;
  training.sequence_length = 16;
  const auto seconds = [&](Recompute recompute, bool fuse, bool backward) {
    spec.recompute = recompute;
    const Job job{.graph = &graph,
                  .training = training,
                  .layout = lay_out(spec, place(graph, spec)),
                  .schedule = {},
                  .backend = BackendKind::cpu,
                  .overhead = {},
                  .fuse = fuse};
    const LoweredBlock block = lower_block(graph, 1, block_context(job, 1, Coordinates{}));
    return cost_segment(backward ? block.backward : block.forward, model).duration.value;
  };
  // 32 tokens; hidden 32, feature 128, 4 B per number. Forward: neither the sum nor the input of
  // GELU is read again. Backward: the gradient between the product and GELU is neither written nor
  // read.
  const double forward = 4.0 * 32 * (32 + 128), backward = 4.0 * 32 * 2 * 128;
  for (const Recompute recompute : {Recompute::none, Recompute::full})
    CHECK(seconds(recompute, false, false) - seconds(recompute, true, false) == forward);
  CHECK(seconds(Recompute::none, false, true) - seconds(Recompute::none, true, true) == backward);
  CHECK(seconds(Recompute::full, false, true) - seconds(Recompute::full, true, true) == forward + backward);
}

TEST_CASE("lowered Programs of random plans play to their end, with parts that sum to it") {
  std::mt19937 random(20261121);
  const std::string folder = PARPLAN_SOURCE_DIR "/tests/data/models";
  int played = 0;
  for (const char* model_name : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = build_graph(load_model(folder + "/" + model_name + ".yaml", folder).spec, 16);
    TrainingSpec training;
    training.global_batch = 16;
    training.sequence_length = 16;
    for (int trial = 0; trial < 120; ++trial) {
      const auto draw = [&](std::initializer_list<int> of) {
        return *(of.begin() + static_cast<long>(random() % of.size()));
      };
      ParallelSpec spec;
      spec.mesh.degree = {.pp = draw({1, 2, 3, 4}), .dp = draw({1, 2, 4}), .tp = draw({1, 2})};
      spec.sequence_parallel = spec.tp() > 1 && draw({0, 1}) == 1;
      spec.zero_stage = spec.dp() > 1 ? draw({0, 1, 2, 3}) : 0;
      spec.micro_batch = draw({1, 2});
      spec.schedule = draw({0, 1}) == 0 ? ScheduleKind::gpipe : ScheduleKind::one_f_one_b;
      spec.recompute = draw({0, 1}) == 0 ? Recompute::none : Recompute::full;
      spec.stage_blocks.assign(static_cast<std::size_t>(spec.pp()), 1);
      for (int left = static_cast<int>(graph.blocks.size()) - spec.pp(); left > 0; --left)
        ++spec.stage_blocks[random() % spec.stage_blocks.size()];
      training.clip_norm = draw({0, 1});
      if (illegal(graph, training, spec)) continue;
      const Job job{.graph = &graph,
                    .training = training,
                    .layout = lay_out(spec, place(graph, spec)),
                    .schedule = schedule_of(spec, training),
                    .backend = BackendKind::cpu,
                    .overhead = {}};
      const std::vector<Program> programs = lower_representatives(job);
      const std::string what =
          fmt::format("{}: pp {} dp {} tp {} sequence parallel {} zero {} micro-batch {} {} recompute {} clip {}",
                      model_name, spec.pp(), spec.dp(), spec.tp(), spec.sequence_parallel, spec.zero_stage,
                      spec.micro_batch, name(spec.schedule), name(spec.recompute), training.clip_norm);
      CAPTURE(what);
      std::array<double, 2> totals{};
      for (const bool overlaps : {true, false}) {
        CAPTURE(overlaps);
        std::vector<CostModel> models;
        for (const Program& program : programs) models.push_back(model_of(program, overlaps));
        Timeline timeline;
        const StepResult result = simulate(programs, models, &timeline);
        CHECK(simulate(programs, models) == result);
        const double total = totals[overlaps ? 1 : 0] = result.time.total().value;

        // The timeline ends with the step; one stream (on a CPU, one rank except for its posted
        // sends) does one thing at a time.
        double last = 0.0;
        double most_compute = 0.0;
        std::map<int, double> compute;
        std::map<std::pair<int, int>, double> free;
        for (const TimelineEvent& event : timeline.events) {
          last = std::max(last, event.end.value);
          if (event.stream == Stream::compute && event.label == Label::compute)
            most_compute = std::max(most_compute, compute[event.rank] += (event.end - event.start).value);
          const bool sends = event.stream == Stream::send_next || event.stream == Stream::send_previous;
          if (!overlaps && sends) continue;
          double& until = free[{event.rank, overlaps ? static_cast<int>(event.stream) : 0}];
          CHECK(event.start.value >= until - 1e-12);
          until = event.end.value;
        }
        CHECK(total == doctest::Approx(last).epsilon(1e-9));
        CHECK(total >= most_compute * (1 - 1e-9));
        for (const Seconds part :
             {result.time.compute, result.time.recompute, result.time.exposed.tp, result.time.exposed.dp,
              result.time.exposed.pp, result.time.bubble, result.time.optimizer})
          CHECK(part >= Seconds(0.0));
        if (spec.pp() == 1) CHECK(result.time.bubble.value <= 1e-12);
        if (spec.tp() == 1) CHECK(result.time.exposed.tp == Seconds(0.0));
        if (spec.recompute == Recompute::none) CHECK(result.time.recompute == Seconds(0.0));
      }
      CHECK(totals[1] <= totals[0] * (1 + 1e-9));  // overlap never costs
      ++played;
    }
  }
  CHECK(played > 100);
}

TEST_CASE("lowered Programs of ranks with several stages play every action, and reach a steady state") {
  const std::string folder = PARPLAN_SOURCE_DIR "/tests/data/models";
  const OpGraph graph = build_graph(load_model(folder + "/tiny-gpt2.yaml", folder).spec, 16);
  for (const auto& [ranks, chunks] : {std::pair(2, 2), {2, 3}, {3, 2}}) {
    CAPTURE(ranks);
    CAPTURE(chunks);
    ParallelSpec spec;
    spec.mesh.degree = {.pp = ranks};
    ParallelSpec cut = spec;
    cut.stage_blocks.assign(static_cast<std::size_t>(ranks * chunks), 1);
    cut.stage_blocks.back() += static_cast<int>(graph.blocks.size()) - ranks * chunks;
    const auto programs_of = [&, ranks = ranks, chunks = chunks](int count) {
      TrainingSpec training;
      training.global_batch = count;
      training.sequence_length = 16;
      const Schedule schedule = interleaved(ranks, chunks, count);
      CHECK(!find_fault(schedule, count));
      return lower_representatives({.graph = &graph,
                                    .training = training,
                                    .layout = lay_out(cut, place(graph, spec)),
                                    .schedule = schedule,
                                    .backend = BackendKind::cpu,
                                    .overhead = {}});
    };
    // Rounds of as many micro-batches as ranks, in exchange buffers that take turns by two.
    const int period = 2 * ranks, count = 12 * period;
    const std::vector<Program> shorter = programs_of(count - period), programs = programs_of(count);
    for (const bool overlaps : {true, false}) {
      std::vector<CostModel> models;
      for (const Program& program : programs) models.push_back(model_of(program, overlaps));
      Timeline timeline;
      const StepResult result = simulate(programs, models, &timeline);
      std::set<std::pair<int, int>> seen;  // stage and micro-batch
      for (const TimelineEvent& event : timeline.events)
        if (event.stage && event.micro_batch) {
          CHECK(*event.stage % ranks == event.rank);
          seen.insert({*event.stage, *event.micro_batch});
        }
      CHECK(static_cast<int>(seen.size()) == ranks * chunks * count);
      Simulation played = prepare(programs, models, CallsInARow::apart, false);
      CHECK(play_step(played) == result);
      const int round = chunks * period;  // forwards
      const std::optional<SteadyState> steady = find_steady_state(played, 5 * round, 8 * round, 2 * round, round);
      REQUIRE(steady);
      const Seconds grown = result.time.total() - simulate(shorter, models).time.total();
      CHECK(grown.value == doctest::Approx(steady->later.value).epsilon(1e-9));
    }
  }
}

TEST_CASE("an order passes find_fault where its Programs run to their end in launch order, and no other does") {
  std::mt19937 random(10);
  const std::string folder = PARPLAN_SOURCE_DIR "/tests/data/models";
  const OpGraph graph = build_graph(load_model(folder + "/tiny-gpt2.yaml", folder).spec, 16);
  int ran = 0, refused = 0;
  for (int trial = 0; trial < 250; ++trial) {
    const int stages = 2 + static_cast<int>(random() % 3), count = 2 + static_cast<int>(random() % 8);
    ParallelSpec spec;
    spec.mesh.degree = {.pp = stages, .dp = 1 + static_cast<int>(random() % 2)};
    spec.zero_stage = spec.dp() > 1 ? static_cast<int>(random() % 4) : 0;
    spec.stage_blocks.assign(static_cast<std::size_t>(stages), 1);
    for (int left = static_cast<int>(graph.blocks.size()) - stages; left > 0; --left)
      ++spec.stage_blocks[random() % spec.stage_blocks.size()];
    TrainingSpec training;
    training.global_batch = count * spec.dp();
    training.sequence_length = 16;
    REQUIRE(!illegal(graph, training, spec));
    const Job job{.graph = &graph,
                  .training = training,
                  .layout = lay_out(spec, place(graph, spec)),
                  .schedule = random_orders(stages, count, false, random),
                  .backend = BackendKind::cpu,
                  .overhead = {}};
    const std::optional<std::string> fault = find_fault(job.schedule, count);
    CAPTURE(fault.value_or("none"));
    const std::vector<Program> programs = lower_representatives(job);
    for (const bool overlaps : {true, false}) {
      std::vector<CostModel> models;
      for (const Program& program : programs) models.push_back(model_of(program, overlaps));
      if (!fault)
        CHECK_NOTHROW(simulate(programs, models));
      else if (!overlaps)
        CHECK_THROWS_AS(simulate(programs, models), InternalError);
    }
    const std::vector<Fault> faults = find_faults(lower_all(job));
    CHECK(faults.empty() == !fault);
    if (!fault && !faults.empty()) MESSAGE(write_fault(faults.front()));
    ++(fault ? refused : ran);
  }
  MESSAGE(ran << " orders ran, " << refused << " were refused");
  CHECK(ran >= 30);
  CHECK(refused >= 30);
}

TEST_CASE("an order down the ranks and back that passes find_fault runs to its end, and its Programs verify") {
  std::mt19937 random(12);
  const std::string folder = PARPLAN_SOURCE_DIR "/tests/data/models";
  const OpGraph graph = build_graph(load_model(folder + "/tiny-gpt2.yaml", folder).spec, 16);
  int ran = 0;
  for (int trial = 0; trial < 150; ++trial) {
    const int ranks = 2 + trial % 2, count = 1 + static_cast<int>(random() % 8);
    ParallelSpec spec;
    spec.mesh.degree = {.pp = ranks, .dp = 1 + static_cast<int>(random() % 2)};
    spec.zero_stage = spec.dp() > 1 ? static_cast<int>(random() % 2) : 0;
    spec.schedule = ScheduleKind::zero_bubble_v;
    spec.virtual_stages = 2;
    if (trial % 3 == 0) spec.input_slots = InputSlots::one_more;
    spec.stage_blocks.assign(static_cast<std::size_t>(2 * ranks), 1);
    for (int left = static_cast<int>(graph.blocks.size()) - 2 * ranks; left > 0; --left)
      ++spec.stage_blocks[random() % spec.stage_blocks.size()];
    TrainingSpec training;
    training.global_batch = count * spec.dp();
    training.sequence_length = 16;
    REQUIRE(!illegal(graph, training, spec));
    const Job job{.graph = &graph,
                  .training = training,
                  .layout = lay_out(spec, place(graph, spec)),
                  .schedule = random_v_orders(ranks, count, random),
                  .backend = BackendKind::cpu,
                  .overhead = {}};
    if (find_fault(job.schedule, count)) continue;
    ++ran;
    const std::vector<Program> programs = lower_representatives(job);
    for (const bool overlaps : {true, false}) {
      std::vector<CostModel> models;
      for (const Program& program : programs) models.push_back(model_of(program, overlaps));
      CHECK_NOTHROW(simulate(programs, models));
    }
    std::string found;
    for (const Fault& fault : find_faults(lower_all(job))) found += write_fault(fault) + "\n";
    CHECK(found == "");
  }
  MESSAGE(ran << " orders ran");
  CHECK(ran >= 30);
}

}  // namespace
}  // namespace parplan
