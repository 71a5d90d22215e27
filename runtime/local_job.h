#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "planner/program/lower.h"
#include "runtime/executor.h"
#include "runtime/parameters.h"

namespace parplan {

// What one step of all ranks gave.
struct JobStep {
  double loss = 0.0;         // mean over the tokens of the global batch
  double step_time_s = 0.0;  // from the first rank's start to the last one's end
  std::vector<StepMeasurement> ranks;
};

// A job whose ranks are threads of this process, each with a CPU backend and an arena of its own.
class LocalJob {
 public:
  LocalJob(const Job& job, const InitialValues& initial);
  ~LocalJob();
  LocalJob(const LocalJob&) = delete;
  LocalJob& operator=(const LocalJob&) = delete;

  // Runs `steps` steps, of which the first is number `first_step` (from 0). `batch_of` gives each step's sequences;
  // it and `on_step` are called by one thread, between steps. What a rank throws is thrown here, once all have stopped.
  void run(std::int64_t first_step, std::int64_t steps, const std::function<void(std::int64_t, Batch&)>& batch_of,
           const std::function<void(std::int64_t, const JobStep&)>& on_step);

  const std::vector<Program>& programs() const { return programs_; }
  const Arena& arena(int rank) const;
  const Executor& executor(int rank) const;
  LogicalTensors collect(ParameterContent content) const;

 private:
  struct Rank;
  const Job job_;
  std::vector<Program> programs_;
  GroupTable groups_;
  struct World;
  std::unique_ptr<World> world_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  Batch batch_;
  JobStep step_;
};

// What the optimizer kernels read in step `step` (from 0).
StepScalars step_scalars(const TrainingSpec& training, std::int64_t step);

}  // namespace parplan
