#include <memory>

#include <CLI/CLI.hpp>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/inputs.h"

namespace parplan {

CommandBody declare_topology(CLI::App& app) {
  struct TopologyArguments {
    std::string cluster;
    WhereArguments where;
    OutputArguments output;
  };
  const auto arguments = std::make_shared<TopologyArguments>();
  app.add_option("CLUSTER", arguments->cluster, "cluster.yaml, text of nvidia-smi topo -m, or a named cluster (default: this machine)")->type_name("");
  add_where(app, arguments->where);
  return [arguments](Terminal& terminal) {
    WhereArguments where = arguments->where;
    if (!arguments->cluster.empty()) {
      if (where.cluster) throw ConfigError("a cluster is given twice: as argument and with --cluster");
      where.cluster = arguments->cluster;
    }
    terminal.out << describe(resolve_cluster(where, terminal, arguments->output));
    return exit_done;
  };
}

}  // namespace parplan
