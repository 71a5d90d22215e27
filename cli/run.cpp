#include "runtime/run.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>

#include <unistd.h>

#include <fmt/format.h>
#include <fmt/ostream.h>

#include "cli/add_option.h"
#include "cli/commands.h"
#include "cli/data_folder.h"
#include "cli/local_machine.h"
#include "cli/noted_signals.h"
#include "cli/report_error.h"
#include "cli/resolve_inputs.h"
#include "cli/step_log.h"
#include "cli/write_outputs.h"
#include "models/huggingface.h"
#include "models/huggingface_weights.h"
#include "models/model_file.h"
#include "planner/base/file.h"
#include "planner/base/text.h"
#include "planner/cost/cost_model.h"
#include "planner/explain/find_reasons.h"
#include "planner/program/job.h"
#include "planner/program/lower.h"
#include "planner/report/plan_row.h"
#include "planner/report/run_comparison.h"
#include "planner/report/suggest_and_run_json.h"
#include "planner/schedule/schedules.h"
#include "planner/suggest.h"
#include "runtime/launch/agree_on_inputs.h"
#include "runtime/launch/find_rendezvous.h"
#include "runtime/launch/job_watch.h"
#include "runtime/launch/local_parent.h"
#include "runtime/launch/step_board.h"

namespace parplan {
namespace {

struct RunArguments {
  std::string plan;
  std::int64_t steps = 20;
  std::string data;
  std::optional<std::uint64_t> shuffle;
  std::string backend = "auto";
  bool share_gpu = false;
  bool deterministic = false;
  std::int64_t processes = 1;
  OnNotFinite on_nan = OnNotFinite::stop;
  std::string log;
  std::string nvme_folder;
  CheckpointOptions checkpoint;
  std::chrono::milliseconds timeout = default_timeout;
  std::string failure_records;
  std::string weights;
  std::string exported_weights;
  OutputArguments output;
};

// The files that --data names.
std::vector<std::string> data_files(const std::string& given) {
  if (given.empty()) return {default_text().string()};
  std::error_code unknown;
  std::vector<std::string> files;
  if (std::filesystem::is_directory(given, unknown)) {
    for (const auto& entry : std::filesystem::directory_iterator(given))
      if (entry.path().extension() == ".bin") files.push_back(entry.path().string());
    if (files.empty()) throw ConfigError(fmt::format("--data: the folder '{}' holds no .bin files", given));
    std::ranges::sort(files);
    return files;
  }
  if (std::filesystem::exists(given, unknown)) return {given};
  std::istringstream list(given);
  for (std::string file; std::getline(list, file, ',');) files.push_back(file);
  return files;
}

// The arguments of a child process: the same, without those that only the parent handles.
std::vector<std::string> arguments_of_child(const RunArguments& arguments) {
  std::vector<std::string> list{"run",       arguments.plan,   "--steps", fmt::format("{}", arguments.steps),
                                "--backend", arguments.backend};
  const auto add = [&](const char* option, const std::string& value) {
    if (!value.empty()) list.insert(list.end(), {option, value});
  };
  add("--data", arguments.data);
  if (arguments.shuffle) add("--shuffle", fmt::format("{}", *arguments.shuffle));
  add("--on-nan", name(arguments.on_nan));
  add("--log", arguments.log);
  add("--nvme-dir", arguments.nvme_folder);
  add("--checkpoint", arguments.checkpoint.folder);
  if (arguments.checkpoint.every > 0) add("--every", fmt::format("{}", arguments.checkpoint.every));
  if (arguments.checkpoint.keep > 0) add("--keep", fmt::format("{}", arguments.checkpoint.keep));
  if (arguments.checkpoint.resume) list.push_back("--resume");
  add("--timeout", fmt::format("{}", arguments.timeout.count() / 1000));
  add("--failure-records", arguments.failure_records);
  add("--weights", arguments.weights);
  add("--export-weights", arguments.exported_weights);
  add("--json", arguments.output.json.value_or(""));
  if (arguments.deterministic) list.push_back("--deterministic");
  if (arguments.output.quiet) list.push_back("--quiet");
  if (arguments.output.verbose) list.push_back("--verbose");
  return list;
}

std::string records_folder(const RunArguments& arguments) {
  if (!arguments.failure_records.empty()) return arguments.failure_records;
  std::error_code none;
  const std::filesystem::path folder = std::filesystem::temp_directory_path(none);
  return none ? "." : folder.string();
}

// The effect of CUDA's own variable, which is set to find the kernel that fails.
bool waits_after_kernels() {
  const char* value = std::getenv("CUDA_LAUNCH_BLOCKING");
  return value != nullptr && std::string_view(value) == "1";
}

void check_backend(const std::string& wanted, const Plan& plan) {
  const BackendKind backend = plan.cluster.backend();
  if (wanted == "auto" || wanted == name(backend)) return;
  throw ConfigError(
      fmt::format("--backend {}: the plan is for {} ({}); its memory and its kernels are that backend's: plan again "
                  "with a cluster of {} devices",
                  wanted, device_title(plan.cluster), name(backend),
                  wanted == "cpu"           ? "CPU"
                  : is_accelerator(backend) ? "CUDA"
                                            : "GPU"));
}

// The measured time of each instruction of the measured rank, beside the cost model's prediction
// for the same Program.
std::vector<InstructionTimes> join_instructions(const LoadedPlan& loaded, const RunReport& report) {
  const Plan& plan = loaded.plan;
  const Job job = job_of(loaded.graph, plan.cluster, plan.training, plan.spec, plan.placements, plan.schedule);
  const Program program = lower(job, report.measured_rank);
  NetworkCache networks(plan.cluster);
  const CostModel model = cost_model(networks, plan.spec, program.pipeline_rank, program.replica);
  std::vector<InstructionTimes> joined;
  auto measured = report.instructions.begin();
  for (const Segment& segment : program.segments)
    for (const Instruction& instruction : segment.instructions) {
      if (measured == report.instructions.end()) return joined;  // no step was run
      joined.push_back({.segment = measured->segment,
                        .instruction = measured->instruction,
                        .runs_per_step = measured->runs_per_step,
                        .predicted = duration(instruction, model) * static_cast<double>(measured->runs_per_step),
                        .measured = measured->measured});
      ++measured;
    }
  return joined;
}

// A plan as it will be run, with what there is to say about it.
struct PlanToRun {
  LoadedPlan loaded;
  TrainingSpec training_of_file;  // that of the plan may compute the gradient norm besides
  std::vector<std::string> notes;

  // The plan as reports name it.
  Plan reported() const {
    Plan plan = loaded.plan;
    plan.training = training_of_file;
    return plan;
  }
};

// The prediction is made anew where the file's does not belong to what will be run.
PlanToRun plan_to_run(const RunArguments& arguments) {
  PlanToRun result{.loaded = load_plan(arguments.plan), .training_of_file = {}, .notes = {}};
  Plan& plan = result.loaded.plan;
  result.training_of_file = plan.training;
  check_backend(arguments.backend, plan);
  if (plan.schedule != schedule_of(plan.spec, plan.training)) {
    // The file's prediction may be older than the schedule, and memory depends on it.
    plan.prediction = simulate_plan(result.loaded.graph, plan);
    result.notes.push_back(fmt::format("the schedule is not {} as parplan writes it; its prediction is made anew",
                                       name(plan.spec.schedule)));
  } else if (const auto now = prediction_now(result.loaded.graph, plan)) {
    result.notes.push_back(edited_note(plan.prediction, *now) + "; its prediction is made anew");
    plan.prediction = *now;
  }
  const bool skips = arguments.on_nan == OnNotFinite::skip;
  if ((skips || !arguments.log.empty()) && !computes_norm(plan.training)) {
    plan.training = with_gradient_norm(plan.training);
    plan.prediction = simulate_plan(result.loaded.graph, plan);
    result.notes.push_back(fmt::format("the gradient norm is computed for {}; the prediction is made anew with it",
                                       skips ? "--on-nan skip" : "--log"));
  }
  return result;
}

// Why the run ended before its last step; empty where it did not.
std::string ended(const RunReport& report) {
  return report.signal ? signal_name(*report.signal) : report.not_finite;
}

// The exit code of a run that ended in good order, and why on standard error where it is not 0.
int end(const RunArguments& arguments, const RunReport& report, bool speaks, Terminal& terminal) {
  const std::string steps = fmt::format("after {} of {} steps", report.first_step + report.steps, arguments.steps);
  if (!report.not_finite.empty()) {
    if (speaks)
      fmt::print(terminal.err,
                 "error: {}: the run ended {}; with --on-nan skip, such steps change no parameter and the run goes "
                 "on\n",
                 report.not_finite, steps);
    return exit_failed;
  }
  if (!report.signal) return report.failed_checkpoints == 0 ? exit_done : exit_failed;
  if (speaks) fmt::print(terminal.err, "the run ended {}, because of {}\n", steps, signal_name(*report.signal));
  return exit_of_signal(*report.signal);
}

void write_step(std::ostream& report, const StepRecord& record) {
  const double loss = std::isnan(record.loss) ? std::abs(record.loss) : record.loss;  // "nan", not "-nan"
  fmt::print(report, "step {:>4}  loss {:.6f}  {:>9}{}\n", record.step, loss, format_duration(record.time),
             record.skipped ? "  skipped" : "");
  report.flush();
}

RunComparison comparison_of(const PlanToRun& to_run, const RunReport& report, const std::string& checkpoints) {
  return {.measured = report.measured,
          .loss = report.loss,
          .step_times = report.step_times,
          .promised = report.arena_bytes,
          .touched = report.touched_bytes,
          .process_growth = report.process_growth,
          .hosted = report.hosted,
          .device_used = report.device_used,
          .instructions = join_instructions(to_run.loaded, report),
          .first_step = report.first_step,
          .steps = report.steps,
          .skipped_steps = report.skipped_steps,
          .listed_every = report.listed_every,
          .ended = ended(report),
          .is_profiled = report.is_profiled,
          .checkpoint = report.checkpoint ? path_of_checkpoint(checkpoints, *report.checkpoint) : "",
          .notes = to_run.notes};
}

// Where the weights of files lie in the plan's model; of those that are read, in the class that
// their config.json names.
void add_weights(const RunArguments& arguments, const LoadedPlan& loaded, RunOptions& options) {
  const ModelSpec spec = read_model(loaded.plan.model_text, arguments.plan + " (model)").spec;
  std::optional<HuggingFaceExport> own;
  if (!arguments.weights.empty()) {
    const std::string file = arguments.weights + "/config.json";
    const std::string config = read_file(file);
    if (const std::string differ = differences(read_huggingface(config, file).spec, spec); !differ.empty())
      throw ConfigError({file}, fmt::format("these weights are not of the plan's model: {}", differ));
    own = huggingface_export(config, file);
    options.weights = {.folder = arguments.weights, .stored = huggingface_weights(own->model_type, spec, loaded.graph)};
  }
  if (arguments.exported_weights.empty()) return;
  if (!own) own = huggingface_export(spec);
  options.exported_weights = {.folder = arguments.exported_weights,
                              .stored = huggingface_weights(own->model_type, spec, loaded.graph),
                              .config = own->config};
  if (const std::optional<Lora>& lora = loaded.plan.training.lora)
    options.exported_weights.adapter_factor = lora->alpha / static_cast<double>(lora->r);
}

void check_checkpoints(const RunArguments& arguments) {
  const CheckpointOptions& checkpoint = arguments.checkpoint;
  if (!checkpoint.folder.empty()) return;
  for (const auto& [option, given] :
       {std::pair("--every", checkpoint.every > 0), {"--keep", checkpoint.keep > 0}, {"--resume", checkpoint.resume}})
    if (given) throw ConfigError(fmt::format("{} needs --checkpoint DIR, the folder of the checkpoints", option));
}

// Only the process that reports for all writes.
PlanToRun load(const RunArguments& arguments, bool writes) {
  check_checkpoints(arguments);
  if (writes)
    check_output(arguments.output, {{"--log", arguments.log}}, {{"PLAN", arguments.plan}, {"--data", arguments.data}});
  if (std::error_code unknown;
      !arguments.failure_records.empty() && !std::filesystem::is_directory(arguments.failure_records, unknown))
    throw ConfigError(fmt::format("--failure-records '{}' is no folder", arguments.failure_records));
  return plan_to_run(arguments);
}

// The part of a run in one process of its job. The exit code, where nothing fails.
int run_in(const RunArguments& arguments, Rendezvous& rendezvous, JobWatch& watch, Terminal& terminal) {
  PlanToRun to_run;
  const Plan& plan = to_run.loaded.plan;
  const bool speaks = rendezvous.process() == 0;  // it reports for all processes
  RunOptions options;
  agree(rendezvous, [&] {
    to_run = load(arguments, speaks);
    add_weights(arguments, to_run.loaded, options);
  });
  const bool talks = speaks && !arguments.output.quiet;
  const bool table = speaks && arguments.output.shows_table() && arguments.log != "-";
  std::ostream& report = table ? terminal.out : terminal.err;
  const bool reports = table || talks;

  const NotedSignals signals;
  std::optional<StepBoard> board = StepBoard::inherited(std::getenv(StepBoard::variable));
  std::optional<StepLog> log;
  options.steps = arguments.steps;
  const bool draws_images = to_run.loaded.graph.images && arguments.data.empty();
  if (!draws_images) options.data = data_files(arguments.data);
  options.shuffle = arguments.shuffle;
  options.notes_epochs = !arguments.data.empty();
  options.world = {.share_gpu = arguments.share_gpu,
                   .gpu = {.deterministic = arguments.deterministic, .synchronous = waits_after_kernels()}};
  options.on_not_finite = arguments.on_nan;
  options.nvme_folder = arguments.nvme_folder;
  options.checkpoint = arguments.checkpoint;
  options.signal = NotedSignals::received;
  options.watch = &watch;
  options.records_folder = records_folder(arguments);
  options.on_start = [&] {
    if (speaks && !arguments.log.empty()) log.emplace(arguments.log, terminal);
    if (!talks) return;
    fmt::print(terminal.err, "{}layout    {} on {} rank{}\ndata      {}{}\n", describe_inputs(report_inputs(plan)),
               layout_text(plan.spec), plan.spec.mesh.size(), plan.spec.mesh.size() == 1 ? "" : "s",
               draws_images ? "random images and classes" : join(options.data),
               arguments.data.empty() ? " (default)" : "");
  };
  options.on_note = [&](const std::string& line) {
    if (talks) fmt::print(terminal.err, "note: {}\n", printable(line));
  };
  options.on_failure = [&](const std::string& line) {
    if (speaks) fmt::print(terminal.err, "error: {}\n", printable(line));
  };
  options.on_step = [&](const StepRecord& record) {
    if (board) board->note(rendezvous.process(), record.step);
    if (reports) write_step(report, record);
    if (log) log->add(record);
  };
  if (talks) {
    for (const std::string& note : to_run.notes) fmt::print(terminal.err, "note: {}\n", note);
    if (plan.cluster.backend() == BackendKind::cpu && plan.spec.mesh.size() > usable_cores())
      fmt::print(terminal.err,
                 "note: {} ranks share the {} usable cores of this machine; the prediction gives each a core\n",
                 plan.spec.mesh.size(), usable_cores());
  }

  const RunReport result = run_plan(to_run.loaded.graph, plan, options, rendezvous);
  if (!speaks) return end(arguments, result, speaks, terminal);
  if (talks && !result.not_recorded.empty())
    fmt::print(terminal.err, "note: work that repeats was submitted each time instead of being replayed: {}\n",
               result.not_recorded);
  if (talks && result.skipped_steps > 0)
    fmt::print(terminal.err, "note: {} of {} steps changed no parameter: their gradients were not finite\n",
               result.skipped_steps, result.steps);
  const RunComparison comparison = comparison_of(to_run, result, arguments.checkpoint.folder);
  const Plan reported = to_run.reported();
  if (reports && comparison.is_profiled) {
    fmt::print(report, "\n{}", write_comparison(reported, comparison));
    if (arguments.output.verbose) fmt::print(report, "\n{}", write_instructions(comparison, 40));
  }
  write_outputs(arguments.output, terminal, run_json(report_inputs(reported), reported, comparison), {});
  const int code = end(arguments, result, speaks, terminal);
  return code == exit_done && log && log->failed() ? exit_failed : code;
}

// What happened to a process that this one had started, where it may not have said it itself.
void say(const ChildEvent& event, const RunArguments& arguments, Terminal& terminal) {
  const bool stopped = event.kind == ChildEvent::Kind::stopped;
  const std::string what =
      event.kind == ChildEvent::Kind::exited
          ? fmt::format("ended with exit code {}", event.number)
          : fmt::format("was {} by {}", stopped ? "stopped" : "ended", signal_name(event.number));
  const std::string when =
      event.last_step ? fmt::format("after step {}", *event.last_step) : "before its first step ended";
  fmt::print(terminal.err, "{}: process {} of {} {} {:.1f} s after its start, {}\n",
             stopped ? "note" : "error", event.process, arguments.processes, what,
             std::chrono::duration<double>(event.after).count(), when);
}

int run_parent(const RunArguments& arguments, Terminal& terminal) {
  load(arguments, true);
  // Later ends follow from the first one, and what is no failure of a process it has said itself.
  bool failed = false;
  ChildrenOptions children;
  children.processes = static_cast<int>(arguments.processes);
  children.on_line = [&](int process, std::string_view line) {
    fmt::print(terminal.err, "[rank {}] {}\n", process, line);
  };
  children.on_event = [&](const ChildEvent& event) {
    const bool killed = event.kind == ChildEvent::Kind::killed;
    const bool exited = event.kind == ChildEvent::Kind::exited;
    const bool said = exited && (event.number == exit_bad_input || event.number == exit_of_signal(SIGINT) ||
                                 event.number == exit_of_signal(SIGTERM));
    if (!said && (!exited || !failed)) say(event, arguments, terminal);
    failed = failed || killed || exited;
  };
  return run_children(arguments_of_child(arguments), children);
}

// Ends this process because nothing else does. What another thread holds (a stream, a lock) must
// not matter here.
void end_by_force(const std::string& reason, const std::function<void()>& end_others, bool is_said) {
  for (const std::string_view part : {std::string_view("error: "), std::string_view(reason), std::string_view("\n")})
    if (!is_said) [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, part.data(), part.size());
  try {
    std::thread(end_others).detach();  // it may hang
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  } catch (const std::exception&) {
    // Whoever started the processes sees how this one ends.
  }
  _exit(exit_failed);
}

int carry_out(const RunArguments& arguments, Terminal& terminal) {
  if (arguments.processes > 1) return run_parent(arguments, terminal);
  std::atomic<bool> said = false;
  JobWatch watch({.timeout = arguments.timeout,
                  .last_resort = [&](const std::string& reason, const std::function<void()>& end_others) {
                    end_by_force(reason, end_others, said.exchange(true));
                  }});
  // Processes that meet over TCP give up by themselves, later than this.
  const ProcessPlace place = read_process_place(process_environment());
  const std::chrono::milliseconds silence = watch_times(arguments.timeout).silence;
  const std::chrono::milliseconds patience = patience_to_meet(place, silence);
  watch.expect("the processes of this job have not met", place.started_by == StartedBy::mpi ? patience : 3 * patience,
               [place] { return stragglers(place); });
  std::unique_ptr<Rendezvous> rendezvous = find_rendezvous(process_environment(), patience, silence);
  watch.join(*rendezvous);
  int code = exit_done;
  try {
    code = run_in(arguments, *rendezvous, watch, terminal);
    // Whoever started the job may end all its processes when the first one ends with an exit code
    // that is not 0: none does before the report is written.
    barrier(*rendezvous);
  } catch (const std::exception& failure) {
    // Before anything is destroyed that may wait for other processes, they and the user know.
    const bool all_know =
        dynamic_cast<const SaidForAll*>(&failure) != nullptr || dynamic_cast<const SaidElsewhere*>(&failure) != nullptr;
    if (!all_know) rendezvous->abort(failure.what());
    if (!said.exchange(true)) code = report_error(terminal.err);
    else code = exit_failed;
    for (const std::string& file : watch.write_records())
      fmt::print(terminal.err, "the last instructions of a rank are in '{}'\n", file);
    terminal.err.flush();
  }
  watch.leave();
  rendezvous.reset();
  return code;
}

}  // namespace

CommandBody declare_run(CLI::App& app) {
  const auto arguments = std::make_shared<RunArguments>();
  add_subject(app, arguments->plan, "PLAN", "a plan.yaml that suggest or simulate wrote");
  add_option(
      app, {.names = "--steps", .type = "N", .description = "optimizer steps to run (default: 20)"},
      [arguments](const std::string& text) { arguments->steps = parse_whole("--steps", text, 1, 1'000'000'000); });
  add_option(app,
             {.names = "--data",
              .type = "FILE,...",
              .description = "text files, read as bytes, or tokens in llm.c's layout; or a folder, for its .bin files "
                             "by name (default: a text that comes with parplan)"},
             arguments->data);
  add_option(app,
             {.names = "--shuffle",
              .type = "SEED",
              .description = "take the sequences of each epoch in an order that follows from this number alone, "
                             "whatever the plan (default: as they stand)"},
             [arguments](const std::string& text) {
               arguments->shuffle = static_cast<std::uint64_t>(
                   parse_whole("--shuffle", text, 0, std::numeric_limits<std::int64_t>::max()));
             });
  add_option(app,
             {.names = "--backend",
              .type = "auto|cpu|cuda",
              .description = "what carries out the kernels (default: auto, the plan's)"},
             [arguments](const std::string& text) {
               parse_choice("--backend", text, {"auto", "cpu", "cuda"});
               arguments->backend = text;
             });
  add_flag(app,
           {.names = "--share-gpu",
            .type = "",
            .description = "all ranks as threads on one GPU, to try a plan out where there are fewer GPUs than ranks"},
           arguments->share_gpu);
  add_flag(app,
           {.names = "--deterministic",
            .type = "",
            .description = "the same bits in every run on the same GPU (CPUs always give them)"},
           arguments->deterministic);
  add_option(app,
             {.names = "--on-nan",
              .type = "stop|skip",
              .description = "what to do after a step whose loss or gradients are not finite: end the run, or change "
                             "no parameter in this step and go on (default: stop)"},
             [arguments](const std::string& text) {
               arguments->on_nan =
                   parse_choice("--on-nan", text, {"stop", "skip"}) == 0 ? OnNotFinite::stop : OnNotFinite::skip;
             });
  add_option(app,
             {.names = "--log",
              .type = "FILE",
              .description = "write loss, gradient norm, learning rate and time of each step as a line of JSON when it "
                             "is done, to a file, or to standard output with -"},
             arguments->log);
  add_option(app,
             {.names = "--nvme-dir",
              .type = "DIR",
              .description = "a folder on NVMe drives for what a plan keeps there (offload): a file for each rank, "
                             "gone when the run ends (default: $TMPDIR, or the working directory)"},
             arguments->nvme_folder);
  add_option(app,
             {.names = "--checkpoint",
              .type = "DIR",
              .description = "write checkpoints into this folder: where the run ends, also because of a signal, and "
                             "with --every while it goes on"},
             arguments->checkpoint.folder);
  add_option(app,
             {.names = "--every",
              .type = "N",
              .description = "write a checkpoint after every N steps, beside the steps that follow (default: only "
                             "where the run ends)"},
             [arguments](const std::string& text) {
               arguments->checkpoint.every = parse_whole("--every", text, 1, 1'000'000'000);
             });
  add_option(app,
             {.names = "--keep",
              .type = "N",
              .description = "remove all checkpoints but the newest N when one is complete (default: keep all)"},
             [arguments](const std::string& text) {
               arguments->checkpoint.keep = parse_whole("--keep", text, 1, 1'000'000'000);
             });
  add_flag(app,
           {.names = "--resume",
            .type = "",
            .description = "go on from the newest whole checkpoint in the folder, whatever plan wrote it, to the "
                           "--steps of the whole training; without any, begin with step 0"},
           arguments->checkpoint.resume);
  add_option(app,
             {.names = "--timeout",
              .type = "SECONDS",
              .description = "how long a job lasts at most after a rank or process failed, died or stopped answering "
                             "(default: 10); computing may take any time"},
             [arguments](const std::string& text) {
               arguments->timeout = std::chrono::seconds(parse_whole("--timeout", text, 1, 1'000'000));
             });
  add_option(app,
             {.names = "--failure-records",
              .type = "FOLDER",
              .description = "where each rank's last instructions are written when the job fails (default: the folder "
                             "of temporary files)"},
             arguments->failure_records);
  add_option(app,
             {.names = "--weights",
              .type = "DIR",
              .description = "begin with the weights in this folder of Hugging Face's libraries: config.json and "
                             "safetensors"},
             arguments->weights);
  add_option(app,
             {.names = "--export-weights",
              .type = "DIR",
              .description = "write the weights after the last step into a new folder that transformers reads"},
             arguments->exported_weights);
  add_option(
      app,
      {.names = "--processes",
       .type = "N",
       .description = "start this many processes of this machine, one a rank (default: 1, whose threads are the "
                      "ranks)"},
      [arguments](const std::string& text) { arguments->processes = parse_whole("--processes", text, 1, 100'000); });
  add_output(app, arguments->output, CsvOutput::absent);
  return [arguments](Terminal& terminal) { return carry_out(*arguments, terminal); };
}

}  // namespace parplan
