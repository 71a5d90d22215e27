#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "runtime/executor.h"
#include "runtime/launch/rendezvous.h"

// What the processes of a job tell each other about their ranks: after each step, and at the end.
// Every process makes each call, and all get the same.
namespace parplan {

// The results of one step of all ranks.
struct JobStep {
  double loss = 0.0;         // mean over the tokens of the global batch
  Seconds time;              // from the first rank's start to the last one's end, of the process that took longest
  std::vector<StepMeasurement> ranks;  // all of the job
  // The norm of the whole model's gradients before clipping, where the plan computes it.
  std::optional<double> gradient_norm = {};
  bool skipped = false;  // the gradients were not finite, and the step changed no parameter
  std::optional<int> signal = {};  // that some process received: the job is to end
};

// Takes the step of this process: its time, the measurements of its `hosted` ranks, the gradient
// norm, its signal and, where one of these has it, the loss. Fills in those of the others; all
// processes then have the same.
void exchange_step(JobStep& step, std::optional<double> loss, std::span<const int> hosted, Rendezvous& rendezvous);

// The memory of one rank at the end.
struct RankEnd {
  std::int64_t rank = 0;
  PerHome<std::int64_t> touched;  // highest byte of each arena
  std::int64_t device_used = 0;   // memory of its device in use, by all programs
};

struct JobEnd {
  std::vector<RankEnd> ranks;                        // ascending
  std::vector<InstructionMeasurement> instructions;  // of the one rank whose process states them
};
// Takes the ends of the hosted ranks, and the instructions of the measured rank from its process.
JobEnd exchange_end(const std::vector<RankEnd>& hosted, const std::vector<InstructionMeasurement>& instructions,
                    Rendezvous& rendezvous);

}  // namespace parplan
