#include <memory>
#include <optional>

#include <fmt/format.h>

#include "cli/add_option.h"
#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/data_folder.h"
#include "cli/progress.h"
#include "cli/published_model.h"
#include "cli/version.h"
#include "cli/write_outputs.h"
#include "planner/graph/engine_file.h"
#include "planner/validate/published_run.h"
#include "planner/validate/validate.h"
#include "planner/validate/validation_report.h"

namespace parplan {
namespace {

struct ValidateArguments {
  std::string runs;
  std::optional<std::string> engine;
  int threads = 0;
  OutputArguments output;
};

int carry_out(const ValidateArguments& arguments, Terminal& terminal) {
  check_output(arguments.output, {}, {{"RUNS", arguments.runs}});
  const std::vector<PublishedRun> published = read_published_runs(arguments.runs);
  if (arguments.engine) find_engine(*arguments.engine, engines_folder());  // refuses what is none
  ProgressLine progress(terminal, arguments.output.quiet ? Talk::quiet : Talk::wanted);
  const std::vector<ValidatedRun> runs =
      validate(published, {.catalog = cluster_catalog(), .engines = engines_folder(), .engine = arguments.engine},
               graph_of_published, arguments.threads,
               [&](std::size_t done, std::size_t all) { progress.show(fmt::format("{} of {} runs", done, all)); });
  progress.clear();
  if (arguments.output.shows_table()) terminal.out << validation_table(runs, arguments.output.verbose);
  write_json_and_csv(arguments.output, terminal, validation_json(runs, version()),
                     [&] { return validation_csv(runs); });
  return exit_done;
}

}  // namespace

CommandBody declare_validate(CLI::App& app) {
  const auto arguments = std::make_shared<ValidateArguments>();
  add_option(app,
             {.names = "RUNS",
              .type = "",
              .description = "CSV of published, measured training runs (docs/accuracy.md lists the columns), "
                             "vTrain's table of one node, or a table of NCCL's collectives",
              .required = true},
             arguments->runs);
  add_option(app,
             {.names = "--engine",
              .type = "NAME",
              .description = "predict all runs as this engine (one of configs/engines, or such a file); default: as "
                             "the engine that each run names"},
             [arguments](const std::string& text) { arguments->engine = text; });
  add_option(app,
             {.names = "--threads",
              .type = "N",
              .description = "simulate so many runs at once (default: as many as the machine has cores, 16 at most)"},
             [arguments](const std::string& text) {
               arguments->threads = static_cast<int>(parse_whole("--threads", text, 1, 1024));
             });
  add_output(app, arguments->output, CsvOutput::offered);
  return [arguments](Terminal& terminal) { return carry_out(*arguments, terminal); };
}

}  // namespace parplan
