#include <memory>

#include "cli/add_option.h"
#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/resolve_inputs.h"
#include "cli/version.h"
#include "cli/write_outputs.h"
#include "planner/cluster/write_topology.h"

namespace parplan {
namespace {

struct TopologyArguments {
  std::string cluster;
  WhereArguments where;
  OutputArguments output;
  std::optional<std::string> graphviz;  // a path, "-" for standard output
};

int carry_out(const TopologyArguments& arguments, Terminal& terminal) {
  WhereArguments where = arguments.where;
  if (!arguments.cluster.empty()) {
    if (where.cluster)
      throw ConfigError("a cluster is given twice: as argument and with --cluster; leave one of them out");
    where.cluster = arguments.cluster;
  }
  check_output(arguments.output, {{"--graphviz", arguments.graphviz.value_or("")}},
               {{"CLUSTER", where.cluster.value_or("")}});
  const Cluster cluster = resolve_cluster(where, terminal, arguments.output);
  if (arguments.output.shows_table() && arguments.graphviz != "-") terminal.out << describe(cluster);
  write_outputs(arguments.output, terminal, topology_json(cluster, version()), std::span<const Json>{});
  if (arguments.graphviz) write_said(*arguments.graphviz, draw_graphviz(cluster), terminal, !arguments.output.quiet);
  return exit_done;
}

}  // namespace

CommandBody declare_topology(CLI::App& app) {
  const auto arguments = std::make_shared<TopologyArguments>();
  add_option(app,
             {.names = "CLUSTER",
              .type = "",
              .description = "cluster.yaml, a topology (text of nvidia-smi topo -m, XML of NCCL) or a named cluster "
                             "(default: this machine)"},
             arguments->cluster);
  add_where(app, arguments->where);
  add_option(app,
             {.names = "--graphviz",
              .type = "FILE|-",
              .description = "write a graph in the DOT language, which Graphviz's dot draws, to a file, or to standard "
                             "output with - or nothing",
              .group = "Output",
              .value_optional = true},
             [arguments](const std::string& text) { arguments->graphviz = text; });
  add_output(app, arguments->output, CsvOutput::absent);
  return [arguments](Terminal& terminal) { return carry_out(*arguments, terminal); };
}

}  // namespace parplan
