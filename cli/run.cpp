#include "runtime/run.h"

#include <cstdlib>
#include <memory>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ostream.h>

#include "cli/add_option.h"
#include "cli/commands.h"
#include "cli/data_folder.h"
#include "cli/local_machine.h"
#include "cli/resolve_inputs.h"
#include "cli/write_outputs.h"
#include "planner/cost/cost_model.h"
#include "planner/program/job.h"
#include "planner/program/lower.h"
#include "planner/report/plan_row.h"
#include "planner/report/run_comparison.h"
#include "planner/report/suggest_and_run_json.h"
#include "planner/schedule/schedules.h"
#include "planner/suggest.h"
#include "runtime/launch/agree_on_inputs.h"
#include "runtime/launch/find_rendezvous.h"
#include "runtime/launch/local_parent.h"

namespace parplan {
namespace {

struct RunArguments {
  std::string plan;
  std::int64_t steps = 20;
  std::string data;
  std::string backend = "auto";
  bool share_gpu = false;
  bool deterministic = false;
  std::int64_t processes = 1;
  OutputArguments output;
};

// The arguments of a child process: the same, without those that only the parent handles.
std::vector<std::string> arguments_of_child(const RunArguments& arguments) {
  std::vector<std::string> list{"run",       arguments.plan,   "--steps", fmt::format("{}", arguments.steps),
                                "--backend", arguments.backend};
  const auto add = [&](const char* option, const std::string& value) {
    if (!value.empty()) list.insert(list.end(), {option, value});
  };
  add("--data", arguments.data);
  add("--json", arguments.output.json.value_or(""));
  if (arguments.deterministic) list.push_back("--deterministic");
  if (arguments.output.quiet) list.push_back("--quiet");
  if (arguments.output.verbose) list.push_back("--verbose");
  return list;
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
  const CostModel model = cost_model(plan.cluster, plan.spec.mesh, program.pipeline_rank);
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

int carry_out(const RunArguments& arguments, Terminal& terminal) {
  LoadedPlan loaded;
  const Plan& plan = loaded.plan;
  // Whether the schedule is not the one that the layout names: the file's prediction may be older
  // than the schedule, and memory depends on it.
  bool own_schedule = false;
  // Only the process that reports for all writes.
  const auto load = [&](bool writes) {
    if (writes) check_output(arguments.output, {}, {{"PLAN", arguments.plan}, {"--data", arguments.data}});
    loaded = load_plan(arguments.plan);
    check_backend(arguments.backend, plan);
    own_schedule = plan.schedule != schedule_of(plan.spec, plan.training);
    if (own_schedule) loaded.plan.prediction = simulate_plan(loaded.graph, plan);
  };
  if (arguments.processes > 1) {
    load(true);
    ChildrenOptions children;
    children.processes = static_cast<int>(arguments.processes);
    children.on_line = [&](int process, std::string_view line) {
      fmt::print(terminal.err, "[rank {}] {}\n", process, line);
    };
    return run_children(arguments_of_child(arguments), children);
  }
  const std::unique_ptr<Rendezvous> rendezvous = find_rendezvous();
  const bool speaks = rendezvous->process() == 0;  // it reports for all processes
  agree(*rendezvous, [&] { load(speaks); });
  const bool talks = speaks && !arguments.output.quiet;
  const bool table = speaks && arguments.output.shows_table();
  std::ostream& report = table ? terminal.out : terminal.err;
  const bool reports = table || talks;

  RunOptions options;
  options.steps = arguments.steps;
  options.data = arguments.data.empty() ? default_text().string() : arguments.data;
  options.world = {.share_gpu = arguments.share_gpu,
                   .gpu = {.deterministic = arguments.deterministic, .synchronous = waits_after_kernels()}};
  if (talks)
    options.on_start = [&] {
      fmt::print(terminal.err, "{}layout    {} on {} rank{}\ndata      {}{}\n", describe_inputs(report_inputs(plan)),
                 layout_text(plan.spec), plan.spec.mesh.size(), plan.spec.mesh.size() == 1 ? "" : "s", options.data,
                 arguments.data.empty() ? " (default)" : "");
    };
  if (reports)
    options.on_step = [&](std::int64_t step, double loss, Seconds step_time) {
      fmt::print(report, "step {:>4}  loss {:.6f}  {:>9}\n", step, loss, format_duration(step_time));
      report.flush();
    };
  if (talks && own_schedule)
    fmt::print(terminal.err, "note: the schedule is not {} as parplan writes it; its prediction is made anew\n",
               name(plan.spec.schedule));
  if (talks && plan.cluster.backend() == BackendKind::cpu && plan.spec.mesh.size() > usable_cores())
    fmt::print(terminal.err,
               "note: {} ranks share the {} usable cores of this machine; the prediction gives each a core\n",
               plan.spec.mesh.size(), usable_cores());

  RunReport result = run_plan(loaded.graph, plan, options, *rendezvous);
  if (!speaks) return exit_done;
  if (talks && !result.not_recorded.empty())
    fmt::print(terminal.err, "note: work that repeats was submitted each time instead of being replayed: {}\n",
               result.not_recorded);
  const RunComparison comparison{.measured = result.measured,
                                 .loss = result.loss,
                                 .step_times = result.step_times,
                                 .promised = result.arena_bytes,
                                 .touched = result.touched_bytes,
                                 .process_growth = result.process_growth,
                                 .device_used = result.device_used,
                                 .instructions = join_instructions(loaded, result)};
  if (reports) {
    fmt::print(report, "\n{}", write_comparison(plan, comparison));
    if (arguments.output.verbose) fmt::print(report, "\n{}", write_instructions(comparison, 40));
  }
  const std::vector<Json> rows{row(subject_of(plan)), row(subject_of(plan, comparison.measured))};
  write_outputs(arguments.output, terminal, run_json(report_inputs(plan), plan, comparison), rows);
  return exit_done;
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
              .type = "FILE",
              .description = "a text file, read as bytes, or tokens in llm.c's layout (default: a text that comes with "
                             "parplan)"},
             arguments->data);
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
