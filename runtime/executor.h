#pragma once

#include <cstdint>
#include <vector>

#include "planner/program/program.h"
#include "runtime/arena.h"
#include "runtime/comm/communicator.h"
#include "runtime/data.h"
#include "runtime/device/backend.h"

namespace parplan {

// What one instruction of one Segment cost over the steps measured so far; the join of prediction and measurement.
struct InstructionMeasurement {
  std::int64_t runs = 0;
  double busy_s = 0.0;    // computing, or moving data
  double waited_s = 0.0;  // for other ranks to arrive
};

// One step of one rank as it was measured.
struct StepMeasurement {
  StepTime time;
  CommunicationVolume communication;
};

// Numbers for the communicator's groups and channels, equal on all ranks of a job.
class GroupTable {
 public:
  explicit GroupTable(const std::vector<Program>& programs);
  const std::vector<CommunicationGroup>& groups() const { return groups_; }
  int id_of(const std::vector<int>& ranks) const;

  static constexpr int channels = 2;  // towards the next stage, towards the previous one

 private:
  std::vector<CommunicationGroup> groups_;
};

// Carries out a Program, call by call in launch order. After the first step it allocates nothing.
class Executor {
 public:
  // `data_rank` of `data_ranks` decides which samples of a batch are this rank's.
  Executor(const Program& program, const GroupTable& groups, Backend& backend, Communicator& communicator, const Arena& arena,
           int data_rank, int data_ranks);

  StepMeasurement run_step(const Batch& batch, const StepScalars& scalars);

  // The loss summed over the batch's tokens; 0 where the Program has none.
  double loss() const;
  // Indexed by segment, then instruction.
  const std::vector<std::vector<InstructionMeasurement>>& instructions() const { return measurements_; }

 private:
  void run_call(const Call& call);
  void run_kernel(const Instruction& instruction, const Call& call);
  void load(const Instruction& instruction, const Call& call, int shift);
  Transfer communicate(const Instruction& instruction, const Call& call);
  void wait_for(int event);
  std::byte* address(const Operand& operand, const Call& call) const;
  void account(Label label, double busy, double waited);

  const Program& program_;
  Backend& backend_;
  Communicator& communicator_;
  const Arena& arena_;
  int data_rank_;
  int data_ranks_;
  std::vector<int> group_ids_;                 // by GroupKind
  std::vector<SendTicket> tickets_;            // by event of the Program
  std::vector<bool> awaited_;                  // by event: a ticket that was not waited for yet
  std::vector<SendTicket> unrecorded_;         // sends that no call waits for
  SendTicket last_ticket_;
  bool posted_ = false;
  const Batch* batch_ = nullptr;
  StepScalars scalars_;
  StepMeasurement step_;
  double clock_ = 0.0;
  std::vector<std::vector<InstructionMeasurement>> measurements_;
};

}  // namespace parplan
