#include "planner/suggest.h"

#include <algorithm>
#include <memory>
#include <optional>

#include <fmt/format.h>
#include <fmt/ostream.h>

#include "cli/add_option.h"
#include "cli/commands.h"
#include "cli/model_graph.h"
#include "cli/progress.h"
#include "cli/resolve_inputs.h"
#include "cli/write_outputs.h"
#include "planner/base/error.h"
#include "planner/plan/layout_choices.h"
#include "planner/report/explain.h"
#include "planner/report/launch_line.h"
#include "planner/report/plan_row.h"
#include "planner/report/plan_table.h"
#include "planner/report/remedy.h"
#include "planner/report/suggest_and_run_json.h"
#include "planner/report/table.h"

namespace parplan {
namespace {

struct SuggestArguments {
  std::string model;
  WhereArguments where;
  WhatArguments what;
  LayoutRequest layout;
  bool balances_replicas = false;
  LimitArguments limits;
  OutputArguments output;
  std::string plan_file;
  int top = 5;
  bool recomputes_fewest_layers = false;
  std::optional<int> top_each;  // absent: one, or any number where every degree is given
};

std::string why_nothing_fits(const SuggestResult& result, const Cluster& cluster) {
  if (result.counts.candidates == 0) return "no feasible plan: the batch, the model and the devices allow no layout\n";
  std::string text =
      fmt::format("no feasible plan: {}\n", why_none_fits(result.counts.candidates, cluster, result.shortage));
  text += explain_space(result.counts);
  for (const Remedy& remedy : result.remedies) text += fmt::format("what would make it fit: {}\n", describe(remedy));
  if (result.remedies.empty())
    text +=
        "what would make it fit: nothing that was tried (memory, devices, layout, context parallelism, gathers, "
        "offload, batch, sequence, precision, optimizer, LoRA)\n";
  return text;
}

// The named cluster with another number of devices, if it has as many.
std::optional<Cluster> same_cluster_of(WhereArguments where, int devices, Engine engine, Terminal& terminal,
                                       const OutputArguments& output) {
  where.options.devices = devices;
  where.options.nodes.reset();
  try {
    Cluster cluster = resolve_cluster(where, terminal, output);
    keep_kernels_of(engine, cluster);
    if (where.calibration) calibrate(cluster, engine, *where.calibration);
    return cluster;
  } catch (const ConfigError&) {
    return std::nullopt;
  }
}

// Whether a search may choose what each stage recomputes, and in how many layers.
void check_fewest_layers(const LayoutRequest& layout, const Engine& engine) {
  for (const Choice choice : {Choice::recompute, Choice::recompute_layers})
    if (layout[choice])
      throw ConfigError(
          fmt::format("--recompute-fewest-layers chooses what stages recompute, and {} says it; leave one "
                      "out",
                      row_of(choice).option));
  if (!engine.has_recompute_per_stage)
    throw ConfigError(
        fmt::format("--recompute-fewest-layers chooses for each stage, and engine {} has no stages that "
                    "recompute differently; give one number with --recompute-layers",
                    engine.name));
}

int carry_out(const SuggestArguments& arguments, Terminal& terminal) {
  check_output(arguments.output, {{"--output", arguments.plan_file}},
               {{"MODEL", arguments.model}, {"--cluster", arguments.where.cluster.value_or("")}});
  const bool talks = !arguments.output.quiet;
  Inputs inputs = resolve_inputs(arguments.model, arguments.where, arguments.what, terminal, arguments.output);
  if (arguments.limits.memory) limit_memory(inputs.cluster, *arguments.limits.memory, terminal, arguments.output);
  leave_headroom(inputs.cluster, inputs.training.engine, arguments.limits.headroom,
                 arguments.limits.memory.has_value());
  check_layout(inputs, arguments.layout, arguments.where);
  check_balance(arguments.balances_replicas, arguments.layout, inputs.training.engine);

  SuggestRequest request = request_of(inputs, arguments.layout);
  if (arguments.recomputes_fewest_layers) check_fewest_layers(arguments.layout, inputs.training.engine);
  request.options.recomputes_fewest_layers = arguments.recomputes_fewest_layers;
  request.options.top = arguments.top;
  if (arguments.top_each) request.options.top_each = *arguments.top_each;
  request.options.balances_replicas = arguments.balances_replicas;
  request.options.most_simulated = arguments.limits.most_candidates;
  request.options.threads = arguments.limits.threads;
  request.options.objective = arguments.limits.objective.value_or(Objective::time);
  // Needed to search for remedies.
  if (!reads_images(inputs.model.spec))
    request.graph_of_length = [&](std::int64_t length) { return graph_of(inputs.model.spec, length, inputs.training); };
  request.graph_of_training = [&](const TrainingSpec& training) -> std::optional<OpGraph> {
    if (problem_with_trained(inputs.model.spec, training)) return std::nullopt;
    return graph_of(inputs.model.spec, training);
  };
  if (arguments.where.cluster)
    request.cluster_of = [&](int devices) {
      return same_cluster_of(arguments.where, devices, inputs.training.engine, terminal, arguments.output);
    };
  ProgressLine progress(terminal, talks ? Talk::wanted : Talk::quiet);
  request.options.progress = [&](std::int64_t done, std::int64_t of) {
    progress.show(fmt::format("simulated {} of at most {} candidates", done, of));
  };
  SuggestResult result = suggest(request);
  progress.clear();

  if (result.counts.candidates == 0 && !(arguments.layout == LayoutRequest{})) {
    std::string needed;
    if (arguments.layout[Choice::schedule] == ChoiceValue(ScheduleKind::interleaved))
      needed = fmt::format("; an interleaved pipeline needs {} micro-batches as it has ranks",
                           inputs.training.engine.has_other_groups ? "as many" : "once, or several times, as many");
    throw ConfigError(fmt::format(
        "no layout of up to {} devices has the parts that are given; leave some of them to the search{}",
        inputs.cluster.devices(), needed));
  }

  ReportInputs reported = report_inputs(inputs);
  if (result.plan) reported.training = result.plan->training;
  std::vector<Json> rows;
  if (result.plan)
    for (int rank = 1; rank <= static_cast<int>(result.plan->alternatives.size()) + 1; ++rank)
      rows.push_back(row(subject_of(*result.plan, rank)));
  const bool writes_plan_out = arguments.plan_file == "-";
  const std::string plan_file = arguments.plan_file.empty() || writes_plan_out ? "plan.yaml" : arguments.plan_file;
  const Json json =
      suggest_json(reported, result.counts, result.plan ? &*result.plan : nullptr, result.remedies, plan_file);

  if (arguments.output.shows_table() && !writes_plan_out) {
    fmt::print(terminal.out, "{}", describe_inputs(reported));
    if (result.plan) {
      fmt::print(terminal.out, "\n{}", write_table(*result.plan));
      if (!arguments.output.verbose) {  // which ends with them
        fmt::print(terminal.out, "\n{}\n{}", explain_search(result.counts), explain_space(result.counts));
        for (const std::string& note : result.plan->notes) fmt::print(terminal.out, "note: {}\n", note);
      }
      const LaunchLine line = launch_line(*result.plan, plan_file);
      const bool to_be_written = arguments.plan_file.empty() && !line.commands.empty();
      fmt::print(terminal.out, "\n{}{}",
                 to_be_written ? fmt::format("write     it with -o {}, and then\n", plan_file) : "",
                 write_launch_line(line));
      fmt::print(terminal.out, "\n{}",
                 arguments.output.verbose ? explain(*result.plan) : explain_briefly(*result.plan));
    }
  } else if (talks) {
    fmt::print(terminal.err, "{}", describe_inputs(reported));
  }
  write_outputs(arguments.output, terminal, json, rows);
  if (!result.plan) {
    fmt::print(terminal.err, "{}", why_nothing_fits(result, inputs.cluster));
    return exit_failed;
  }
  if (!arguments.plan_file.empty()) write_said(arguments.plan_file, write_plan(*result.plan), terminal, talks);
  return exit_done;
}

}  // namespace

CommandBody declare_suggest(CLI::App& app) {
  const auto arguments = std::make_shared<SuggestArguments>();
  add_subject(app, arguments->model, "MODEL", "a model.yaml, a Hugging Face config.json or a name of the zoo");
  add_where(app, arguments->where);
  add_what(app, arguments->what);
  add_limits(app, arguments->limits);
  add_layout(app, arguments->layout);
  add_balance(app, arguments->balances_replicas);
  add_option(app,
             {.names = "-o,--output",
              .type = "PLAN.yaml",
              .description = "write the best plan to this file, or to standard output with -",
              .group = "Output"},
             arguments->plan_file);
  add_option(
      app, {.names = "--top", .type = "N", .description = "how many plans to rank (default: 5)", .group = "Output"},
      [arguments](const std::string& text) { arguments->top = static_cast<int>(parse_whole("--top", text, 1, 1000)); });
  add_option(app,
             {.names = "--top-each",
              .type = "N",
              .description = "how many of them may have the same degrees: variants in micro-batch, recompute, ZeRO "
                             "stage and schedule (default: 1, or all where every degree is given)",
              .group = "Output"},
             [arguments](const std::string& text) {
               arguments->top_each = static_cast<int>(parse_whole("--top-each", text, 1, 1000));
             });
  add_flag(app,
           {.names = "--recompute-fewest-layers",
            .type = "",
            .description = "also search plans whose stages recompute in as few of their layers as memory demands",
            .group = "Limits"},
           arguments->recomputes_fewest_layers);
  add_output(app, arguments->output, CsvOutput::offered);
  return [arguments](Terminal& terminal) { return carry_out(*arguments, terminal); };
}

}  // namespace parplan
