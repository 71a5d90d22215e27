#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "planner/base/units.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/pipeline_time.h"
#include "planner/plan/placement.h"
#include "planner/plan/ring_axes.h"
#include "planner/plan/step_result.h"
#include "planner/program/memory.h"
#include "planner/simulator/block_costs.h"
#include "planner/simulator/data_costs.h"
#include "planner/simulator/mesh_views.h"
#include "planner/simulator/model_blocks.h"

namespace parplan {

// The time and memory of possible stages: prefix sums over the model's blocks, one more than
// blocks.
struct BlockTable {
  std::vector<Seconds> seconds;  // of a micro-batch's forward and backward
  // Bytes of parameters, gradients and optimizer, without the tied parameter.
  std::vector<std::int64_t> state;
  std::vector<std::int64_t> saved;  // bytes of the saved activations of one micro-batch
  std::int64_t least_fixed = 0;     // bytes that do not grow with blocks, at least
  std::int64_t most_fixed = 0;      // at most
};

// What of a stage's memory grows with its blocks, by Block::kind, and what does not, at least:
// the steps and `least_fixed` of its BlockTable.
struct KindBytes {
  std::vector<std::int64_t> state, saved;
  std::int64_t least_fixed = 0;
  std::int64_t libraries = 0;  // of least_fixed, outside the arena
};

// Which blocks of a stage recompute, those before `first_kept`, and their shapes and those of the
// others, by number.
struct StageShapes {
  int shapes = 0;
  int kept_shapes = 0;
  int first_kept = 0;
  int of_block(int block) const { return block < first_kept ? shapes : kept_shapes; }
};
// A stage that a rank holds.
struct HeldStage {
  BlockRange blocks;
  StageShapes shapes;
  int first_on_device = 0;           // first_block_on_device
  bool is_handed_its_input = false;  // by the stage before, on the same rank
};
// The stage of a model of `count` blocks. `number_of(recompute)`: of its shapes with that.
template <class NumberOf>
HeldStage held_stage(const ParallelSpec& spec, const StageRecompute& recompute, int stage, BlockRange blocks, int count,
                     NumberOf number_of) {
  const int shapes = number_of(recompute.rule);
  return {.blocks = blocks,
          .shapes = {.shapes = shapes,
                     .kept_shapes = recompute.layers > 0 ? number_of(Recompute::none) : shapes,
                     .first_kept = first_kept_block(blocks, recompute, count)},
          .first_on_device = first_block_on_device(blocks, spec, count),
          .is_handed_its_input = stage > 0 && rank_of_stage(spec, stage) == rank_of_stage(spec, stage - 1)};
}

// What the ranks of layouts hold, as lowering plans it, to the byte. Works in buffers of its own;
// what it refers to must outlive it.
class RankMemories {
 public:
  RankMemories(const OpGraph& graph, const ModelBlocks& blocks, const TrainingSpec& training, MeshViews& views,
               KnownBlockCosts& costs, KnownDataCosts& data);

  // What a rank holds that has these stages.
  MemoryUse of(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule, int rank,
               std::span<const HeldStage> held);
  // What the layers of a stage save, as make_buffers.cpp has it.
  SavedByStage saved_by(const ParallelSpec& spec, const HeldStage& stage) const;
  KindBytes kind_bytes(const ParallelSpec& spec, const Placements& placements, Recompute recompute);
  // For a stage with this recompute. `room`: another table, whose memory it takes.
  BlockTable block_table(const ParallelSpec& spec, const Placements& placements, int stage, Recompute recompute,
                         BlockTable room);

 private:
  // What a block of a kind takes of a slot on the device, where it saves so many bytes.
  std::int64_t on_device(const ParallelSpec& spec, std::size_t kind, std::int64_t saved) const;
  // What is outside the arena: the last one is kept.
  Bytes overhead_of(const ParallelSpec& spec);
  // Returns what the last block saves, where the rank holds it: it has slots of its own.
  std::int64_t share_slots(const ParallelSpec& spec, std::span<const HeldStage> held);
  // The same of what is kept for weight gradients.
  void share_slots_for_weights(const ParallelSpec& spec, std::span<const HeldStage> held);
  // The buffers for activations that enter stages, by rank of a pipeline whose ranks hold several
  // stages: the last ones are kept.
  const std::vector<int>& inputs_of_ranks(const ScheduleForms& schedule, const PipelineShape& shape, InputSlots inputs);

  // What a rank keeps for weight gradients: those of the last pipeline are kept.
  SlotsForWeights slots_of(const ScheduleForms& schedule, int rank, const PipelineShape& shape);

  const OpGraph& graph_;
  const ModelBlocks& blocks_;
  const TrainingSpec& training_;
  MeshViews& views_;
  KnownBlockCosts& costs_;
  KnownDataCosts& data_;
  std::int64_t step_scratch_ = 0;  // step_scratch_bytes
  Bytes least_memory_;             // of a rank without blocks
  struct KnownOverhead {
    DeviceMesh mesh;
    PerAxis<bool> rings;
    Bytes bytes;
  };
  std::optional<KnownOverhead> last_overhead_;
  struct Inputs {
    Schedule (*actions)(const PipelineShape& shape) = nullptr;
    InputSlots inputs{};
    std::array<int, 4> shape{};  // ranks, stages, micro-batches and groups of these
    std::vector<int> of_rank;
  };
  std::optional<Inputs> last_inputs_;
  struct Slots {
    SlotsForWeights (*for_weights)(int rank, const PipelineShape& shape) = nullptr;
    std::array<int, 4> shape{};
    std::vector<std::optional<SlotsForWeights>> of_rank;
  };
  Slots last_slots_;
  std::vector<BucketSizes> buckets_, frozen_;
  std::vector<SavedSizes> saved_, for_weights_, left_;
  std::vector<std::int64_t> sizes_, host_sizes_;  // of what a stage's blocks save, by home
  std::vector<SavedSizes> host_saved_;
  std::vector<std::pair<std::int64_t, std::int64_t>> sizes_for_weights_;
};

}  // namespace parplan
