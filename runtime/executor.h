#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "planner/program/program.h"
#include "runtime/arena.h"
#include "runtime/comm/communicator.h"
#include "runtime/device/backend.h"
#include "runtime/group_table.h"
#include "runtime/launch/flight_recorder.h"
#include "runtime/staged_tokens.h"
#include "runtime/step_profile.h"
#include "runtime/token_data.h"

namespace parplan {

// The measurements of one step of one rank.
struct StepMeasurement {
  Seconds total;       // from the step's start to the end of its work
  bool is_profiled = false;
  StepTime time;  // its parts, if it was profiled
  CommunicationVolume communication;
  CopiedBytes copied;
};

// Whether each instruction of a step is timed. On a GPU the marks between instructions cost time,
// and no work is replayed.
enum class StepTiming { whole, each_instruction };

// Executes a Program: submits its calls in launch order to the backend's streams, which meet at the
// Program's events. After the first steps (two, if work is recorded for replay) it allocates
// nothing.
class Executor {
 public:
  // `samples`: those of a batch that this rank trains on.
  Executor(const Program& program, const GroupTable& groups, Backend& backend, Communicator& communicator,
           const Arena& arena, SampleRange samples);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Returns when the step's work is done. Steps on backends that work immediately are always
  // profiled.
  StepMeasurement run_step(const Batch& batch, const StepScalars& scalars, StepTiming timing);

  // Results of the last step: the loss summed over the batch's tokens (0 where the Program has
  // none), and the norm of the whole model's gradients, where the Program computes it: without the
  // loss scale, before clipping.
  double loss() const { return results_ == nullptr ? 0.0 : static_cast<double>(results_->loss); }
  std::optional<double> gradient_norm() const;
  // Indexed by segment, then instruction.
  const std::vector<std::vector<InstructionMeasurement>>& instructions() const { return profile_.instructions(); }
  // What this rank did last, and whether it waits for others; any thread may read it.
  FlightRecorder& flight() { return flight_; }
  const FlightRecorder& flight() const { return flight_; }

 private:
  // How the calls of one Segment are submitted; determined once.
  struct Submission {
    std::vector<Stream> side_streams;  // those of its instructions besides its own
    bool repeats = false;              // kernels on one stream, which a backend may record and replay
  };

  // A group of the Program as the communicator numbers it.
  struct Link {
    std::optional<int> group;            // of several ranks
    std::optional<int> sends, receives;  // channels to and from a neighbour
  };

  void run_call(std::size_t index);
  void submit(const Segment& segment, const Call& call, std::size_t index);
  void submit(const Instruction& instruction, const Call& call, std::size_t call_index);
  void copy(const Instruction& instruction, const Call& call);
  Transfer communicate(const Instruction& instruction, const Call& call);
  void wait(Stream stream, int event);
  void record(Stream stream, int event);
  void wait_sent(Stream stream, const std::vector<SendTicket>& tickets);
  std::byte* address(const Operand& operand, const Call& call) const;
  int join_event(Stream side) const { return fork_event_ + 1 + static_cast<int>(side); }

  const Program& program_;
  Backend& backend_;
  Communicator& communicator_;
  const Arena& arena_;
  SampleRange samples_;
  std::vector<Link> links_;                    // by group of the Program
  std::vector<Submission> submissions_;        // by segment
  std::vector<std::int64_t> keys_;             // by call: equal for equal work
  int first_segment_event_ = 0;                // events: the Program's, a Segment's, the fork, one join per stream
  int fork_event_ = 0;

  // The last send of a step by each stream on each line (to a rank, on a channel), whose sends are
  // done in order. An event stands for those of its stream until then, and each stream that waits
  // for it waits for them: that another one did so says nothing about its own order.
  std::array<std::vector<SendTicket>, stream_count> sent_by_;
  std::vector<std::vector<SendTicket>> sent_before_;  // by event

  StagedTokens tokens_;
  // Host memory to which the device copies what a step came to. The scale is that with which the
  // step computed its gradients.
  struct Results {
    float loss = 0.0f;
    float sum_of_squares = 0.0f;
    LossScale scale;
  };
  Results* results_ = nullptr;

  FlightRecorder flight_;

  bool timing_ = false;  // this step
  StepProfile profile_;
  CommunicationVolume sent_;
  CopiedBytes copied_;
};

}  // namespace parplan
