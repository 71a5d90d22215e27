#pragma once

#include <span>
#include <string>
#include <vector>

#include "planner/base/json.h"
#include "planner/plan/plan.h"
#include "planner/plan/reasons.h"
#include "planner/report/run_comparison.h"

namespace parplan {

// The part of every command's JSON besides its rows.
struct ReportInputs {
  std::string version;  // of parplan
  ModelSummary model;
  Cluster cluster;
  TrainingSpec training;
  std::vector<std::string> defaults;  // fields of `training` that were not given: "global_batch", ...
};

// parplan.suggest/1. Without a plan, "plans" is empty and "changes" holds the remedies. `plan_file`
// is the plan's path, for "launch".
Json suggest_json(const ReportInputs& inputs, const SearchCounts& search, const Plan* plan,
                  std::span<const Remedy> remedies, const std::string& plan_file = "plan.yaml");

// parplan.run/1.
Json run_json(const ReportInputs& inputs, const Plan& plan, const RunComparison& comparison);

}  // namespace parplan
