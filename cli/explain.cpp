#include "planner/report/explain.h"

#include <memory>
#include <utility>

#include <fmt/ostream.h>

#include "cli/add_option.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/resolve_inputs.h"
#include "cli/write_outputs.h"
#include "planner/explain/find_reasons.h"
#include "planner/report/explain_json.h"

namespace parplan {
namespace {

struct ExplainArguments {
  std::string path;
  OutputArguments output;
  bool quick = false;
  std::optional<std::string> calibration;
};

int carry_out(const ExplainArguments& arguments, Terminal& terminal) {
  check_output(arguments.output, {}, {{"PLAN", arguments.path}});
  LoadedPlan loaded = load_plan(arguments.path);
  if (arguments.calibration)
    if (const std::string note =
            calibrate(loaded.plan.cluster, loaded.plan.training.engine, *arguments.calibration);
        !note.empty() && !arguments.output.quiet)
      fmt::print(terminal.err, "note: {}: {}\n", *arguments.calibration, note);
  ProgressLine progress(terminal, arguments.output.quiet ? Talk::quiet : Talk::wanted);
  ReasonsOptions options;
  options.searches = !arguments.quick;
  options.progress = [&](const std::string& doing) { progress.show(doing); };
  loaded.plan = simulated_anew(loaded.graph, std::move(loaded.plan), arguments.calibration.has_value());
  const Reasons reasons = find_reasons(loaded.graph, loaded.plan, options);
  progress.clear();
  if (arguments.output.shows_table()) fmt::print(terminal.out, "{}", explain(loaded.plan, reasons));
  if (arguments.output.verbose) fmt::print(terminal.err, "found in {}\n", format_duration(reasons.time));
  write_outputs(arguments.output, terminal, explain_json(report_inputs(loaded.plan), loaded.plan, reasons),
                std::span<const Json>());
  return exit_done;
}

}  // namespace

CommandBody declare_explain(CLI::App& app) {
  const auto arguments = std::make_shared<ExplainArguments>();
  add_subject(app, arguments->path, "PLAN", "a plan.yaml that suggest or simulate wrote");
  add_flag(app,
           {.names = "--quick",
            .type = "",
            .description = "no searches: only what simulations of the plan and its neighbours say"},
           arguments->quick);
  add_calibration(app, "Where", arguments->calibration);
  add_output(app, arguments->output, CsvOutput::absent);
  return [arguments](Terminal& terminal) { return carry_out(*arguments, terminal); };
}

}  // namespace parplan
