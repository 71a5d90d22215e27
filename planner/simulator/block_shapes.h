#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"
#include "planner/plan/spec_hash.h"
#include "planner/program/lower_block.h"

namespace parplan {

// The blocks of a model, lowered under one way of cutting them.
struct BlockShapes {
  std::vector<LoweredBlock> kinds;         // by Block::kind
  std::vector<std::int64_t> own_elements;  // by Block::kind, not padded
  std::vector<std::int64_t> frozen_elements;  // likewise, of parameters that are not trained
  std::int64_t tied_elements = 0;             // of the tied parameter
  bool tied_is_frozen = false;
};

// The shapes of one model, each made once for several estimators: those of threads, and those of
// searches over other clusters. Threads may share it.
class KnownBlockShapes {
 public:
  std::shared_ptr<const BlockShapes> of(const OpGraph& graph, const TrainingSpec& training, BackendKind backend,
                                        const ParallelSpec& spec, const Placements& placements, Recompute recompute,
                                        bool scratch_apart = false);

 private:
  struct Known {
    TrainingSpec training;
    BackendKind backend;
    bool scratch_apart = false;
    std::unordered_map<ParallelSpec, std::shared_ptr<const BlockShapes>, SpecHash> shapes;  // by block_key
  };
  std::mutex mutex_;
  std::vector<Known> known_;
};

}  // namespace parplan
