#include "runtime/run.h"

#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ostream.h>

#include "cli/commands.h"
#include "cli/data_folder.h"
#include "cli/inputs.h"
#include "cli/local_machine.h"
#include "planner/cost/cost_model.h"
#include "planner/program/lower.h"
#include "planner/report/comparison.h"
#include "planner/report/json.h"
#include "planner/report/row.h"

namespace parplan {
namespace {

struct RunArguments {
  std::string plan;
  std::int64_t steps = 20;
  std::string data;
  std::string backend = "auto";
  OutputArguments output;
};

// What each instruction of the measured rank took, beside what the cost model of its stage says of the same Program.
std::vector<InstructionTimes> join_instructions(const LoadedPlan& loaded, const RunReport& report) {
  const Plan& plan = loaded.plan;
  const Job job{.graph = &loaded.graph, .training = plan.training, .spec = plan.spec, .placements = plan.placements, .schedule = plan.schedule,
                .backend = plan.cluster.device.backend, .overhead = plan.cluster.device.memory_overhead};
  const Program program = lower(job, report.measured_rank);
  const CostModel model = cost_model(plan.cluster, plan.spec.mesh, program.stage);
  std::vector<InstructionTimes> joined;
  auto measured = report.instructions.begin();
  for (const Segment& segment : program.segments)
    for (const Instruction& instruction : segment.instructions) {
      if (measured == report.instructions.end()) return joined;  // no step was run
      joined.push_back({.segment = measured->segment, .instruction = measured->instruction, .runs_per_step = measured->runs_per_step,
                        .predicted = duration(instruction, model) * static_cast<double>(measured->runs_per_step),
                        .measured = Seconds(measured->measured_s)});
      ++measured;
    }
  return joined;
}

int carry_out(const RunArguments& arguments, Terminal& terminal) {
  check_output(arguments.output);
  const LoadedPlan loaded = load_plan(arguments.plan);
  const Plan& plan = loaded.plan;
  const bool talks = !arguments.output.quiet;
  const bool table = arguments.output.shows_table();
  std::ostream& report = table ? terminal.out : terminal.err;
  const bool reports = table || talks;

  RunOptions options;
  options.steps = arguments.steps;
  options.data = arguments.data.empty() ? default_text().string() : arguments.data;
  if (talks && plan_only_note(plan.cluster).empty())
    fmt::print(terminal.err, "{}layout    {} on {} rank{}\ndata      {}{}\n", describe_inputs(report_inputs(plan)), layout_text(plan.spec), plan.spec.mesh.size(),
               plan.spec.mesh.size() == 1 ? "" : "s", options.data, arguments.data.empty() ? " (default)" : "");
  if (reports)
    options.on_step = [&](std::int64_t step, double loss, double step_time_s) {
      fmt::print(report, "step {:>4}  loss {:.6f}  {:>9}\n", step, loss, format_duration(Seconds(step_time_s)));
      report.flush();
    };
  if (talks && plan.cluster.device.backend == BackendKind::cpu && plan.spec.mesh.size() > usable_cores())
    fmt::print(terminal.err, "note: {} ranks share the {} usable cores of this machine; the prediction gives each a core\n", plan.spec.mesh.size(), usable_cores());

  RunReport result = run_plan(loaded.graph, plan, options);
  const RunComparison comparison{.measured = result.measured,
                                 .loss = result.loss,
                                 .step_times_s = result.step_times_s,
                                 .promised = result.arena_bytes,
                                 .touched = result.touched_bytes,
                                 .process_growth = result.process_growth,
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
  app.add_option_function<std::string>(
         "--steps", [arguments](const std::string& text) { arguments->steps = parse_whole("--steps", text, 1, 1'000'000'000); },
         "optimizer steps to run (default: 20)")
      ->type_name("N");
  app.add_option("--data", arguments->data, "a text file, read as bytes, or tokens in llm.c's layout (default: a text that comes with parplan)")->type_name("FILE");
  app.add_option_function<std::string>(
         "--backend",
         [arguments](const std::string& text) {
           if (text == "cuda") throw ConfigError("--backend cuda: this build has no GPU backend; allowed: auto, cpu");
           parse_choice("--backend", text, {"auto", "cpu"});
         },
         "what carries out the kernels (default: auto, the plan's)")
      ->type_name("auto|cpu");
  add_output(app, arguments->output, CsvOutput::absent);
  return [arguments](Terminal& terminal) { return carry_out(*arguments, terminal); };
}

}  // namespace parplan
