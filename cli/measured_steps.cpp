#include "cli/measured_steps.h"

#include <list>

#include <fmt/format.h>
#include <fmt/ostream.h>

#include "cli/add_option.h"
#include "cli/load_plan.h"
#include "planner/base/file.h"
#include "planner/calibrate/training_log.h"

namespace parplan {
namespace {

Seconds parse_step(const std::string& option, const std::string& text) {
  Seconds step;
  try {
    step = parse_duration(text);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("{}: {}", option, message_of(error)));
  }
  if (step.value <= 0.0) throw ConfigError(fmt::format("{}: a step takes more than 0, found '{}'", option, text));
  return step;
}

// "a.yaml=23 s,b.yaml=31 s"
std::vector<MeasuredArguments::PlanAndStep> parse_also(const std::string& option, const std::string& text) {
  std::vector<MeasuredArguments::PlanAndStep> also;
  for (const std::string& word : parse_list(option, text)) {
    const std::size_t sign = word.rfind('=');
    if (sign == std::string::npos || sign == 0)
      throw ConfigError(
          fmt::format("{}: expected a plan and its step, such as 'other.yaml=23 s', found '{}'", option, word));
    also.push_back({.plan = word.substr(0, sign), .step = parse_step(option, word.substr(sign + 1))});
  }
  return also;
}

Seconds step_of_log(const MeasuredArguments& measured, const Plan& plan, Terminal& terminal, bool talks) {
  const LoggedSteps logged = read_training_log(read_file(measured.log), measured.log,
                                               {.global_batch = plan.training.global_batch,
                                                .sequence_length = plan.training.sequence_length,
                                                .devices = plan.spec.mesh.size()});
  if (talks) {
    fmt::print(terminal.err, "note: {}: {} step{} of {} count, {} in the middle, 8 of 10 from {} to {}\n", measured.log,
               logged.lines, logged.lines == 1 ? "" : "s", logged.written_by, format_duration(logged.median),
               format_duration(logged.low), format_duration(logged.high));
    if (logged.other_batches > 0)
      fmt::print(terminal.err, "note: {}: {} lines of another global batch are left out\n", measured.log,
                 logged.other_batches);
  }
  return logged.median;
}

}  // namespace

void add_measured(CLI::App& app, MeasuredArguments& measured) {
  const std::string group = "Calibration";
  const auto add = [&](const char* names, const char* type, const char* description,
                       std::function<void(const std::string&)> read) {
    add_option(app, {.names = names, .type = type, .description = description, .group = group}, std::move(read));
  };
  add("--measured-step", "TIME",
      "what a step of this layout took, such as '19 s': fits what kernels, links inside nodes or NICs reach, "
      "whichever the step follows most (docs/calibration.md)",
      [&](const std::string& text) { measured.step = parse_step("--measured-step", text); });
  add("--measured-log", "FILE",
      "the same from the training's log (Megatron-LM, DeepSpeed, torchtitan, NeMo, nanotron): its median step",
      [&](const std::string& text) { measured.log = text; });
  add("--also-measured", "PLAN=TIME,...",
      "steps of other layouts on the same cluster, each a plan.yaml: several steps tell several constants",
      [&](const std::string& text) { measured.also = parse_also("--also-measured", text); });
  add("--save-calibration", "FILE",
      "write what was fitted to this file, or to standard output with -, for --calibration of other commands",
      [&](const std::string& text) { measured.calibration = text; });
}

void check_measured(const MeasuredArguments& measured, const WhereArguments& where) {
  if (measured.step && !measured.log.empty())
    throw ConfigError("--measured-step and --measured-log both say what the step took; leave one of them out");
  if (measured.any() && where.calibration)
    throw ConfigError(
        "--calibration is of other steps, and a calibration is fitted to the rates of the cluster's "
        "files; leave it out, and give the other steps with --also-measured");
  if (!measured.any() && !measured.also.empty())
    throw ConfigError(
        "--also-measured adds to a measured step of this layout; give that with --measured-step or "
        "--measured-log");
  if (!measured.any() && !measured.calibration.empty())
    throw ConfigError(
        "--save-calibration writes what a measured step tells; give one with --measured-step or "
        "--measured-log");
}

CalibrationFit fit_measured(const MeasuredArguments& measured, const OpGraph& graph, const Plan& plan,
                            Terminal& terminal, bool talks) {
  const Seconds step = measured.step ? *measured.step : step_of_log(measured, plan, terminal, talks);
  std::vector<MeasuredPlan> plans{{.graph = &graph, .plan = &plan, .measured = step}};
  std::list<LoadedPlan> others;  // to which `plans` refers
  for (const MeasuredArguments::PlanAndStep& also : measured.also) {
    const LoadedPlan& other = others.emplace_back(load_plan(also.plan));
    plans.push_back({.graph = &other.graph, .plan = &other.plan, .measured = also.step});
  }
  return fit_calibration(plans);
}

}  // namespace parplan
