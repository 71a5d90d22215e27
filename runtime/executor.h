#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "planner/plan/attribution.h"
#include "planner/program/program.h"
#include "runtime/arena.h"
#include "runtime/comm/communicator.h"
#include "runtime/data.h"
#include "runtime/device/backend.h"

namespace parplan {

// The measured time of one instruction of one Segment over the profiled steps so far; this joins
// prediction and measurement.
struct InstructionMeasurement {
  std::int64_t runs = 0;
  double busy_s = 0.0;    // computing, or moving data
  // For other ranks to arrive (GPUs: part of busy_s, since their collectives wait while running).
  double waited_s = 0.0;
};

// The measurements of one step of one rank.
struct StepMeasurement {
  Seconds total;       // from the step's start to the end of its work
  bool taken_apart = false;
  StepTime time;  // its parts, if it was profiled
  CommunicationVolume communication;
};

// Whether each instruction of a step is timed. On a GPU the marks between instructions cost time,
// and no work is replayed.
enum class StepTiming { whole, each_instruction };

// Numbers of the communicator's groups and channels, equal on all ranks of a job.
class GroupTable {
 public:
  explicit GroupTable(const std::vector<Program>& programs);
  const std::vector<CommunicationGroup>& groups() const { return groups_; }
  const std::vector<SendRoute>& routes() const { return routes_; }
  int id_of(const std::vector<int>& ranks) const;

  static constexpr int to_next = 0;  // channels of sends
  static constexpr int to_previous = 1;
  static constexpr int channels = 2;

 private:
  std::vector<CommunicationGroup> groups_;
  std::vector<SendRoute> routes_;
};

// Makes what a GPU makes at first use: streams, and kernels, which CUDA loads when they are first
// launched. Loading one may wait for all work of the GPU, under a lock that other threads need, and
// so forever once NCCL's kernels wait for other ranks ("Lazy Loading" in the CUDA Programming
// Guide; meta-pytorch/torchcomms, pull request 2334; openxla/xla, pull request 38932). Every rank
// calls it before any of them communicates. Every kernel of the Program runs once, on zeros; then
// the arena is restored. There is nothing to do for backends that work immediately.
void warm_up(const Program& program, Backend& backend, const Arena& arena);

// Executes a Program: submits its calls in launch order to the backend's streams, which meet at the
// Program's events. After the first steps (two, if work is recorded for replay) it allocates
// nothing.
class Executor {
 public:
  // `data_rank` of `data_ranks` determines this rank's samples of a batch.
  Executor(const Program& program, const GroupTable& groups, Backend& backend, Communicator& communicator,
           const Arena& arena, int data_rank, int data_ranks);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Returns when the step's work is done. Steps on backends that work immediately are always
  // profiled.
  StepMeasurement run_step(const Batch& batch, const StepScalars& scalars, StepTiming timing);

  // Results of the last step: the loss summed over the batch's tokens; 0 where the Program has
  // none.
  double loss() const { return loss_ == nullptr ? 0.0 : static_cast<double>(*loss_); }
  // Indexed by segment, then instruction.
  const std::vector<std::vector<InstructionMeasurement>>& instructions() const { return measurements_; }

 private:
  // How the calls of one Segment are submitted; determined once.
  struct Submission {
    std::vector<Stream> side_streams;  // those of its instructions besides its own
    bool repeats = false;              // kernels on one stream, which a backend may record and replay
  };
  // The last submission to a stream, or before an event, for which the next work there waits.
  using Heads = std::vector<int>;

  void run_call(std::size_t index);
  void submit(const Segment& segment, const Call& call, std::size_t index);
  void submit(const Instruction& instruction, const Call& call, std::size_t call_index);
  Transfer communicate(const Instruction& instruction, const Call& call);
  void stage_tokens(const Batch& batch);
  void wait(Stream stream, int event);
  void record(Stream stream, int event);
  void wait_sent(Stream stream, int event);
  std::byte* address(const Operand& operand, const Call& call) const;
  void begin_piece(const Segment& segment, std::size_t instruction);
  void end_piece(Seconds waited);
  void take_apart(StepMeasurement& step);

  const Program& program_;
  Backend& backend_;
  Communicator& communicator_;
  const Arena& arena_;
  int data_rank_;
  int data_ranks_;
  std::vector<int> group_ids_;           // by group of the Program
  std::vector<Submission> submissions_;  // by segment
  std::vector<std::int64_t> keys_;       // by call: equal for equal work
  int first_segment_event_ = 0;          // events: the Program's, a Segment's, the fork, one join per stream
  int fork_event_ = 0;

  // Sends: for each event of the Program, the ticket that was not waited for yet; and those for
  // which no call waits.
  std::vector<std::optional<SendTicket>> tickets_;
  std::vector<std::pair<Stream, SendTicket>> unrecorded_;
  std::optional<SendTicket> posted_;

  // Host memory that the device copies from and to.
  std::int32_t* tokens_ = nullptr;
  std::vector<std::int64_t> staged_at_;  // by call: the start of its tokens; -1 if it loads none
  float* loss_ = nullptr;

  // A profiled step: pieces in launch order, each with two marks, and what each waits for.
  bool timing_ = false;
  struct PieceOf {
    int segment = 0;
    int instruction = 0;
    double waited_s = 0.0;
  };
  std::vector<Played> pieces_;
  std::vector<PieceOf> piece_of_;
  std::vector<Heads> dependencies_;  // by piece; kept between steps to reuse their memory
  std::vector<Heads> stream_heads_;
  std::vector<Heads> event_heads_;
  std::vector<int> computing_;

  CommunicationVolume sent_;
  std::vector<std::vector<InstructionMeasurement>> measurements_;
};

}  // namespace parplan
