#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/plan/plan.h"
#include "runtime/checkpoint/checkpoint_folder.h"
#include "runtime/checkpoint/checkpoint_reader.h"
#include "runtime/checkpoint/shard_writer.h"
#include "runtime/local_job.h"

// The checkpoints of a job (docs/checkpoints.md). Every process makes each call.
namespace parplan {

struct CheckpointOptions {
  std::string folder = {};  // empty: none are written
  std::int64_t every = 0;   // steps from one to the next; 0: only where the run ends
  std::int64_t keep = 0;    // how many of the newest; 0: all
  bool resume = false;      // from the newest in the folder
  bool parameters_only = false;
  std::int64_t piece_bytes = checkpoint_piece_bytes;  // of a file with state that is on NVMe, at a time
};

// What checkpoints hold of a job's training, beside the numbers of its parameters.
struct TrainingPosition {
  std::int64_t step = 0;           // the next one
  std::int64_t skipped_steps = 0;  // LocalJob::skipped
  std::int64_t next_sample = 0;
};

// The name of a state of a parameter in files: as PyTorch and Megatron-LM name the optimizer's.
std::string state_name(State state, const Tensor& tensor, const TrainingSpec& training);

// Makes the folder this job's, for as long as the result lives; it is null in all processes but
// the first. ConfigError where another job has it, where processes see different folders, or where
// the folder holds checkpoints that a run from step 0 would mix with its own.
std::unique_ptr<FolderClaim> claim_folder(const CheckpointOptions& options, Rendezvous& rendezvous);

// The newest whole checkpoint of the folder; null where there is none. All its files were compared
// with their checksums, each by one process. ConfigError where one is damaged, or where it is no
// checkpoint of this plan's model, optimizer, seed and sequence length: it says what differs.
std::unique_ptr<CheckpointReader> find_checkpoint(const std::string& folder, const OpGraph& graph, const Plan& plan,
                                                  const std::vector<Fact>& facts, Rendezvous& rendezvous);
// What else differs, for the user: "learning rate is 0.001, and was 0.0006".
std::vector<std::string> changed_facts(const CheckpointIndex& index, const std::vector<Fact>& facts);

// Fills the hosted ranks with a checkpoint's state, each with what it holds, piece by piece: only
// codes of 8 bits are made of a whole block's numbers.
void restore(LocalJob& job, const OpGraph& graph, const TrainingSpec& training, const CheckpointReader& from,
             std::int64_t piece_bytes = checkpoint_piece_bytes);

// Writes checkpoints while the job goes on.
class Checkpoints {
 public:
  // Lines for people: of what was written, and of what could not be.
  struct Talk {
    std::function<void(const std::string&)> say, complain;
  };
  Checkpoints(CheckpointOptions options, const LocalJob& job, const OpGraph& graph, const Plan& plan,
              std::vector<Fact> facts, Rendezvous& rendezvous, Talk talk);

  // Between two steps: copies the state of the hosted ranks, and lets a thread write it; files with
  // state that is on NVMe it writes itself, through a piece of memory for each rank
  // (checkpoint_piece_bytes). First waits for the checkpoint before this one.
  void save(const TrainingPosition& position);
  // Bytes of host memory that the copies take while they are written.
  std::int64_t held() const;
  // Between two steps: where all processes have written their files, completes the checkpoint.
  void poll();
  // Waits until the last checkpoint is complete.
  void finish();

  std::optional<std::int64_t> last_step() const { return last_step_; }        // of the last one that was begun
  std::optional<std::int64_t> last_written() const { return last_written_; }  // and that is complete
  int failures() const { return failures_; }

 private:
  // A file of the checkpoint and what of the job's state it holds, the same in every checkpoint.
  struct ShardLayout {
    std::string name;
    int rank = 0;
    std::vector<WrittenSlice> slices;
    std::string header;
  };
  std::vector<ShardLayout> lay_out_shards() const;
  std::vector<CheckpointTensor> list_tensors() const;
  Shard snapshot(const ShardLayout& layout) const;
  CheckpointFile stream(const ShardLayout& layout, const std::string& folder) const;
  bool is_written(std::chrono::milliseconds patience);
  void complete();
  void fail(const std::string& reason);

  const CheckpointOptions options_;
  const LocalJob& job_;
  const OpGraph& graph_;
  const TrainingSpec training_;
  const std::string model_;
  const std::vector<Fact> facts_;
  Rendezvous& rendezvous_;
  const Talk talk_;
  const std::vector<ShardLayout> shards_;  // of all ranks
  CheckpointIndex index_;                  // of the checkpoint that is being written
  std::unique_ptr<ShardWriter> writer_;    // while one is being written
  std::vector<std::string> outcomes_;      // of all processes, once all have one
  std::optional<std::int64_t> last_step_, last_written_;
  int failures_ = 0;
};

}  // namespace parplan
