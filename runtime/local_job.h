#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "planner/program/lower.h"
#include "runtime/share_results.h"
#include "runtime/executor.h"
#include "runtime/launch/job_watch.h"
#include "runtime/launch/rendezvous.h"
#include "runtime/parameters.h"
#include "runtime/world.h"

namespace parplan {

// The ranks of a job that this process hosts, each a thread with a backend, an arena and a
// communicator. With several processes, each of them makes one, and all of them make all calls.
class LocalJob {
 public:
  // `nvme_folder`: where ranks that keep data on NVMe have their files; empty: the default.
  LocalJob(const Job& job, const InitialValues& initial, const MakeWorld& make_world, Rendezvous& rendezvous,
           const std::string& nvme_folder = {});
  ~LocalJob();
  LocalJob(const LocalJob&) = delete;
  LocalJob& operator=(const LocalJob&) = delete;

  // Runs `count` steps, the first of which has number `first` (from 0). `batch_of` gives each
  // step's sequences, `timing_of` how it is timed; one thread calls them and the others, between
  // steps. An exception of a rank is thrown here, once all have stopped.
  struct Steps {
    std::int64_t first = 0;
    std::int64_t count = 1;
    std::function<void(std::int64_t, Batch&)> batch_of;
    std::function<StepTiming(std::int64_t)> timing_of;  // may be empty: whole
    std::function<void(std::int64_t, const JobStep&)> on_step;
    // A step whose gradients are not finite changes nothing and does not count for bias correction.
    // With fp16 that always holds; otherwise the plan has to compute the gradient norm.
    bool skips_not_finite = false;
    std::function<std::optional<int>()> signal = {};  // that this process received; may be empty
    // Whether the run ends after this step, before the last one: the same in every process, since
    // they all know the same step. May be empty.
    std::function<bool(const JobStep&)> ends_after = {};
  };
  void run(const Steps& steps);

  // From here on the watch knows what the hosted ranks do, wakes them when the job has failed, and
  // then writes their last instructions to files of the folder.
  void be_watched(JobWatch& watch, const std::string& folder);
  // For failures outside of `run`: ends the waiting of all ranks of the job.
  void abort(const std::string& reason) noexcept;

  const std::vector<Program>& programs() const { return programs_; }  // of all ranks
  const std::vector<int>& hosted() const { return world_->hosted(); }
  // For hosted ranks only.
  const Arena& arena(int rank) const;
  const Executor& executor(int rank) const;
  DeviceMemory device_memory(int rank) const;
  std::string not_recorded(int rank) const;  // Backend::not_recorded
  // Steps that do not count for bias correction, but for those that the loss scale of fp16 counts;
  // a job that goes on from a checkpoint begins with what was before it.
  std::int64_t skipped() const { return skipped_; }
  void set_skipped(std::int64_t steps) { skipped_ = steps; }
  // The contents of the hosted ranks.
  LogicalTensors collect(ParameterContent content) const;

 private:
  struct Rank;
  const Rank& rank(int number) const;
  // Calls `work` with the index of every hosted rank, each in its own thread. An exception of one
  // is thrown here.
  void for_each_rank(const std::function<void(std::size_t)>& work);
  // The passes of making a job: memory, connections, what executes. All ranks make one before any
  // makes the next.
  void allocate(const std::string& nvme_folder);
  void connect();
  void prepare(const InitialValues& initial);
  // The passes of a step, by one thread while the ranks wait.
  struct Progress;
  void begin_step(const Steps& steps, Progress& progress);
  void end_step(const Steps& steps, Progress& progress);
  std::optional<double> own_loss() const;  // of the step, where a hosted rank holds it

  // The step in which a rank failed and what it did there: ", in step 3, ..."; empty before the
  // first.
  std::string place_of_failure(std::size_t hosted_rank) const;
  // Wakes all ranks where there is no memory for a better reason.
  void give_up_without_memory(std::size_t hosted_rank);

  const Job job_;
  Rendezvous& rendezvous_;
  JobWatch* watch_ = nullptr;  // while these ranks are known to it
  std::vector<Program> programs_;
  GroupTable groups_;
  std::unique_ptr<World> world_;
  std::vector<std::unique_ptr<Rank>> ranks_;  // hosted, in their order
  Batch batch_;
  JobStep step_;
  std::int64_t skipped_ = 0;
};

// The values that the optimizer kernels read in step `step` (from 0).
StepScalars step_scalars(const TrainingSpec& training, std::int64_t step);

}  // namespace parplan
