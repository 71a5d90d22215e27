#include <memory>

#include <fmt/format.h>
#include <fmt/ostream.h>

#include "cli/add_option.h"
#include "cli/commands.h"
#include "cli/measured_steps.h"
#include "cli/resolve_inputs.h"
#include "cli/write_outputs.h"
#include "planner/base/text.h"
#include "planner/calibrate/calibration_report.h"
#include "planner/cluster/price_and_power.h"
#include "planner/plan/memory_verdict.h"
#include "planner/plan/offload.h"
#include "planner/report/explain.h"
#include "planner/report/plan_row.h"
#include "planner/report/plan_table.h"
#include "planner/report/suggest_and_run_json.h"
#include "planner/report/table.h"
#include "planner/simulator/schedule_chart.h"
#include "planner/suggest.h"

namespace parplan {
namespace {

constexpr int chart_columns = 120;

struct SimulateArguments {
  std::string subject;
  WhereArguments where;
  WhatArguments what;
  LayoutRequest layout;
  bool balances_replicas = false;
  MeasuredArguments measured;
  OutputArguments output;
  std::optional<double> headroom;
  std::string plan_file;
  std::string trace;
  bool prints_schedule = false;
  std::string schedule_svg;
};

// A plan is simulated unchanged; only the cluster may be another one.
LoadedPlan simulate_file(const SimulateArguments& arguments, Terminal& terminal, Timeline* timeline) {
  if (!(arguments.layout == LayoutRequest{}) || arguments.balances_replicas || !(arguments.what == WhatArguments{}))
    throw ConfigError(fmt::format("{} is a plan: it fixes layout and training; give the model instead to choose them",
                                  arguments.subject));
  LoadedPlan loaded = load_plan(arguments.subject);
  if (is_given(arguments.where)) {
    if (loaded.plan.cluster.calibrated)
      throw ConfigError(
          fmt::format("the plan is calibrated for its cluster ({}); give the model instead to simulate its layout on "
                      "another",
                      *loaded.plan.cluster.calibrated));
    loaded.plan.cluster = resolve_cluster(arguments.where, terminal, arguments.output);
    keep_kernels_of(loaded.plan.training.engine, loaded.plan.cluster);
    if (loaded.plan.spec.mesh.size() > loaded.plan.cluster.devices())
      throw ConfigError(
          fmt::format("the plan takes {} devices; cluster '{}' has {}; give more with --devices or --nodes",
                      loaded.plan.spec.mesh.size(), loaded.plan.cluster.name, loaded.plan.cluster.devices()));
    const Cluster used = first_nodes(loaded.plan.cluster, loaded.plan.spec.mesh.size());
    if (const auto reason = lacks_homes(used, loaded.plan.spec.offload)) throw ConfigError(*reason);
    if (loaded.plan.training.fp8)
      if (const auto reason = lacks_fp8(loaded.plan.cluster, loaded.plan.training.engine)) throw ConfigError(*reason);
    leave_headroom(loaded.plan.cluster, loaded.plan.training.engine, arguments.headroom, false);
  }
  if (arguments.headroom) loaded.plan.cluster.memory_headroom = *arguments.headroom;
  if (arguments.where.calibration)
    if (const std::string note =
            calibrate(loaded.plan.cluster, loaded.plan.training.engine, *arguments.where.calibration);
        !note.empty() && !arguments.output.quiet)
      fmt::print(terminal.err, "note: {}: {}\n", *arguments.where.calibration, note);
  set_price(loaded.plan.cluster, arguments.where.price);
  loaded.plan.alternatives.clear();
  loaded.plan.search = {};
  loaded.plan.notes.clear();  // of that search
  loaded.plan.prediction = simulate_plan(loaded.graph, loaded.plan, timeline);
  return loaded;
}

int carry_out(const SimulateArguments& arguments, Terminal& terminal) {
  check_output(arguments.output,
               {{"--output", arguments.plan_file},
                {"--trace", arguments.trace},
                {"--print-schedule", arguments.prints_schedule ? "-" : ""},
                {"--schedule-svg", arguments.schedule_svg},
                {"--save-calibration", arguments.measured.calibration}},
               {{"MODEL|PLAN", arguments.subject},
                {"--cluster", arguments.where.cluster.value_or("")},
                {"--measured-log", arguments.measured.log}});
  check_measured(arguments.measured, arguments.where);
  Timeline timeline;
  const bool draws = arguments.prints_schedule || !arguments.schedule_svg.empty();
  Timeline* const wanted = draws || !arguments.trace.empty() ? &timeline : nullptr;
  Plan plan;
  OpGraph graph;
  ReportInputs reported;
  if (is_plan_file(arguments.subject)) {
    LoadedPlan loaded = simulate_file(arguments, terminal, wanted);
    plan = std::move(loaded.plan);
    graph = std::move(loaded.graph);
    reported = report_inputs(plan);
  } else {
    Inputs inputs = resolve_inputs(arguments.subject, arguments.where, arguments.what, terminal, arguments.output);
    leave_headroom(inputs.cluster, inputs.training.engine, arguments.headroom, false);
    check_layout(inputs, arguments.layout, arguments.where);
    check_balance(arguments.balances_replicas, arguments.layout, inputs.training.engine);
    SuggestRequest request = request_of(inputs, arguments.layout);
    request.options.balances_replicas = arguments.balances_replicas;
    plan = simulate_layout(request, wanted);
    // The user did not ask whether fewer devices would be better.
    std::erase_if(plan.notes, [](const std::string& note) { return note.starts_with("uses "); });
    reported = report_inputs(inputs);
    reported.training.precision = plan.training.precision;
    graph = std::move(inputs.graph);
  }
  std::optional<CalibrationFit> fit;
  if (arguments.measured.any()) {
    fit = fit_measured(arguments.measured, graph, plan, terminal, !arguments.output.quiet);
    calibrate(plan.cluster, plan.training.engine, fit->calibration);
    timeline = Timeline();
    plan.prediction = simulate_plan(graph, plan, wanted);
    reported.cluster = plan.cluster;
    reported.training = plan.training;
  }

  const std::vector<Json> rows{row(subject_of(plan))};
  const std::vector<ChartSpan> spans = draws ? chart_spans(timeline) : std::vector<ChartSpan>();
  const bool has_text_alone = arguments.plan_file != "-" && arguments.trace != "-" && arguments.schedule_svg != "-" &&
                              arguments.measured.calibration != "-";
  if (arguments.output.shows_table() && has_text_alone) {
    fmt::print(terminal.out, "{}\n{}", describe_inputs(reported), write_table(plan));
    if (fit) fmt::print(terminal.out, "\n{}", describe(*fit));
    if (arguments.prints_schedule) fmt::print(terminal.out, "\n{}", draw_schedule(spans, chart_columns));
    if (arguments.output.verbose)
      fmt::print(terminal.out, "\n{}", explain(plan));
    else
      for (const std::string& note : plan.notes) fmt::print(terminal.out, "note: {}\n", printable_line(note));
  } else if (!arguments.output.quiet) {
    fmt::print(terminal.err, "{}", describe_inputs(reported));
  }
  Json json = suggest_json(reported, plan.search, &plan, {});
  if (fit) json["calibration"] = calibration_json(*fit);
  write_outputs(arguments.output, terminal, json, rows);
  if (!arguments.measured.calibration.empty())
    write_said(arguments.measured.calibration, write_calibration(fit->calibration), terminal, !arguments.output.quiet);
  if (!arguments.trace.empty()) write_said(arguments.trace, write_trace(timeline), terminal, !arguments.output.quiet);
  if (!arguments.schedule_svg.empty())
    write_said(arguments.schedule_svg, draw_schedule_svg(spans), terminal, !arguments.output.quiet);
  if (!arguments.plan_file.empty())
    write_said(arguments.plan_file, write_plan(plan), terminal, !arguments.output.quiet);
  const Bytes needed = plan.prediction.memory.peak();
  const Bytes capacity = memory_capacity(plan.cluster, plan.spec, plan.prediction);
  switch (verdict_of(subject_of(plan))) {
    case MemoryVerdict::fits:
      break;
    case MemoryVerdict::tight:
      if (needed > capacity)
        fmt::print(terminal.err,
                   "warning: the plan is tight: it needs {} of memory on its worst rank, of a device's {}, and fits "
                   "only where the engine's allocator gives back {} that it keeps\n",
                   format_bytes(needed), format_bytes(capacity), format_bytes(plan.prediction.memory.reserve));
      else
        fmt::print(terminal.err,
                   "warning: the plan is tight: it needs {} of memory on its worst rank, and of the {} that a device "
                   "has {} should be free for what predictions miss\n",
                   format_bytes(needed), format_bytes(capacity), format_share(plan.cluster.memory_headroom, 1.0));
      break;
    case MemoryVerdict::does_not_fit:
      fmt::print(terminal.err, "warning: the plan does not fit: {}\n", words_of(shortage_of(subject_of(plan)).value()));
  }
  return exit_done;
}

}  // namespace

CommandBody declare_simulate(CLI::App& app) {
  const auto arguments = std::make_shared<SimulateArguments>();
  add_subject(app, arguments->subject, "MODEL|PLAN",
              "a model.yaml, a Hugging Face config.json, a name of the zoo, or a plan.yaml");
  add_where(app, arguments->where);
  add_what(app, arguments->what);
  add_layout(app, arguments->layout);
  add_balance(app, arguments->balances_replicas);
  add_headroom(app, "Limits", arguments->headroom);
  add_measured(app, arguments->measured);
  add_option(app,
             {.names = "-o,--output",
              .type = "PLAN.yaml",
              .description = "write the plan to this file, or to standard output with -",
              .group = "Output"},
             arguments->plan_file);
  add_option(app,
             {.names = "--trace",
              .type = "FILE",
              .description = "write a Chrome trace, which ui.perfetto.dev opens, to a file, or to standard output "
                             "with -",
              .group = "Output"},
             arguments->trace);
  add_flag(app,
           {.names = "--print-schedule",
            .type = "",
            .description = "draw what each rank of the pipeline does when, as text under the table",
            .group = "Output"},
           arguments->prints_schedule);
  add_option(app,
             {.names = "--schedule-svg",
              .type = "FILE",
              .description = "draw the same to scale as an SVG image to a file, or to standard output with -",
              .group = "Output"},
             arguments->schedule_svg);
  add_output(app, arguments->output, CsvOutput::offered);
  return [arguments](Terminal& terminal) { return carry_out(*arguments, terminal); };
}

}  // namespace parplan
