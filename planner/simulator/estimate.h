#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <tuple>
#include <vector>

#include "planner/cost/cost_model.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"
#include "planner/plan/step.h"
#include "planner/program/block.h"
#include "planner/program/memory.h"

namespace parplan {

// What an estimate needs of a pipeline schedule: the row of planner/schedule that the caller looked up.
struct ScheduleForms {
  Seconds (*closed_form)(std::span<const Seconds> forward, std::span<const Seconds> backward, int micro_batches) = nullptr;
  int (*in_flight)(int stage, int stages, int micro_batches) = nullptr;
};

struct Estimate {
  StepTime time;
  MemoryUse memory;     // of the worst stage; equal to what lowering plans
  Seconds lower_bound;  // never above the simulated step: computation and tensor communication of the schedule, and
                        // the cheapest stage's optimizer
};

// Estimates candidates of one model on one cluster, from Segments that are lowered and costed once each and kept. The graph
// and the cluster must outlive it; used by one thread.
class Estimator {
 public:
  Estimator(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training);

  // Seconds of forward and backward of each block of the graph: what stage cuts balance.
  std::vector<double> block_seconds(const ParallelSpec& spec, const Placements& placements);

  // `spec.stage_blocks` is set.
  Estimate estimate(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule);

  NetworkCache& networks() { return networks_; }

 private:
  struct Shapes {  // of all blocks, under one way of cutting them
    std::vector<LoweredBlock> kinds;        // by Block::kind
    std::vector<std::int64_t> own_elements; // by Block::kind, not padded
    std::int64_t tied_elements = 0;         // of the tied parameter
  };
  struct Costs {  // of Shapes under one cost model
    std::vector<StepTime> forward, backward;  // by Block::kind
  };
  using ShapesKey = std::tuple<int, bool, std::int64_t, bool>;  // tp, sequence parallel, micro-batch, recompute

  int shapes_of(const ParallelSpec& spec, const Placements& placements);
  const Costs& costs_of(int shapes, const CostModel& model);

  const OpGraph& graph_;
  const Cluster& cluster_;
  TrainingSpec training_;
  NetworkCache networks_;
  std::vector<int> tied_users_;  // blocks that use a tied parameter
  std::map<ShapesKey, int> shapes_index_;
  std::vector<Shapes> shapes_;
  std::vector<std::pair<GroupNetwork, DeviceRates>> environments_;
  std::map<std::pair<int, int>, Costs> costs_;  // shapes, environment
};

}  // namespace parplan
