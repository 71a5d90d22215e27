#pragma once

#include <mutex>
#include <span>
#include <vector>

#include "planner/cost/cost_model.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"
#include "planner/search/lowered_steps.h"
#include "planner/search/simulate_spec.h"

namespace parplan {

// Whether a layout takes equally long and the same memory with either: by rank of the pipeline, the
// same device, the same links, and the same share of host and drives.
bool equal_costs(std::span<const CostModel> a, std::span<const CostModel> b);

// Steps of one model that were simulated for several searches: each once, however often it is asked
// for. Threads may share it.
class SimulatedSteps {
 public:
  // As simulate_soon, with the placements that follow from the layout.
  SimulatedSpec simulate(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                         const ParallelSpec& spec, const Placements& placements, std::span<const CostModel> models);

 private:
  struct Known {
    ParallelSpec spec;
    TrainingSpec training;
    std::vector<CostModel> models;
    Bytes overhead;  // of memory, by the nodes that it uses
    SimulatedSpec simulated;
  };
  std::mutex mutex_;
  std::vector<Known> known_;
  LoweredSteps lowered_;
  KnownBlocks blocks_;
};

}  // namespace parplan
