#pragma once

#include <array>
#include <span>
#include <vector>

#include "planner/base/enum_index.h"
#include "planner/cluster/cluster_calibration.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/plan.h"

namespace parplan {

inline constexpr std::size_t constant_count = count_of<ClusterConstant>;

// A plan whose step was measured; its cluster has the rates of its files.
struct MeasuredPlan {
  const OpGraph* graph = nullptr;
  const Plan* plan = nullptr;
  Seconds measured;
};

// How a measured plan came out.
struct FittedPlan {
  Seconds measured;
  StepTime before;  // with the rates of the files
  StepTime after;   // with the shares
  // By how many per cent the step shortens where a constant grows by one, with the rates of the
  // files.
  std::array<double, constant_count> reach{};
};

struct CalibrationFit {
  ClusterCalibration calibration;
  std::array<bool, constant_count> at_bound{};
  std::vector<FittedPlan> plans;
};

// Fits as many constants as the steps can tell, in the order in which the steps depend on them (a
// QR decomposition of their sensitivities with column pivoting): one step tells one. The shares are
// those with the least sum of squared relative errors of steps, each simulated anew, within what
// datasheets allow (Gauss-Newton, with constants held at their bounds where the errors ask for
// more).
//
// ConfigError where the plans are not of one cluster and engine, where the steps depend on none of
// the constants, or where no shares within the bounds come near the measured steps.
CalibrationFit fit_calibration(std::span<const MeasuredPlan> measured);

}  // namespace parplan
