#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "planner/cost/cost_model.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"
#include "planner/plan/played_time.h"
#include "planner/plan/step.h"
#include "planner/program/block.h"
#include "planner/program/lower.h"
#include "planner/program/memory.h"

namespace parplan {

// A candidate without its Program. `lower_bound` is never above the simulated step; `time` sums to
// it, part by part: the bound is near enough to put candidates in order (docs/cost-model.md).
struct Estimate {
  StepTime time;
  MemoryUse memory;          // of the stage that fills its devices most; equal to what lowering plans
  int memory_stage = 0;
  Bytes spare;               // the least that is left on any stage, below 0 where it does not fit
  Bytes spare_in_all;        // summed over stages
  Seconds lower_bound;
};

// What stages could hold: prefix sums over the model's blocks, one more than blocks.
struct BlockTable {
  std::vector<double> seconds;           // forward and backward of a micro-batch
  std::vector<std::int64_t> state;       // bytes of parameters, gradients, optimizer, but for the tied parameter
  std::vector<std::int64_t> saved;       // bytes of saved activations of one micro-batch in flight
  std::int64_t least_fixed = 0;          // bytes that do not grow with blocks: at least
  std::int64_t most_fixed = 0;           // at most
};

// Estimates candidates of one model on one cluster, from Segments that are lowered and costed once
// each and kept. The graph and the cluster must outlive it; used by one thread.
class Estimator {
 public:
  Estimator(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training);

  // Seconds of forward and backward of each block of the graph on `stage`: what stage cuts balance.
  std::vector<double> block_seconds(const ParallelSpec& spec, const Placements& placements, int stage = 0);
  // The same as prefix sums, with bytes, for a stage that recomputes so.
  BlockTable block_table(const ParallelSpec& spec, const Placements& placements, int stage, Recompute recompute);
  Bytes capacity(const DeviceMesh& mesh, int stage);
  // What these blocks need on a stage, to the byte.
  Bytes peak(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule, int stage,
             BlockRange range, Recompute recompute);
  // A number that says whether there are none, one or more blocks of each kind in the range. What
  // of a stage's memory does not grow with blocks hangs on nothing else of them.
  std::uint64_t kinds_in(BlockRange range) const;
  // Numbers for what blocks cost on each stage: equal numbers, equal costs. One where all stages
  // are alike.
  std::vector<std::pair<int, int>> paces(const ParallelSpec& spec, const Placements& placements);

  // `spec.stage_blocks` is set.
  Estimate estimate(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule);
  // The same without `time`, and without `lower_bound` where it does not fit: what a search needs
  // of most candidates.
  Estimate bound(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule);

  NetworkCache& networks() { return networks_; }

 private:
  struct Shapes {  // of all blocks, under one way of cutting them
    std::vector<LoweredBlock> kinds;        // by Block::kind
    std::vector<std::int64_t> own_elements; // by Block::kind, not padded
    std::int64_t tied_elements = 0;         // of the tied parameter
  };
  struct Costs {  // of Shapes under one cost model
    std::vector<StepTime> forward, backward;                    // by Block::kind
    std::vector<Seconds> forward_seconds, backward_seconds;     // their totals
  };
  struct Environment {
    GroupNetwork tensor;
    std::shared_ptr<const DeviceKind> device;
    DeviceRates rates;
  };
  // What a mesh sees of the cluster.
  struct MeshView {
    std::vector<int> environments;               // per stage
    const GroupNetwork* tensor = nullptr;
    const GroupNetwork* data = nullptr;
    const GroupNetwork* pipeline = nullptr;
    std::vector<const GroupNetwork*> next;       // per stage but the last
    std::vector<Bytes> capacities;               // per stage
  };
  // Around one bucket.
  struct BucketCosts {
    Seconds gather, reduce, accumulate, clear, begin_clear, norm, update;
  };
  struct DataCosts {
    std::vector<BucketCosts> own;  // by Block::kind
    BucketCosts tied;
  };
  // A block on its stage, as the data axis sees it.
  struct Visit {
    Seconds forward, backward;  // compute stream
    Seconds clear;              // of the buffer for unreduced gradients, before the backward
    Seconds gather;             // of its own bucket, ahead
    Seconds reduce;             // data stream, behind its backward: its own bucket, then the tied one
    Seconds own_reduce;         // of its own bucket
  };
  // What a stage takes at least.
  struct StageBound {
    Seconds forward, backward;              // of a micro-batch
    Seconds plain_forward, plain_backward;  // without the data axis
    Seconds occupied;                       // both, with what may overlap with waiting
    Seconds begin;                          // before the first forward
    Seconds behind;                         // reductions behind the last backward
    Seconds norms, finish;                  // the gradient norm's own part; updates with gathers
    Seconds data;                           // of a step on the data stream
    StepTime parts;                         // of a micro-batch on the first stage
  };

  enum class Wanted { bound, all };
  Estimate estimate(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule,
                    Wanted wanted);
  int shapes_of(const ParallelSpec& spec, const Placements& placements, Recompute recompute);
  const Costs& costs_of(int shapes, int environment);
  const MeshView& view_of(const DeviceMesh& mesh);
  const DataCosts& data_costs_of(const ParallelSpec& spec, const Placements& placements, const Shapes& shapes,
                                 const MeshView& view, int environment);
  MemoryUse memory_of_stage(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule,
                            int stage, BlockRange range, const Shapes& shapes);
  StageBound bound_of_stage(const ParallelSpec& spec, const Placements& placements, BlockRange range, bool first,
                            bool sequential, const Costs& costs, const Shapes& shapes, const DataCosts& data);

  const OpGraph& graph_;
  const Cluster& cluster_;
  TrainingSpec training_;
  NetworkCache networks_;
  std::vector<char> uses_tied_;  // by block
  std::vector<int> tied_blocks_;
  std::vector<int> run_ends_;    // by block: where the run of like blocks ends that it is in
  std::vector<std::vector<int>> blocks_of_kind_;  // [kind][block]: blocks of the kind before it
  std::map<ParallelSpec, int> shapes_index_;  // by block_key
  std::vector<Shapes> shapes_;
  std::vector<Environment> environments_;
  std::map<std::pair<int, int>, Costs> costs_;  // shapes, environment
  std::map<DeviceMesh, MeshView> views_;
  // By bucket_key, network and environment.
  std::map<std::tuple<ParallelSpec, const GroupNetwork*, int>, DataCosts> data_costs_;
  // Room that estimates use again and again.
  std::vector<BucketSizes> buckets_;
  std::vector<SavedSizes> saved_;
  std::vector<Visit> visits_;
  std::vector<Seconds> forward_, backward_, transfer_, plain_forward_, plain_backward_;  // by stage
};

}  // namespace parplan
