#pragma once

#include <functional>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/plan.h"
#include "runtime/data.h"
#include "runtime/parameters.h"

namespace parplan {

struct RunOptions {
  std::int64_t steps = 20;
  std::string data;  // path of a text or token file
  std::function<void(std::int64_t step, double loss, double step_time_s)> on_step;  // may be empty
};

// What one instruction of one Segment took, summed over a step (mean over the steps after the first). In the order of the
// rank's Program: Segments, then their instructions.
struct InstructionComparison {
  std::string segment;
  std::string instruction;
  std::int64_t runs_per_step = 0;
  double measured_s = 0.0;
};

struct RunReport {
  std::vector<double> loss;           // mean per token, per step
  std::vector<double> step_times_s;   // all steps; the first is warm-up
  StepResult measured;                // time: the median step after the first, on the rank that finished last
  int measured_rank = 0;              // that rank
  std::vector<Bytes> arena_bytes;     // promised, per rank
  std::vector<Bytes> touched_bytes;   // highest arena byte touched, per rank
  Bytes process_growth;               // resident memory of the process, end against start
  std::vector<InstructionComparison> instructions;  // of `measured_rank`
};

// The flow of `parplan run`: lowers the plan for every rank, executes `options.steps` steps and compares. ConfigError when
// this build or machine cannot run the plan (says what is missing); RunError when running failed; InternalError when
// the run broke a promise (peak or communicated bytes differ from the plan's).
RunReport run_plan(const OpGraph& graph, const Plan& plan, const RunOptions& options);

}  // namespace parplan
