#pragma once

#include <vector>

#include "planner/base/units.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/pipeline_time.h"
#include "planner/plan/placement.h"
#include "planner/plan/step_result.h"
#include "planner/simulator/block_costs.h"
#include "planner/simulator/data_costs.h"
#include "planner/simulator/model_blocks.h"

namespace parplan {

// The least times of a stage.
struct StageBound {
  Seconds forward, backward;              // of a micro-batch
  Seconds weights;                        // the second part of the backward, where it has two
  Seconds plain_forward, plain_backward;  // without the data axis
  Seconds occupied;                       // both, with work that may overlap with waiting
  Seconds begin;                          // before the first forward
  Seconds behind;                         // reductions after the last backward
  Seconds reduces;                        // those that wait for the last micro-batch and may overlap
  Seconds updates, regathers;             // of the optimizer, without the tied bucket
  Seconds returns;                        // likewise copies of parameters that the host has updated
  Seconds copied;                         // after the last backward until all gradients are on the host
  Seconds norms, finish;                  // the gradient norm's own part; updates with gathers
  bool later_norms_follow = true;         // behind it, those of later stages of the rank
  Seconds drives;                         // from the step's start until its state on NVMe is written
  // Of a micro-batch: reads from and writes to NVMe of parameters and of what blocks save; and
  // those of its updates.
  Seconds reads, writes;
  Seconds update_reads, update_writes;
  Seconds finish_behind;                  // of these, what follows the last backward where no norm is awaited
  Seconds data;                           // of a step on the data stream
  Seconds out, back;                      // of a micro-batch: copies of what its blocks save to and from the host
  Seconds other_out, other_back;          // of a step: other copies that it takes part in
  Seconds stalls;                         // of a micro-batch: what waiting for these copies adds, at least
  StepTime parts;                         // of a micro-batch; on the first rank only
};

// What blocks of a stage take where they have the same shapes. `copies`: null where nothing that
// they save is copied.
struct WayOfBlocks {
  const BlockCosts* costs = nullptr;
  const std::vector<SavedCopies>* copies = nullptr;
};
// The same of all of its blocks: those before `first_kept` recompute, and what those from
// `first_on_device` on save is not copied. So many buffers take turns for the others, and where
// these are those of layers from there on (take_turns_with_others), so do such layers.
struct WayOfStage {
  WayOfBlocks recomputing, keeping;
  int first_kept = 0;
  int first_on_device = 0;
  int turns = 0;
  bool with_others = false;
  WayOfBlocks of_block(int block) const {
    const WayOfBlocks& way = block < first_kept ? recomputing : keeping;
    return {way.costs, block < first_on_device ? way.copies : nullptr};
  }
};

// A block on its stage, with its work on the data axis.
struct BlockVisit {
  Seconds forward, backward;  // compute stream
  Seconds weights;            // the second part of the backward, where it has two
  Seconds clear;              // of the buffer for unreduced gradients, before the backward
  Seconds gather, gather_again;  // of its own buckets, ahead of its forward and its backward
  // On the data stream after the block's backward: its own bucket, then the tied one.
  Seconds reduce;
  Seconds own_reduce;         // of its own bucket
  Seconds across;             // after the reductions of the last micro-batch
  Seconds to_host;            // copy of its gradients
  Seconds out, back;          // copies of what it saves
  Seconds up, up_again;       // of its parameters, before they are gathered
};

// A stage, and where it is.
struct StagePlace {
  int stage = 0;
  BlockRange blocks = {};
  BlockRange tied_on_rank = {};  // ModelBlocks::tied_in, over all stages of its rank
  bool on_first_rank = false;    // of the pipeline
  bool sequential = false;       // MeshViews::is_sequential
  int micro_batches = 0;
  int shard = 0;  // of a bucket: which of the ranks that share it out
};

// Bounds stages one after another, in buffers of its own. What it refers to must outlive it.
class StageBounds {
 public:
  StageBounds(const OpGraph& graph, const ModelBlocks& blocks, const TrainingSpec& training)
      : graph_(graph), blocks_(blocks), training_(training) {}

  StageBound of(const ParallelSpec& spec, const Placements& placements, const StagePlace& place, const WayOfStage& way,
                const BlockShapes& shapes, const DataCosts& data);

  // The reductions of a stage of a rank that uses no tied parameter, and what they slow at least.
  // Its gradient is reduced block by block, from the last one on. `sent_back`: what the bytes of a
  // transfer to the stage before take on NICs; nothing where sends are posted, which wait for what
  // the receiver's rank has in flight.
  StageReductions reductions(BlockRange range, bool alone_on_rank, const WayOfStage& way, const DataCosts& data,
                             Seconds sent_back) const;

 private:
  const OpGraph& graph_;
  const ModelBlocks& blocks_;
  const TrainingSpec& training_;
  std::vector<BlockVisit> visits_;
};

}  // namespace parplan
