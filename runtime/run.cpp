#include "runtime/run.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <utility>

#include <fmt/format.h>

#include "planner/base/file.h"
#include "planner/base/json.h"
#include "planner/program/job.h"
#include "planner/program/verify.h"
#include "runtime/check_promises.h"
#include "runtime/launch/agree_on_inputs.h"
#include "runtime/local_job.h"
#include "runtime/run_facts.h"
#include "runtime/step_history.h"
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
  if (several) {
    std::vector<Fact> facts;
    agree(rendezvous, [&] { facts = run_facts(plan, options); });
    agree_on(rendezvous, facts);
  }
  agree(rendezvous, [&] {
    setting.make_world = choose_world(plan, options.world, rendezvous);
    setting.data =
        graph.images ? TokenData::load_images(options.data, *graph.images, graph.vocabulary, options.shuffle)
                     : TokenData::load(options.data, plan.training.sequence_length, graph.vocabulary, options.shuffle);
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

// What is kept of the steps that a job has executed: as much after a million steps as after a
// hundred thousand.
struct StepLog {
  StepHistory history;
  StepLists lists;
  std::int64_t skipped = 0;
  std::optional<int> signal;
  std::string not_finite;
  // By hosted rank: the times in the first of several steps, to be left out.
  std::map<int, std::vector<InstructionMeasurement>> warm_up;
};

// Why a step ends a run that does not skip; empty where all is finite.
std::string not_finite(std::int64_t step, const JobStep& result, const TrainingSpec& training) {
  const auto fault = [&](const char* what, double value) {
    return std::isfinite(value)
               ? std::string()
               : fmt::format("the {} of step {} is {}", what, step, std::isnan(value) ? "not a number" : "infinite");
  };
  if (std::string of_loss = fault("loss", result.loss); !of_loss.empty()) return of_loss;
  if (!result.gradient_norm || scales_loss(training)) return "";
  return fault("gradient norm", *result.gradient_norm);
}

// Executes `options.steps` steps, holds each of them to the Programs' promises, and profiles the
// last one. A signal, or numbers that are not finite, end it after the step.
StepLog execute(LocalJob& job, const OpGraph& graph, const Plan& plan, const TokenData& data, const RunOptions& options,
                const TrainingPosition& start, Checkpoints* checkpoints) {
  StepLog log;
  const auto position_at = [&](std::int64_t step) {
    return TrainingPosition{.step = step,
                            .skipped_steps = job.skipped(),
                            .next_sample = start.next_sample + (step - start.step) * plan.training.global_batch};
  };
  const auto save_when_due = [&](std::int64_t done) {
    checkpoints->poll();
    const std::int64_t every = options.checkpoint.every;
    if (every > 0 && done % every == 0 && log.not_finite.empty()) checkpoints->save(position_at(done));
  };
  job.run({.first = start.step,
           .count = options.steps - start.step,
           .batch_of =
               [&](std::int64_t step, Batch& batch) {
                 const std::int64_t first = position_at(step).next_sample;
                 if (graph.images)
                   return fill_images(batch, data, *graph.images, graph.vocabulary, first, plan.training.global_batch,
                                      plan.training.seed);
                 fill_from(batch, data, first, plan.training.global_batch);
                 if (graph.masked) mask(batch, *graph.masked, graph.vocabulary, first, plan.training.seed);
                 if (graph.corrupted) corrupt(batch, *graph.corrupted, graph.vocabulary, first, plan.training.seed);
               },
           .timing_of = [&](std::int64_t step) {
             return step + 1 == options.steps ? StepTiming::each_instruction : StepTiming::whole;
           },
           .on_step = [&](std::int64_t step, const JobStep& result) {
             log.history.add(result);
             log.lists.loss.add(result.loss);
             log.lists.time.add(result.time);
             if (result.skipped) ++log.skipped;
             if (step + 1 < options.steps) log.signal = result.signal;  // after the last it ends nothing
             if (options.on_not_finite == OnNotFinite::stop) log.not_finite = not_finite(step, result, plan.training);
             for (const int rank : job.hosted())
               check_promises(job.programs()[rank], job.arena(rank), result.ranks[rank].communication,
                              result.ranks[rank].copied);
             if (step == start.step)
               for (const int rank : job.hosted()) log.warm_up[rank] = flat(job.executor(rank).instructions());
             if (options.on_step)
               options.on_step({.step = step,
                                .loss = result.loss,
                                .gradient_norm = result.gradient_norm,
                                .learning_rate = learning_rate_at(plan.training, step),
                                .time = result.time,
                                .skipped = result.skipped});
             if (checkpoints != nullptr) save_when_due(step + 1);
           },
           .skips_not_finite = options.on_not_finite == OnNotFinite::skip,
           .signal = options.signal,
           .ends_after = [&](const JobStep&) { return log.signal || !log.not_finite.empty(); }});
  if (checkpoints == nullptr) return log;
  // Also after a signal; but parameters that are not finite are worth nothing.
  const std::int64_t done = start.step + log.history.count();
  if (log.history.count() > 0 && checkpoints->last_step() != done && log.not_finite.empty())
    checkpoints->save(position_at(done));
  checkpoints->finish();
  return log;
}

// Where training goes on: at its first step, or behind a checkpoint.
struct Start {
  TrainingPosition position;
  std::unique_ptr<FolderClaim> claim;             // while checkpoints are written
  std::unique_ptr<CheckpointReader> checkpoint;  // that it goes on from
  std::shared_ptr<const WeightFiles> weights;    // or the files that hold the first parameters
  std::vector<Fact> facts;
};

Start find_start(const OpGraph& graph, const Plan& plan, const TokenData& data, const RunOptions& options,
                 Rendezvous& rendezvous) {
  Start start;
  if (!options.weights.folder.empty()) start.weights = open_weights(options.weights, rendezvous);
  if (!options.exported_weights.folder.empty())
    agree(rendezvous, [&] {
      if (rendezvous.process() == 0) check_can_export(options.exported_weights.folder);
    });
  if (options.checkpoint.folder.empty()) return start;
  start.facts = checkpoint_facts(plan, data);
  start.claim = claim_folder(options.checkpoint, rendezvous);
  if (!options.checkpoint.resume) return start;
  start.checkpoint = find_checkpoint(options.checkpoint.folder, graph, plan, start.facts, rendezvous);
  if (start.checkpoint == nullptr) return start;
  const CheckpointIndex& index = start.checkpoint->index();
  start.position = {.step = index.step, .skipped_steps = index.skipped_steps, .next_sample = index.next_sample};
  return start;
}

// For people: how often the run goes through its data.
std::vector<std::string> notes_of(const TokenData& data, const Plan& plan, const Start& start,
                                  const RunOptions& options) {
  const std::int64_t epoch = data.samples(plan.training.sequence_length), batch = plan.training.global_batch;
  const std::int64_t first = start.position.next_sample,
                     last = first + std::max<std::int64_t>(options.steps - start.position.step, 0) * batch;
  if (!options.notes_epochs || last <= epoch) return {};
  return {fmt::format("the data holds {} sequences of {} tokens, {:.1f} steps: this run takes epochs {} to {} of it",
                      epoch, plan.training.sequence_length, static_cast<double>(epoch) / static_cast<double>(batch),
                      first / epoch + 1, (last - 1) / epoch + 1)};
}

// For people: where the run begins.
std::vector<std::string> notes_of(const Start& start, const RunOptions& options) {
  const CheckpointOptions& checkpoint = options.checkpoint;
  if (start.weights && !start.checkpoint) {
    const std::vector<std::string> beyond = start.weights->beyond(options.weights.stored.tensors);
    std::vector<std::string> notes{fmt::format("the parameters are those of {}", options.weights.folder)};
    if (!beyond.empty())
      notes.push_back(fmt::format("{} of its tensors belong to no parameter and are left out, the first of them {}",
                                  beyond.size(), Json(beyond.front()).dump()));
    return notes;
  }
  if (!checkpoint.resume) return {};
  if (start.checkpoint == nullptr)
    return {fmt::format("'{}' holds no whole checkpoint: the run begins with step 0", checkpoint.folder)};
  std::vector<std::string> notes{fmt::format("the run goes on with step {} from {}", start.position.step,
                                             path_of_checkpoint(checkpoint.folder, start.position.step))};
  if (start.position.step >= options.steps)
    notes.push_back(fmt::format("all {} steps were done: nothing is left to do", options.steps));
  for (std::string& changed : changed_facts(start.checkpoint->index(), start.facts))
    notes.push_back(std::move(changed));
  return notes;
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
    if (warm_up == log.warm_up.end() || log.history.count() == 1) continue;
    for (std::size_t i = 0; i < instructions.size(); ++i) {
      instructions[i].runs -= warm_up->second[i].runs;
      instructions[i].busy -= warm_up->second[i].busy;
    }
  }
  return exchange_end(ends, instructions, rendezvous);
}

// What can be said whether or not a step was executed and profiled.
RunReport report_of(const LocalJob& job, const StepLog& log, Bytes process_growth) {
  RunReport report;
  report.steps = log.history.count();
  report.skipped_steps = log.skipped;
  report.signal = log.signal;
  report.not_finite = log.not_finite;
  report.loss = log.lists.loss.kept();
  report.step_times = log.lists.time.kept();
  report.listed_every = log.lists.loss.every();
  report.process_growth = process_growth;
  report.hosted = job.hosted();
  for (const Home home : all_homes)
    for (const Program& program : job.programs())
      report.arena_bytes[home].push_back(Bytes(program.arena_bytes[home]));
  for (const int rank : job.hosted())
    if (report.not_recorded.empty()) report.not_recorded = job.not_recorded(rank);
  return report;
}

// Through parts in logical coordinates, which each rank writes and each process joins.
void export_parameters(const LocalJob& job, const OpGraph& graph, const Plan& plan, const ExportOptions& options,
                       std::int64_t step, Rendezvous& rendezvous) {
  const std::string folder = folder_of_parts(options.folder);
  const bool first = rendezvous.process() == 0;
  agree(rendezvous, [&] {
    if (first) make_export_folder(folder);
  });
  std::string failure;
  Checkpoints parts({.folder = folder, .parameters_only = true}, job, graph, plan, {}, rendezvous,
                    {.say = [](const std::string&) {}, .complain = [&](const std::string& line) { failure = line; }});
  parts.save({.step = step});
  parts.finish();
  if (!failure.empty()) throw RunError(fmt::format("no weights in '{}': {}", options.folder, failure));
  const std::string path = path_of_checkpoint(folder, step);
  std::optional<CheckpointReader> reader;
  agree(rendezvous, [&] {
    const std::string index = path + '/' + index_name;
    reader.emplace(path, read_index(read_file(index), index));
  });
  export_weights(options, *reader, rendezvous);
  if (first) std::filesystem::remove_all(folder);
}

// Everything that a run does with its ranks.
RunReport run_job(LocalJob& job, const OpGraph& graph, const Plan& plan, const TokenData& data, const Start& start,
                  const RunOptions& options, Bytes memory_before, Rendezvous& rendezvous) {
  verify(job.programs());
  check_prediction(plan, job.programs());
  if (start.checkpoint) restore(job, graph, plan.training, *start.checkpoint);
  const auto note = [&](const std::string& line) {
    if (options.on_note) options.on_note(line);
  };
  std::optional<Checkpoints> checkpoints;
  if (!options.checkpoint.folder.empty())
    checkpoints.emplace(options.checkpoint, job, graph, plan, start.facts, rendezvous,
                        Checkpoints::Talk{.say = note, .complain = [&](const std::string& line) {
                                            if (options.on_failure) options.on_failure(line);
                                          }});
  StepLog log;
  if (start.position.step < options.steps)
    log = execute(job, graph, plan, data, options, start.position, checkpoints ? &*checkpoints : nullptr);
  RunReport report = report_of(job, log, resident_memory() - memory_before);
  report.first_step = start.position.step;
  if (checkpoints) {
    report.checkpoint = checkpoints->last_written();
    report.failed_checkpoints = checkpoints->failures();
  }
  if (!options.exported_weights.folder.empty() && start.position.step + report.steps >= options.steps &&
      log.not_finite.empty()) {
    export_parameters(job, graph, plan, options.exported_weights, options.steps, rendezvous);
    note(fmt::format("wrote the weights to {}", options.exported_weights.folder));
  }
  const std::vector<JobStep> steps = log.history.steps();
  if (steps.empty()) return report;

  const BackendKind backend = plan.cluster.backend();
  const TypicalStep typical = typical_step(steps, backend);
  const JobEnd end = share_end(job, log, typical.rank, rendezvous);
  const Bytes device_used(std::ranges::max(end.ranks, {}, &RankEnd::device_used).device_used);
  const bool shares = options.world.share_gpu && rendezvous.processes() == 1;
  for (const Home home : all_homes)
    for (const RankEnd& rank : end.ranks) report.touched_bytes[home].push_back(Bytes(rank.touched[home]));
  if (backend == BackendKind::cuda && !shares) report.device_used = device_used;
  report.is_profiled = steps.back().ranks.front().is_profiled;
  if (!report.is_profiled) return report;

  report.measured_rank = typical.rank;
  report.measured = {.time = measured_time(steps, typical),
                     .memory = measured_memory(job.programs(), backend, device_used,
                                               shares ? DeviceSharing::shared_device : DeviceSharing::own_device),
                     .communication = measured_communication(plan, steps[typical.step])};
  const std::int64_t profiled = backend == BackendKind::cuda ? 1 : std::max<std::int64_t>(report.steps - 1, 1);
  report.instructions = compare_instructions(job.programs()[typical.rank], end.instructions, profiled);
  return report;
}

}  // namespace

const char* name(OnNotFinite what) { return what == OnNotFinite::stop ? "stop" : "skip"; }

TrainingSpec with_gradient_norm(TrainingSpec training) {
  if (!computes_norm(training)) training.clip_norm = std::numeric_limits<double>::infinity();
  return training;
}

RunReport run_plan(const OpGraph& graph, const Plan& plan, const RunOptions& options, Rendezvous& rendezvous) {
  PARPLAN_ASSERT(options.on_not_finite == OnNotFinite::stop || computes_norm(plan.training),
                 "steps are skipped by their gradient norm");
  const Setting setting = set_up(graph, plan, options, rendezvous);
  const Start start = find_start(graph, plan, setting.data, options, rendezvous);
  if (options.on_start) options.on_start();
  if (options.on_note)
    for (const auto& notes : {notes_of(start, options), notes_of(setting.data, plan, start, options)})
      for (const std::string& line : notes) options.on_note(line);

  const Bytes memory_before = resident_memory();
  const Job description = job_of(graph, plan.cluster, plan.training, plan.spec, plan.placements, plan.schedule);
  const InitialValues drawn = initializer(plan.training.seed);
  const InitialValues initial = start.weights ? stored_values(start.weights, options.weights.stored, drawn) : drawn;
  LocalJob job(description, initial, setting.make_world, rendezvous, options.nvme_folder);
  if (options.watch != nullptr) job.be_watched(*options.watch, options.records_folder);
  try {
    if (start.weights) start.weights->check_are_whole();
    return run_job(job, graph, plan, setting.data, start, options, memory_before, rendezvous);
  } catch (const std::exception& failure) {
    job.abort(failure.what());  // before its ranks leave, who may wait for those of other processes
    throw;
  }
}

}  // namespace parplan
