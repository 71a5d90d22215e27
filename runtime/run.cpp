#include "runtime/run.h"

#include <algorithm>
#include <fstream>
#include <numeric>
#include <sstream>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/program/lower.h"
#include "planner/program/verify.h"
#include "runtime/local_job.h"

namespace parplan {
namespace {

Bytes resident_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    std::istringstream words(line);
    std::string key;
    std::int64_t kibibytes = 0;
    if (words >> key >> kibibytes && key == "VmRSS:") return Bytes(kibibytes * 1024);
  }
  return Bytes(0);
}

void refuse_what_cannot_run(const Plan& plan) {
  if (plan.cluster.device.backend == BackendKind::cuda)
    throw ConfigError(fmt::format("the plan is for {}: plan only. Missing: a GPU backend (this build runs plans for CPU devices); "
                                  "make a plan for this machine with `parplan suggest MODEL`",
                                  plan.cluster.device.title.empty() ? plan.cluster.device.name : plan.cluster.device.title));
  if (plan.training.precision != DataType::fp32)
    throw ConfigError(fmt::format("the plan computes in {}; the CPU backend computes in fp32: plan again with --precision fp32",
                                  name(plan.training.precision)));
  if (plan.cluster.nodes > 1 && plan.spec.mesh.size() > plan.cluster.devices_per_node())
    throw ConfigError(fmt::format("the plan spreads over {} nodes; ranks of one process are on one machine: plan again with --nodes 1",
                                  plan.cluster.nodes));
}

// A promise that the run broke is a bug of ours.
void check_promises(const LocalJob& job, const StepMeasurement& step, int rank) {
  const Program& program = job.programs()[static_cast<std::size_t>(rank)];
  const std::int64_t touched = job.arena(rank).highest_touched();
  if (touched != program.arena_bytes)
    throw InternalError(fmt::format("rank {} was promised an arena of {} bytes and touched {}", rank, program.arena_bytes, touched));
  const CommunicationVolume& promised = program.communication;
  const CommunicationVolume& sent = step.communication;
  if (!(sent == promised))
    throw InternalError(fmt::format("rank {} was to send {} + {} + {} bytes a step (tensor, data, pipeline) and sent {} + {} + {}", rank,
                                    promised.tensor.count, promised.data.count, promised.pipeline.count, sent.tensor.count,
                                    sent.data.count, sent.pipeline.count));
}

Bytes sum(const CommunicationVolume& volume) { return volume.tensor + volume.data + volume.pipeline; }

// The ranks that a prediction speaks of: one a stage, at data and tensor coordinate 0.
std::vector<int> representatives(const Plan& plan) {
  std::vector<int> ranks;
  for (int stage = 0; stage < plan.spec.pp(); ++stage) ranks.push_back(rank_at(plan.spec.mesh, {stage, 0, 0}));
  return ranks;
}

// What the run measured against what the plan says, to the byte.
void check_prediction(const Plan& plan, const StepResult& measured) {
  if (measured.memory.arena() != plan.prediction.memory.arena())
    throw InternalError(fmt::format("the worst rank's arena is {} bytes; the plan promises {} (was the plan changed by hand?)",
                                    measured.memory.arena().count, plan.prediction.memory.arena().count));
  const CommunicationVolume& sent = measured.communication;
  const CommunicationVolume& promised = plan.prediction.communication;
  if (!(sent == promised))
    throw InternalError(fmt::format("{} + {} + {} bytes were sent a step (tensor, data, pipeline); the plan promises {} + {} + {} "
                                    "(was the plan changed by hand?)",
                                    sent.tensor.count, sent.data.count, sent.pipeline.count, promised.tensor.count,
                                    promised.data.count, promised.pipeline.count));
}

}  // namespace

RunReport run_plan(const OpGraph& graph, const Plan& plan, const RunOptions& options) {
  refuse_what_cannot_run(plan);
  const TokenData data = TokenData::load(options.data, plan.training.sequence_length, graph.vocabulary);
  const Bytes memory_before = resident_memory();

  const Job description{.graph = &graph, .training = plan.training, .spec = plan.spec, .placements = plan.placements,
                        .schedule = plan.schedule, .backend = plan.cluster.device.backend, .overhead = plan.cluster.device.memory_overhead};
  LocalJob job(description, initializer(plan.training.seed));
  verify(job.programs());

  RunReport report;
  std::vector<std::vector<StepMeasurement>> steps;
  // What the first step took, to be left out where there are others: it touches memory for the first time.
  std::vector<std::vector<std::vector<InstructionMeasurement>>> warm_up(job.programs().size());
  job.run(0, options.steps, [&](std::int64_t step, Batch& batch) { fill(batch, data, step, plan.training.global_batch); },
          [&](std::int64_t step, const JobStep& result) {
            report.loss.push_back(result.loss);
            report.step_times_s.push_back(result.step_time_s);
            steps.push_back(result.ranks);
            for (std::size_t r = 0; r < result.ranks.size(); ++r) check_promises(job, result.ranks[r], static_cast<int>(r));
            if (step == 0 && options.steps > 1)
              for (std::size_t r = 0; r < warm_up.size(); ++r) warm_up[r] = job.executor(static_cast<int>(r)).instructions();
            if (options.on_step) options.on_step(step, result.loss, result.step_time_s);
          });
  report.process_growth = resident_memory() - memory_before;
  for (const Program& program : job.programs()) {
    report.arena_bytes.push_back(Bytes(program.arena_bytes));
    report.touched_bytes.push_back(Bytes(job.arena(program.rank).highest_touched()));
  }
  if (steps.empty()) return report;

  // The median step, without the first where there are others.
  std::vector<std::size_t> order(steps.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (order.size() > 1) order.erase(order.begin());
  std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(order.size() / 2), order.end(),
                   [&](std::size_t a, std::size_t b) { return report.step_times_s[a] < report.step_times_s[b]; });
  const std::vector<StepMeasurement>& median = steps[order[order.size() / 2]];
  const auto last = std::max_element(median.begin(), median.end(), [](const StepMeasurement& a, const StepMeasurement& b) {
    return a.time.total() < b.time.total();
  });
  report.measured.time = last->time;
  const int last_rank = static_cast<int>(last - median.begin());
  report.measured_rank = last_rank;
  const auto worst = std::max_element(job.programs().begin(), job.programs().end(), [](const Program& a, const Program& b) {
    return a.memory.peak() < b.memory.peak();
  });
  // Parts as planned: every rank touched its arena to the promised byte, or check_promises had thrown.
  report.measured.memory = worst->memory;
  for (const int rank : representatives(plan)) {
    const CommunicationVolume& sent = median[static_cast<std::size_t>(rank)].communication;
    if (sum(sent) > sum(report.measured.communication)) report.measured.communication = sent;
  }
  check_prediction(plan, report.measured);

  const Program& program = job.programs()[static_cast<std::size_t>(last_rank)];
  const auto& measured = job.executor(last_rank).instructions();
  const auto& before = warm_up[static_cast<std::size_t>(last_rank)];
  const std::int64_t counted = static_cast<std::int64_t>(order.size());
  for (std::size_t s = 0; s < program.segments.size(); ++s)
    for (std::size_t i = 0; i < program.segments[s].instructions.size(); ++i) {
      const Instruction& instruction = program.segments[s].instructions[i];
      InstructionMeasurement measurement = measured[s][i];
      if (!before.empty()) {
        measurement.runs -= before[s][i].runs;
        measurement.busy_s -= before[s][i].busy_s;
      }
      const char* what = instruction.kind == InstructionKind::kernel ? name(instruction.op) : name(instruction.kind);
      report.instructions.push_back({.segment = program.segments[s].name,
                                     .instruction = instruction.name == what ? what : fmt::format("{} {}", instruction.name, what),
                                     .runs_per_step = measurement.runs / counted,
                                     .measured_s = measurement.busy_s / static_cast<double>(counted)});
    }
  return report;
}

}  // namespace parplan
