#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/plan/attribution.h"
#include "planner/program/program.h"
#include "runtime/device/backend.h"

namespace parplan {

// The measured time of one instruction of one Segment over the profiled steps so far; this joins
// prediction and measurement.
struct InstructionMeasurement {
  std::int64_t runs = 0;
  Seconds busy;  // computing, or moving data
  // For other ranks to arrive (GPUs: part of `busy`, since their collectives wait while running).
  Seconds waited;
};

// A profiled step: pieces in launch order, one per instruction, each between two marks of the
// backend, and what each waits for. The executor tells it what it submits.
class StepProfile {
 public:
  // `events`: the number of those that `wait` and `record` name.
  StepProfile(const Program& program, Backend& backend, int events);

  // Forgets the last step.
  void clear();
  // From here on the step's work is submitted.
  void begin();
  void wait(Stream stream, int event);
  void record(Stream stream, int event);
  void begin_piece(const Segment& segment, std::size_t instruction);
  void end_piece(Seconds waited);
  // Once the step's work is done: its `total` time, attributed to what the step waited for.
  StepTime attribute(Seconds total);

  // Indexed by segment, then instruction.
  const std::vector<std::vector<InstructionMeasurement>>& instructions() const { return measurements_; }

 private:
  struct PieceOf {
    int segment = 0;
    int instruction = 0;
    Seconds waited = {};
  };
  // The last submission to a stream, or before an event, for which the next work there waits.
  using Heads = std::vector<int>;

  const Program& program_;
  Backend& backend_;
  std::vector<Played> pieces_;
  std::vector<PieceOf> piece_of_;
  int last_in_turn_ = -1;            // the last piece of those that take turns; -1: none
  std::vector<Heads> dependencies_;  // by piece; kept between steps to reuse their memory
  std::vector<Heads> stream_heads_;
  std::vector<Heads> event_heads_;
  std::vector<int> computing_;
  std::vector<std::vector<InstructionMeasurement>> measurements_;
};

}  // namespace parplan
