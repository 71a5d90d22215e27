#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planner/plan/plan.h"

namespace parplan {

// One instruction of a Segment: the sum of all its runs in a step.
struct InstructionTimes {
  std::string segment;
  std::string instruction;
  std::int64_t runs_per_step = 0;
  std::optional<Seconds> predicted;  // absent where the prediction has no such instruction
  Seconds measured;
};

// The results of a run, to be compared with its plan's prediction.
struct RunComparison {
  StepResult measured;
  std::vector<double> loss;          // mean per token, of every `listed_every`-th step
  std::vector<Seconds> step_times;   // the same steps
  PerHome<std::vector<Bytes>> promised;   // arenas, per rank
  PerHome<std::vector<Bytes>> touched;    // highest byte touched, per rank
  Bytes process_growth;                   // of this process's resident memory from start to end
  std::vector<int> hosted;                // the ranks of this process
  std::optional<Bytes> device_used = {};  // GPUs: memory in use on the fullest device according to its driver
  std::vector<InstructionTimes> instructions;
  std::int64_t first_step = 0;  // behind the checkpoint that the run went on from
  std::int64_t steps = 0;       // executed
  std::int64_t skipped_steps = 0;
  std::int64_t listed_every = 1;
  std::string ended = "";     // why before the last step; empty where it was reached
  bool is_profiled = true;    // otherwise `measured` says nothing
  std::string checkpoint = "";  // the last one that was written; empty where none was
  std::vector<std::string> notes = {};
};

// For people: step time and its parts, bytes communicated, peak bytes of each rank, memory growth
// of the process.
std::string write_comparison(const Plan& plan, const RunComparison& comparison);

// The instructions that take the most time, at most `most` of them, and their sum.
std::string write_instructions(const RunComparison& comparison, int most);

}  // namespace parplan
