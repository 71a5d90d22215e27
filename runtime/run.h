#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/plan.h"
#include "runtime/choose_world.h"
#include "runtime/measured_step.h"

namespace parplan {

struct RunOptions {
  std::int64_t steps = 20;
  std::string data = {};  // path of a text or token file
  WorldOptions world = {};
  std::function<void()> on_start = {};  // when it is clear that the plan can run here; may be empty
  std::function<void(std::int64_t step, double loss, Seconds step_time)> on_step = {};  // may be empty
};

struct RunReport {
  std::vector<double> loss;           // mean per token, per step
  std::vector<Seconds> step_times;    // all steps
  // Time: the median step after the warm-up on the rank that computed longest. Where profiling a
  // step costs time (GPUs), only the last step is profiled, and its parts are scaled to the median
  // step.
  // Memory: parts as planned, overhead as reported by the device's driver.
  StepResult measured;
  int measured_rank = 0;             // the rank that computed longest
  PerHome<std::vector<Bytes>> arena_bytes;    // promised, per rank
  PerHome<std::vector<Bytes>> touched_bytes;  // highest arena byte touched, per rank
  Bytes process_growth;              // of this process's resident memory from start to end
  // GPUs, one per rank: memory of the fullest in use at the end, by all programs.
  std::optional<Bytes> device_used;
  std::vector<InstructionComparison> instructions;  // of `measured_rank`
  std::string not_recorded;  // why some repeated work of this process was submitted each time, if any was
};

// The flow of `parplan run`: lowers the plan for every rank, executes `options.steps` steps and
// compares. Every process of the job calls it and gets the whole report. Throws ConfigError if this
// build or machine cannot run the plan (it says what is missing); RunError if running failed;
// InternalError if the run broke a promise (peak or communicated bytes differ from the plan's).
RunReport run_plan(const OpGraph& graph, const Plan& plan, const RunOptions& options, Rendezvous& rendezvous);

}  // namespace parplan
