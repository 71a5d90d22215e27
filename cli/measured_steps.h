#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "planner/calibrate/fit_calibration.h"

namespace parplan {

// What a user measured of layouts that ran.
struct MeasuredArguments {
  struct PlanAndStep {
    std::string plan;  // a file
    Seconds step;
  };
  std::optional<Seconds> step;    // of the layout that is simulated
  std::string log;                // of its training
  std::vector<PlanAndStep> also;  // of other layouts
  std::string calibration;        // the file to write
  bool any() const { return step.has_value() || !log.empty(); }
};
void add_measured(CLI::App& app, MeasuredArguments& measured);
// Throws ConfigError where options contradict one another.
void check_measured(const MeasuredArguments& measured, const WhereArguments& where);

// The shares that the measured steps tell; `plan` is the layout that is simulated, with the rates
// of the cluster's files.
CalibrationFit fit_measured(const MeasuredArguments& measured, const OpGraph& graph, const Plan& plan,
                            Terminal& terminal, bool talks);

}  // namespace parplan
