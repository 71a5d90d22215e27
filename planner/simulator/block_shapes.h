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

// The elements of a bucket, not padded for the ranks that share it out: of all its parameters, and
// of each.
struct BucketElements {
  std::int64_t all = 0;
  std::vector<std::int64_t> of_parameters;
  std::vector<char> begins_unit;  // of each: whether it is not gathered with the one before it
};

// The blocks of a model, lowered under one way of cutting them.
struct BlockShapes {
  std::vector<LoweredBlock> kinds;         // by Block::kind
  std::vector<BucketElements> own_elements;     // by Block::kind
  std::vector<BucketElements> frozen_elements;  // likewise, of parameters that are not trained
  // By Block::kind, of matrices whose momentum the optimizer orthogonalizes: their elements, the
  // kernels of it, and the scratch that these need.
  std::vector<std::int64_t> matrix_elements;
  std::vector<std::vector<Instruction>> orthogonalizations;
  std::vector<std::int64_t> orthogonalization_scratch;
  BucketElements tied_elements;                 // of the tied parameter
  bool tied_is_frozen = false;
};

// What blocks are lowered for: to be run; or for floors that hold for every micro-batch. How
// temporaries share scratch, and with it what waits for what and what is fused, differs with their
// sizes; by its data alone an instruction waits no longer than in any of these ways.
enum class LoweredFor { runs, floors_fused, floors_unfused };

// The shapes of one model, each made once for several estimators: those of threads, and those of
// searches over other clusters and batches. Threads may share it.
class KnownBlockShapes {
 public:
  std::shared_ptr<const BlockShapes> of(const OpGraph& graph, const TrainingSpec& training, BackendKind backend,
                                        const ParallelSpec& spec, const Placements& placements, Recompute recompute,
                                        LoweredFor purpose = LoweredFor::runs);

 private:
  struct Known {
    TrainingSpec training;
    BackendKind backend;
    LoweredFor purpose{};
    std::unordered_map<ParallelSpec, std::shared_ptr<const BlockShapes>, SpecHash> shapes;  // by block_key
  };
  std::mutex mutex_;
  std::vector<Known> known_;
};

}  // namespace parplan
