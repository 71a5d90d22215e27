#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "planner/base/units.h"
#include "planner/cluster/device.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/spec_hash.h"
#include "planner/program/job.h"
#include "planner/program/program.h"
#include "planner/simulator/play_list.h"

namespace parplan {

// What is played of a layout's step, whatever it costs: by rank of the pipeline its Program without
// calls and buffers, and the calls as they are played.
struct LoweredStep {
  std::vector<Program> programs;
  std::vector<PlayList> lists;
};
// Takes the calls out of Programs, and drops their buffers.
LoweredStep lowered_step(std::vector<Program> programs);

// Steps of one model that were lowered for several simulations of the same layouts, over devices
// and links of other rates. Threads may share it.
class LoweredSteps {
 public:
  // The step of a layout's job with so many micro-batches on each rank, whatever the whole batch,
  // in groups of so many. `lower` makes it where it is not known, or is no longer: what is kept is
  // bounded.
  std::shared_ptr<const LoweredStep> of(const ParallelSpec& spec, const Job& job,
                                        const std::vector<int>& micro_batches, int group,
                                        const std::function<LoweredStep()>& lower);

 private:
  struct Known {
    TrainingSpec training;  // with no batch
    BackendKind backend{};
    Bytes overhead;
    std::vector<int> micro_batches;  // by rank of the pipeline
    int group = 0;
    std::shared_ptr<const LoweredStep> step;
  };
  std::mutex mutex_;
  std::unordered_multimap<ParallelSpec, Known, SpecHash> known_;
  std::int64_t kept_ = 0;  // bytes, about
};

}  // namespace parplan
