#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "planner/base/units.h"
#include "planner/cost/contention.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"
#include "planner/plan/spec_hash.h"
#include "planner/plan/step_result.h"
#include "planner/simulator/block_shapes.h"
#include "planner/simulator/mesh_views.h"
#include "planner/simulator/model_blocks.h"

namespace parplan {

// What blocks of the same shapes take under one cost model, by Block::kind.
struct BlockCosts {
  std::vector<StepTime> forward, backward;
  std::vector<Seconds> forward_seconds, backward_seconds;  // their totals
  std::vector<Seconds> weights_seconds;                    // the second part of a backward in two, in the totals
  std::vector<BoundTimes> forward_bound, backward_bound;   // of whole backwards
};

// What copies take where a block keeps what it saves elsewhere, both ways in a micro-batch: where
// its input lies with the rest, and where it does not.
struct SavedCopies {
  Seconds out, back;
  Seconds out_without_input, back_without_input;
  Seconds for_weights;  // back once more, for the second part of a backward
  Seconds write, read;  // at least, where that is in a file
};

// The blocks of one model, each lowered once and costed once in each environment. What it refers to
// must outlive it; used by one thread.
class KnownBlockCosts {
 public:
  // `shapes`: of the graph, shared with others; null: its own.
  KnownBlockCosts(const OpGraph& graph, const ModelBlocks& blocks, const TrainingSpec& training, MeshViews& views,
                  std::shared_ptr<KnownBlockShapes> shapes);

  // The number of the shapes of a stage's blocks: where the schedule has backwards in two parts, of
  // one that runs them so.
  int number_of(const ParallelSpec& spec, const Placements& placements, Recompute recompute, int stage);
  const BlockShapes& shapes(int number) const { return *shapes_[static_cast<std::size_t>(number)]; }
  // Whether backwards in two parts also run whole.
  bool also_runs_whole(int number) const { return also_whole_[static_cast<std::size_t>(number)] != 0; }
  // Shapes for another purpose than to be run.
  std::shared_ptr<const BlockShapes> shapes_for(LoweredFor purpose, const ParallelSpec& spec,
                                                const Placements& placements, Recompute recompute) const;

  const BlockCosts& of(int number, int environment);
  // By Block::kind; null where the recipe keeps all that blocks save on the device.
  const std::vector<SavedCopies>* copies(const ParallelSpec& spec, int number, int environment);
  // Where blocks of a kind keep what they save.
  Home home_of_saved(const ParallelSpec& spec, std::size_t kind) const;

 private:
  const OpGraph& graph_;
  const ModelBlocks& blocks_;
  const TrainingSpec& training_;
  MeshViews& views_;
  std::shared_ptr<KnownBlockShapes> known_shapes_;
  std::unordered_map<ParallelSpec, int, SpecHash> numbers_;  // by block_key
  std::vector<std::shared_ptr<const BlockShapes>> shapes_;   // by number
  std::vector<char> also_whole_;                             // likewise
  std::map<std::pair<int, int>, BlockCosts> costs_;          // by number and environment
  std::map<std::tuple<int, int, Home>, std::vector<SavedCopies>> copies_;  // and by where they go
};

}  // namespace parplan
