#include <doctest/doctest.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include <fmt/format.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/parallel/techniques.h"
#include "planner/program/lower.h"
#include "planner/schedule/schedules.h"
#include "runtime/local_job.h"
#include "runtime/run.h"
#include "tests/runtime/device/counting_allocator.h"
#include "tests/temporary_folder.h"

namespace parplan {
namespace {

const std::string source = PARPLAN_SOURCE_DIR;

OpGraph tiny(const std::string& model) {
  return build_graph(load_model(source + "/tests/data/models/" + model + ".yaml", "").spec, 16);
}

TrainingSpec training_of() {
  TrainingSpec training;
  training.global_batch = 8;
  training.sequence_length = 16;
  training.learning_rate = 1e-2;
  return training;
}

ParallelSpec spec_of(const OpGraph& graph, int dp, int tp, int pp, int zero) {
  ParallelSpec spec;
  spec.mesh.degree = {.pp = pp, .dp = dp, .tp = tp};
  spec.zero_stage = zero;
  spec.sequence_parallel = tp > 1;
  spec.recompute = pp > 1 ? Recompute::full : Recompute::none;
  spec.stage_blocks.assign(static_cast<std::size_t>(pp), 1);
  spec.stage_blocks.back() += static_cast<int>(graph.blocks.size()) - pp;
  return spec;
}

Job job_of(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec) {
  return {.graph = &graph, .training = training, .layout = lay_out(spec, place(graph, spec)),
          .schedule = schedule_of(spec, training),
          .backend = BackendKind::cpu, .overhead = {}};
}

TokenData some_tokens() {
  std::vector<std::int32_t> tokens;
  for (int i = 0; i < 500; ++i) tokens.push_back(i * 7 % 31);
  return TokenData(std::move(tokens));
}

// A plan for two CPU cores, as a search would make it.
Plan plan_of(const OpGraph& graph, int dp, int pp) {
  Plan plan;
  plan.training = training_of();
  plan.spec = spec_of(graph, dp, 1, pp, 0);
  plan.placements = place(graph, plan.spec);
  plan.schedule = row_of(plan.spec.schedule).actions({pp, static_cast<int>(micro_batches(plan.spec, plan.training))});
  plan.cluster.groups.front().device.name = "core";
  plan.cluster.groups.front().device.backend = BackendKind::cpu;
  plan.cluster.groups.front().node.devices = {0, 1};
  const std::vector<Program> programs = lower_all(job_of(graph, plan.training, plan.spec));
  for (const Program& program : programs)
    if (program.memory.peak() > plan.prediction.memory.peak()) plan.prediction.memory = program.memory;
  plan.prediction.communication = programs.front().communication;  // two equal stages, or one stage's first rank
  return plan;
}

std::string message_of(const auto& call) {
  try {
    call();
  } catch (const std::exception& failure) {
    return failure.what();
  }
  return "";
}

}  // namespace

TEST_CASE("after the first step, steps allocate nothing") {
  if (!allocations_are_counted) return;
  for (const std::string model : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = tiny(model);
    for (const ParallelSpec& spec :
         {spec_of(graph, 1, 1, 1, 0), spec_of(graph, 2, 1, 2, 3), spec_of(graph, 2, 2, 2, 1)}) {
      const TrainingSpec training = training_of();
      const std::unique_ptr<Rendezvous> rendezvous = alone();
      LocalJob job(job_of(graph, training, spec), initializer(1), cpu_threads(), *rendezvous);
      const TokenData data = some_tokens();
      std::vector<std::int64_t> counts;
      counts.reserve(8);
      job.run({.first = 0,
               .count = 6,
               .batch_of = [&](std::int64_t step, Batch& batch) { fill(batch, data, step, training.global_batch); },
               .timing_of = {},
               .on_step = [&](std::int64_t, const JobStep&) { counts.push_back(allocation_count.load()); }});
      REQUIRE(counts.size() == 6);
      for (std::size_t i = 2; i < counts.size(); ++i) CHECK(counts[i] == counts[i - 1]);
    }
  }
}

TEST_CASE("a run reports losses, promises and what each instruction took") {
  const OpGraph graph = tiny("tiny-gpt2");
  std::string text;
  for (int i = 0; i < 400; ++i) text += static_cast<char>(i * 5 % 32);
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("text.bin", text);
  const std::unique_ptr<Rendezvous> rendezvous = alone();
  for (const Plan& plan : {plan_of(graph, 2, 1), plan_of(graph, 1, 2)}) {
    std::int64_t calls = 0;
    const RunOptions options{
        .steps = 4, .data = {path}, .on_step = [&](const StepRecord& record) { CHECK(record.step == calls++); }};
    const RunReport report = run_plan(graph, plan, options, *rendezvous);
    CHECK(calls == 4);
    CHECK(report.loss.size() == 4);
    CHECK(report.loss.back() < report.loss.front());
    CHECK(report.arena_bytes == report.touched_bytes);
    CHECK(report.arena_bytes.device.size() == 2);
    CHECK(report.arena_bytes.host == std::vector<Bytes>(2));
    CHECK(report.measured.time.total().value > 0.0);
    CHECK(report.measured.memory == plan.prediction.memory);
    CHECK(!report.instructions.empty());
  }
  Plan broken = plan_of(graph, 2, 1);
  broken.prediction.memory.activations -= Bytes(64);
  CHECK_THROWS_AS(run_plan(graph, broken, {.steps = 1, .data = {path}, .on_step = {}}, *rendezvous), InternalError);
  broken = plan_of(graph, 2, 1);
  broken.prediction.communication.dp += Bytes(4);
  CHECK_THROWS_AS(run_plan(graph, broken, {.steps = 1, .data = {path}, .on_step = {}}, *rendezvous), InternalError);
}

TEST_CASE("a prediction that is not the plan's is found before the first step") {
  const OpGraph graph = tiny("tiny-gpt2");
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("text.bin", std::string(400, '\1'));
  const std::unique_ptr<Rendezvous> rendezvous = alone();
  std::int64_t steps = 0;
  const RunOptions options{.steps = 2, .data = {path}, .on_step = [&](const StepRecord&) { ++steps; }};
  Plan broken = plan_of(graph, 2, 1);
  broken.training.clip_norm = 1.0;  // the prediction knows nothing of the norm
  CHECK_THROWS_AS(run_plan(graph, broken, options, *rendezvous), InternalError);
  broken = plan_of(graph, 1, 2);
  broken.prediction.communication.pp += Bytes(4);
  CHECK(message_of([&] { run_plan(graph, broken, options, *rendezvous); }).find("are sent a step (") !=
        std::string::npos);
  CHECK(steps == 0);
}

TEST_CASE("a signal ends a run after the step, with a report of what was done, under every layout") {
  const OpGraph graph = tiny("tiny-gpt2");
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("text.bin", std::string(400, '\1'));
  const std::unique_ptr<Rendezvous> rendezvous = alone();
  for (const Plan& plan : {plan_of(graph, 1, 1), plan_of(graph, 2, 1), plan_of(graph, 1, 2)}) {
    std::int64_t begun = 0;
    RunOptions options{.steps = 1000, .data = {path}};
    options.signal = [&] { return ++begun == 4 ? std::optional(15) : std::nullopt; };
    const RunReport report = run_plan(graph, plan, options, *rendezvous);
    CHECK(report.steps == 4);
    CHECK(report.signal == 15);
    CHECK(report.not_finite.empty());
    CHECK(report.loss.size() == 4);
    CHECK(report.step_times.size() == 4);
    CHECK(report.is_profiled);
    CHECK(report.measured.memory == plan.prediction.memory);
    CHECK(report.touched_bytes == report.arena_bytes);
    for (const InstructionComparison& one : report.instructions) CHECK(one.runs_per_step > 0);
  }
}

TEST_CASE("a loss that is not finite ends a run with the step and what it is") {
  const OpGraph graph = tiny("tiny-gpt2");
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("text.bin", std::string(400, '\1'));
  const std::unique_ptr<Rendezvous> rendezvous = alone();
  for (Plan plan : {plan_of(graph, 2, 1), plan_of(graph, 1, 2)}) {
    plan.training.learning_rate = 1e36;
    const RunReport report = run_plan(graph, plan, {.steps = 9, .data = {path}}, *rendezvous);
    CHECK(report.not_finite == "the loss of step 1 is not a number");
    CHECK(report.steps == 2);
    CHECK(!report.signal);
    CHECK(report.loss.size() == 2);
  }
}

TEST_CASE("a run holds the peak of each home to the plan's promise") {
  const OpGraph graph = tiny("tiny-gpt2");
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("text.bin", std::string(400, '\1'));
  const std::unique_ptr<Rendezvous> rendezvous = alone();
  const RunOptions options{.steps = 2, .data = {path}, .on_step = {}};
  Plan plan = plan_of(graph, 2, 1);
  const MemoryUse on_device = plan.prediction.memory;
  plan.placements.state.homes.optimizer = Home::host;
  CHECK_THROWS_AS(run_plan(graph, plan, options, *rendezvous), InternalError);  // promises all bytes on the device
  // The moments, and as much of master copies and of copies of gradients; the last buffer of an
  // arena is not padded.
  const Bytes moved = 2 * on_device.optimizer - Bytes(128);
  plan.prediction.memory.host = moved;
  plan.prediction.memory.optimizer = Bytes(0);
  const RunReport report = run_plan(graph, plan, options, *rendezvous);
  CHECK(report.measured.memory == plan.prediction.memory);
  CHECK(report.arena_bytes == report.touched_bytes);
  CHECK(report.arena_bytes.host == std::vector<Bytes>(2, moved));
  plan.prediction.memory.host += Bytes(64);
  CHECK_THROWS_AS(run_plan(graph, plan, options, *rendezvous), InternalError);
}

TEST_CASE("a plan that cannot run here says what is missing") {
  const OpGraph graph = tiny("tiny-mlp");
  const std::unique_ptr<Rendezvous> rendezvous = alone();
  const auto refusal = [&](const Plan& plan) {
    return message_of([&] { run_plan(graph, plan, {.steps = 1, .data = {""}, .on_step = {}}, *rendezvous); });
  };
  Plan plan = plan_of(graph, 2, 1);
  plan.training.precision = DataType::bf16;
  CHECK(refusal(plan) ==
        "error: the plan computes in bf16; the CPU backend computes in fp32: plan again with --precision fp32");
  plan = plan_of(graph, 2, 1);
  plan.cluster.groups.front().device.backend = BackendKind::cuda;
  plan.cluster.groups.front().device.title = "NVIDIA H100 SXM5 80 GB";
  const testing::TemporaryFolder folder;  // an empty one
  const std::string nowhere = folder.root().string();
  REQUIRE(setenv("PARPLAN_PLUGINS", nowhere.c_str(), 1) == 0);
  CHECK(refusal(plan) == fmt::format("error: the plan is for NVIDIA H100 SXM5 80 GB and cannot run here. Missing: {}; "
                                     "make a plan for this machine with "
                                     "`parplan suggest MODEL`",
                                     open_gpu().missing));
  CHECK(open_gpu().missing.find(nowhere) != std::string::npos);
  unsetenv("PARPLAN_PLUGINS");
}

TEST_CASE("what fails between steps stops every rank and reaches the caller") {
  const OpGraph graph = tiny("tiny-gpt2");
  const TrainingSpec training = training_of();
  const std::unique_ptr<Rendezvous> rendezvous = alone();
  LocalJob job(job_of(graph, training, spec_of(graph, 2, 1, 2, 0)), initializer(1), cpu_threads(), *rendezvous);
  const TokenData data = some_tokens();
  const std::string message = message_of([&] {
    job.run({.first = 0,
             .count = 5,
             .batch_of = [&](std::int64_t step, Batch& batch) {
               if (step == 2) throw RunError("no more data");
               fill(batch, data, step, training.global_batch);
             },
             .timing_of = {},
             .on_step = [](std::int64_t, const JobStep&) {}});
  });
  CHECK(message == "no more data");
}

TEST_CASE("parameters start the same under every plan") {
  const OpGraph graph = tiny("tiny-gpt2");
  const TrainingSpec training = training_of();
  const std::unique_ptr<Rendezvous> rendezvous = alone();
  const auto start_of = [&](const ParallelSpec& spec) {
    return LocalJob(job_of(graph, training, spec), initializer(3), cpu_threads(), *rendezvous)
        .collect(ParameterContent::values);
  };
  const LogicalTensors one = start_of(spec_of(graph, 1, 1, 1, 0));
  const LogicalTensors many = start_of(spec_of(graph, 2, 2, 2, 3));
  CHECK(one == many);
  CHECK(static_cast<std::int64_t>(one.size()) == static_cast<std::int64_t>(parameters(graph).size()));
}

}  // namespace parplan
