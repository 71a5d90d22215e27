#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/objective.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"
#include "planner/plan/schedule.h"
#include "planner/plan/step_result.h"

namespace parplan {

// What is known about the model without its graph.
struct ModelSummary {
  std::string name;
  std::int64_t parameters = 0;
  Flops flops_per_sample;  // model_flops_per_sample
  bool operator==(const ModelSummary&) const = default;
};

// The devices of an alternative on heterogeneous nodes that are not the plan's: other groups of the
// same cluster, or in another order; and the training on them, as the plan's but for its precision.
struct OtherDevices {
  Cluster cluster;
  TrainingSpec training;
  bool operator==(const OtherDevices&) const = default;
};

// A candidate with its result: a row of the table of plans.
struct RankedPlan {
  ParallelSpec spec;
  StepResult result;
  std::optional<OtherDevices> on = {};  // absent: the devices and the training of the plan beside it
  bool operator==(const RankedPlan&) const = default;
};

// What a search left out, and how much better than the best plan found any of it may be at most, by
// lower bounds: 0 where nothing is better; absent where no bound was taken. `options`: of the
// command line, each of which searches a part of it, and which together search all of it; empty
// where there are none.
struct LeftOut {
  std::string what;
  std::optional<double> gap;
  std::vector<std::string> options = {};
  bool operator==(const LeftOut&) const = default;
};

// What the search did. `simulated` includes candidates with the same work as a simulated one. `gap`
// is the best plan found over the smallest bound that was not simulated, minus one; absent when
// certified. Beyond some number of cuts, not every cut of a layout is a candidate: `cut_gap` is the
// same over all cuts and over what their stages may recompute; absent where none is better.
struct SearchCounts {
  Objective objective = Objective::time;  // what the search minimised
  // The layouts that it chose from, by their devices, in words; empty where no search was made.
  std::string space = "";
  std::int64_t candidates = 0;
  std::int64_t infeasible_memory = 0;
  std::int64_t pruned_by_bound = 0;
  std::int64_t simulated = 0;
  double seconds = 0.0;
  bool certified = false;
  std::optional<double> gap;
  std::optional<double> cut_gap = {};
  std::vector<LeftOut> left_out = {};  // legal layouts that are not in the space, although no option excludes them
  bool operator==(const SearchCounts&) const = default;
};

// A complete plan: it also runs from another folder and on another machine. Only the model's graph
// is rebuilt from `model_text` (a model.yaml), by the caller.
struct Plan {
  std::string model_text;
  ModelSummary model;
  Cluster cluster;
  TrainingSpec training;
  ParallelSpec spec;
  Placements placements;
  Schedule schedule;
  StepResult prediction;
  std::vector<RankedPlan> alternatives;  // best first, without the plan itself
  SearchCounts search;
  std::vector<std::string> notes;
};

// On what an alternative of the plan (or another layout beside it) was ranked.
inline const Cluster& cluster_of(const Plan& plan, const RankedPlan& other) {
  return other.on ? other.on->cluster : plan.cluster;
}
inline const TrainingSpec& training_of(const Plan& plan, const RankedPlan& other) {
  return other.on ? other.on->training : plan.training;
}

// "4 nodes of 8 x T4, in fp16": the devices that a layout beside the plan takes, and its precision
// where that is not the plan's.
std::string describe_devices(const Plan& plan, const RankedPlan& other);

// Eight hexadecimal digits that depend on everything which decides how the plan runs.
std::string plan_id(const ModelSummary& model, const TrainingSpec& training, const ParallelSpec& spec);

// plan.yaml (docs/plan.md). `read_plan` checks every key, and that the parts agree with one another
// (degrees, stage counts, schedule); errors have file:line:column. read(write(p)) equals p.
std::string write_plan(const Plan& plan);
Plan read_plan(const std::string& text, const std::string& file_name);

}  // namespace parplan
