#include "runtime/run.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>
#include <utility>

#include "planner/program/job.h"
#include "planner/program/verify.h"
#include "runtime/check_promises.h"
#include "runtime/launch/agree_on_inputs.h"
#include "runtime/local_job.h"
#include "runtime/run_facts.h"
#include "runtime/token_data.h"

namespace parplan {
namespace {

// What a plan needs of this process in order to run.
struct Setting {
  MakeWorld make_world;
  TokenData data{std::vector<std::int32_t>()};
};

// Throws ConfigError in all processes where one of them cannot run the plan, or was started to run
// something else than the others.
Setting set_up(const OpGraph& graph, const Plan& plan, const RunOptions& options, Rendezvous& rendezvous) {
  Setting setting;
  const bool several = rendezvous.processes() > 1;
  if (several) agree_on(rendezvous, run_facts(plan, options));
  agree(rendezvous, [&] {
    setting.make_world = choose_world(plan, options.world, rendezvous);
    setting.data = TokenData::load(options.data, plan.training.sequence_length, graph.vocabulary);
  });
  if (several) agree_on(rendezvous, data_facts(setting.data));
  return setting;
}

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

std::vector<InstructionMeasurement> flat(const std::vector<std::vector<InstructionMeasurement>>& segments) {
  std::vector<InstructionMeasurement> all;
  for (const std::vector<InstructionMeasurement>& segment : segments)
    all.insert(all.end(), segment.begin(), segment.end());
  return all;
}

// The steps that a job has executed.
struct StepLog {
  std::vector<JobStep> steps;
  // By hosted rank: the times in the first of several steps, to be left out.
  std::map<int, std::vector<InstructionMeasurement>> warm_up;
};

// Executes `options.steps` steps, holds each of them to the Programs' promises, and profiles the
// last one.
StepLog execute(LocalJob& job, const Plan& plan, const TokenData& data, const RunOptions& options) {
  StepLog log;
  job.run({.first = 0,
           .count = options.steps,
           .batch_of = [&](std::int64_t step, Batch& batch) { fill(batch, data, step, plan.training.global_batch); },
           .timing_of = [&](std::int64_t step) {
             return step + 1 == options.steps ? StepTiming::each_instruction : StepTiming::whole;
           },
           .on_step = [&](std::int64_t step, const JobStep& result) {
             log.steps.push_back(result);
             for (const int rank : job.hosted())
               check_promises(job.programs()[rank], job.arena(rank), result.ranks[rank].communication);
             if (step == 0 && options.steps > 1)
               for (const int rank : job.hosted()) log.warm_up[rank] = flat(job.executor(rank).instructions());
             if (options.on_step) options.on_step(step, result.loss, result.time);
           }});
  return log;
}

// The memory of all ranks, and the times of `measured_rank`, which one of the processes hosts.
JobEnd share_end(const LocalJob& job, const StepLog& log, int measured_rank, Rendezvous& rendezvous) {
  std::vector<RankEnd> ends;
  std::vector<InstructionMeasurement> instructions;
  for (const int rank : job.hosted()) {
    ends.push_back({.rank = rank,
                    .touched = job.arena(rank).highest_touched(),
                    .device_used = job.device_memory(rank).used.count});
    if (rank != measured_rank) continue;
    instructions = flat(job.executor(rank).instructions());
    const auto warm_up = log.warm_up.find(rank);
    if (warm_up == log.warm_up.end()) continue;
    for (std::size_t i = 0; i < instructions.size(); ++i) {
      instructions[i].runs -= warm_up->second[i].runs;
      instructions[i].busy -= warm_up->second[i].busy;
    }
  }
  return exchange_end(ends, instructions, rendezvous);
}

// What can be said whether or not a step was executed.
RunReport report_of(const LocalJob& job, const StepLog& log, Bytes process_growth) {
  RunReport report;
  for (const JobStep& step : log.steps) {
    report.loss.push_back(step.loss);
    report.step_times.push_back(step.time);
  }
  report.process_growth = process_growth;
  for (const Home home : all_homes)
    for (const Program& program : job.programs())
      report.arena_bytes[home].push_back(Bytes(program.arena_bytes[home]));
  for (const int rank : job.hosted())
    if (report.not_recorded.empty()) report.not_recorded = job.not_recorded(rank);
  return report;
}

}  // namespace

RunReport run_plan(const OpGraph& graph, const Plan& plan, const RunOptions& options, Rendezvous& rendezvous) {
  const Setting setting = set_up(graph, plan, options, rendezvous);
  if (options.on_start) options.on_start();

  const Bytes memory_before = resident_memory();
  const Job description = job_of(graph, plan.cluster, plan.training, plan.spec, plan.placements, plan.schedule);
  LocalJob job(description, initializer(plan.training.seed), setting.make_world, rendezvous);
  verify(job.programs());
  const StepLog log = execute(job, plan, setting.data, options);
  RunReport report = report_of(job, log, resident_memory() - memory_before);
  if (log.steps.empty()) return report;

  const BackendKind backend = plan.cluster.backend();
  const TypicalStep typical = typical_step(log.steps, backend);
  const JobEnd end = share_end(job, log, typical.rank, rendezvous);
  const Bytes device_used(std::ranges::max(end.ranks, {}, &RankEnd::device_used).device_used);
  const bool shares = options.world.share_gpu && rendezvous.processes() == 1;
  report.measured_rank = typical.rank;
  report.measured = {.time = measured_time(log.steps, typical),
                     .memory = measured_memory(job.programs(), backend, device_used,
                                               shares ? DeviceSharing::shared_device : DeviceSharing::own_device),
                     .communication = measured_communication(plan, log.steps[typical.step])};
  for (const Home home : all_homes)
    for (const RankEnd& rank : end.ranks) report.touched_bytes[home].push_back(Bytes(rank.touched[home]));
  if (backend == BackendKind::cuda && !shares) report.device_used = device_used;
  check_prediction(plan, report.measured);

  const std::int64_t profiled = backend == BackendKind::cuda ? 1 : std::max<std::int64_t>(options.steps - 1, 1);
  report.instructions = compare_instructions(job.programs()[typical.rank], end.instructions, profiled);
  return report;
}

}  // namespace parplan
