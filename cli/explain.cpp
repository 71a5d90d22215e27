#include "planner/report/explain.h"

#include <memory>

#include <CLI/CLI.hpp>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "planner/base/file.h"

namespace parplan {

CommandBody declare_explain(CLI::App& app) {
  const auto path = std::make_shared<std::string>();
  add_subject(app, *path, "PLAN", "a plan.yaml that suggest or simulate wrote");
  return [path](Terminal& terminal) {
    terminal.out << explain(read_plan(read_file(*path), *path));
    return exit_done;
  };
}

}  // namespace parplan
