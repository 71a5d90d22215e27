#pragma once

#include <cstdint>
#include <vector>

#include "planner/cluster/mesh.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"

namespace parplan {

// Blocks [first, last) of the graph.
struct BlockRange {
  int first = 0;
  int last = 0;
  int size() const { return last - first; }
  bool operator==(const BlockRange&) const = default;
};

// How one block is spread over the ranks of its stage, and what of it is kept between forward and
// backward.
struct BlockLayout {
  Placements placements;
  Degrees degree;                         // of the mesh; pp is 1, since a block lies on one stage
  std::int64_t micro_batch = 1;           // sequences
  Recompute recompute = Recompute::none;  // of this block: not per_stage
  ContextMethod cp_method = ContextMethod::all_gather;
  int cp_ulysses = 1;  // DeviceMesh
  DataMethod dp_method = DataMethod::all_reduce;
  TensorOverlap tp_overlap = TensorOverlap::none;
  Home saved{};  // of what the block keeps for its backward, if it is a layer
  auto operator<=>(const BlockLayout&) const = default;
};
// Which of a rank's persistent tensors of the block are shards over the data axis.
DataShards data_shards(const BlockLayout& layout);

// What a recipe resolves to, and all that lowering knows of it. Blocks may differ from one another:
// in what they recompute, in where their parameters and state lie, and in the placement of the
// activation that they pass on, which the next block redistributes.
struct Layout {
  DeviceMesh mesh;
  std::vector<BlockRange> stages;     // consecutive; Schedule::rank_of_stage says who holds them
  std::vector<BlockLayout> layouts;   // different ones
  std::vector<int> layout_of_block;   // index into `layouts`, for each of the graph's blocks
  TiedGradients tied_gradients = TiedGradients::together;
  InputSlots input_slots = InputSlots::in_flight;
  std::vector<int> replica_micro_batches = {};  // ParallelSpec
  int prefetch_depth = 1;                       // likewise
  GatherUnit gather_unit = GatherUnit::block;   // of blocks whose parameters are shards

  // Whether the first rank of the data axis alone updates parameters.
  bool has_master() const { return layouts.front().dp_method == DataMethod::master; }
  const BlockLayout& of_block(int block) const { return layouts[layout_of_block[block]]; }
  // The placement of the activation that enters a block: that of the block before, or of the first
  // block's own.
  const TensorLayout& entering(int block) const;
  int stage_of_block(int block) const;
};

// The block of a stage from which on no layer recomputes, in a model of `blocks` blocks, of which
// all but the first and the last are layers. The end of the stage where all of its layers do.
int first_kept_block(BlockRange stage, const StageRecompute& recompute, int blocks);
// Likewise the one from which on all that layers save stays on the device, whatever `spec.offload`
// says.
int first_block_on_device(BlockRange stage, const ParallelSpec& spec, int blocks);
// `spec.stage_blocks` is set; the blocks of a stage are alike, but for which of them recompute, and
// which save elsewhere than on the device.
Layout lay_out(const ParallelSpec& spec, const Placements& placements);
// Where the recipe keeps the state of parameters.
StateHomes state_homes(const ParallelSpec& spec);
// One block under the recipe. `recompute` is not per_stage.
BlockLayout block_layout(const ParallelSpec& spec, const Placements& placements, Recompute recompute);

// What is gathered at once of a block's parameters: `wanted` where they are shards. What of it is
// whole on each rank is one piece.
GatherUnit gather_unit(const Layout& layout, int block, GatherUnit wanted);

// The number of micro-batches that a data-parallel rank, at this coordinate of its axis, runs in a
// step, of the size that all blocks have.
std::int64_t micro_batches(const Layout& layout, const TrainingSpec& training, int replica);
// The most of any.
std::int64_t micro_batches(const Layout& layout, const TrainingSpec& training);
// The first sample of the global batch that it trains: replicas have theirs one after another.
std::int64_t first_sample(const Layout& layout, const TrainingSpec& training, int replica);

}  // namespace parplan
