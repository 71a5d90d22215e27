#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "planner/base/enum_index.h"
#include "planner/cost/cost_model.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/pipeline_time.h"
#include "planner/plan/placement.h"
#include "planner/plan/step_result.h"
#include "planner/program/lower_block.h"
#include "planner/program/memory.h"
#include "planner/simulator/block_costs.h"
#include "planner/simulator/block_shapes.h"
#include "planner/simulator/data_costs.h"
#include "planner/simulator/mesh_views.h"
#include "planner/simulator/model_blocks.h"
#include "planner/simulator/rank_memories.h"
#include "planner/simulator/stage_bound.h"
#include "planner/simulator/step_bound.h"

namespace parplan {

// What a search needs to know of a candidate, without its Program. `lower_bound` is never above the
// simulated step, and close enough to it to sort candidates by (docs/cost-model.md).
struct Bound {
  // That of the rank that fills its device most; equal to the plan of lowering.
  MemoryUse memory;
  int memory_stage = 0;
  int memory_replica = 0;
  // The least free memory of any rank; below 0 where the candidate does not fit.
  Bytes spare;
  // What all ranks of the pipeline together have beyond the state of all blocks; below 0 where no
  // cut fits, whatever its stages recompute.
  Bytes room_in_all;
  Seconds lower_bound;
};
// The same with a time whose parts sum to `lower_bound`.
struct Estimate : Bound {
  StepTime time;
};

// The lower bounds of a step by what one stage does.
struct StageOfCut {
  Seconds opening;   // what the first stage adds to the pipeline, if this is the first
  Seconds pipeline;  // by the way through this stage
  Seconds alone;     // of the step without its end, if this stage never waited
  Seconds end;       // of the step, once gradients are reduced
};

// What all cuts of a layout have in common.
struct CutFrame {
  PipelineShape shape;
  bool synchronises = false;  // by a gradient norm
  Seconds agreed;             // on the norm
  // Prefix sums over blocks, each on the device and with the recompute with which it is fastest:
  // of forwards, and of forwards with backwards.
  std::vector<Seconds> forward, computing;
  std::vector<Seconds> crossing;  // by stage: transfers between the stages before it, one way
  Seconds slowest_transfer;
  struct Way {
    int shapes = 0;
    const BlockCosts* costs = nullptr;
    const DataCosts* data = nullptr;
    const std::vector<SavedCopies>* copies = nullptr;  // null: none
    bool sequential = false;
  };
  std::vector<std::vector<Way>> ways;  // by stage, then what it recomputes
  // What stage_of_cut has found of stages whose blocks are all alike.
  struct AlikeKey {
    const BlockCosts* costs = nullptr;
    const DataCosts* data = nullptr;
    std::size_t kind = 0;
    int blocks = 0;
    bool is_first = false;  // stage
    auto operator<=>(const AlikeKey&) const = default;
  };
  std::map<AlikeKey, StageBound> alike = {};
};

// Estimates candidates of one model on one cluster, from Segments that are each lowered and costed
// once and kept: by what blocks cost (block_costs.h, data_costs.h), what stages and ranks take at
// least (stage_bound.h, step_bound.h), and what ranks hold (rank_memories.h). The graph and the
// cluster must outlive it; used by one thread.
class Estimator {
 public:
  // `known_shapes`: of the graph, shared with others; null: its own.
  Estimator(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
            std::shared_ptr<KnownBlockShapes> known_shapes = nullptr);
  Estimator(const Estimator&) = delete;
  Estimator& operator=(const Estimator&) = delete;

  // The time of the forward and backward of each of the graph's blocks on `stage`, which stage
  // cuts balance.
  std::vector<Seconds> block_seconds(const ParallelSpec& spec, const Placements& placements, int stage = 0);
  // The lowered blocks of a stage, by Block::kind.
  std::span<const LoweredBlock> lowered_blocks(const ParallelSpec& spec, const Placements& placements,
                                               Recompute recompute, int stage = 0);
  // The same for floors.
  std::shared_ptr<const BlockShapes> blocks_for(LoweredFor purpose, const ParallelSpec& spec,
                                                const Placements& placements, Recompute recompute) {
    return costs_.shapes_for(purpose, spec, placements, recompute);
  }
  // Where blocks of a kind keep what they save.
  Home home_of_saved(const ParallelSpec& spec, std::size_t kind) const { return costs_.home_of_saved(spec, kind); }
  // The time of a forward and backward of a block of each kind on `stage` with this recompute.
  std::vector<Seconds> kind_seconds(const ParallelSpec& spec, const Placements& placements, int stage,
                                    Recompute recompute);
  // The same on the devices of one replica alone.
  std::vector<Seconds> kind_seconds(const ParallelSpec& spec, const Placements& placements, int stage,
                                    Recompute recompute, int replica);
  // Those of all replicas as prefix sums, with bytes, for a stage with this recompute.
  // `room`: another table, whose memory it takes.
  BlockTable block_table(const ParallelSpec& spec, const Placements& placements, int stage, Recompute recompute,
                         BlockTable room = {}) {
    return memories_.block_table(spec, placements, stage, recompute, std::move(room));
  }
  // What a block of each kind on `stage` takes of a step on the stream of the data axis: gathers
  // and reductions, with ZeRO-2 and 3 of every micro-batch.
  std::vector<Seconds> kind_data_seconds(const ParallelSpec& spec, const Placements& placements, int stage);
  KindBytes kind_bytes(const ParallelSpec& spec, const Placements& placements, Recompute recompute) {
    return memories_.kind_bytes(spec, placements, recompute);
  }
  // By rank of the pipeline, as far as they may be used.
  const std::vector<Bytes>& capacities(const DeviceMesh& mesh) { return views_.of(mesh).capacities; }
  Bytes capacity(const DeviceMesh& mesh, int rank) { return capacities(mesh)[static_cast<std::size_t>(rank)]; }
  // The memory that a rank needs for stages of these blocks, to the byte. `recompute`: of each of
  // them.
  Bytes peak(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule, int rank,
             std::span<const BlockRange> stages, StageRecompute recompute);
  Bytes peak(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule, int rank,
             BlockRange stage, StageRecompute recompute) {
    return peak(spec, placements, schedule, rank, {&stage, 1}, recompute);
  }
  std::uint64_t kinds_in(BlockRange range) const { return blocks_.kinds_in(range); }
  // Numbers for the cost of blocks on each stage: equal numbers mean equal costs. A single one
  // where all stages are equal.
  std::vector<std::pair<int, int>> paces(const ParallelSpec& spec, const Placements& placements);

  // `spec.stage_blocks` is set.
  Estimate estimate(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule);
  // Without `lower_bound` where it does not fit.
  Bound bound(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule);
  // The same of a replica with unlike micro-batches, at this coordinate of the data axis, as if it
  // waited for no other.
  Bound bound_of_replica(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule,
                         int replica);

  // `recomputes`: what each stage may choose from.
  CutFrame cut_frame(const ParallelSpec& spec, const Placements& placements, std::span<const Recompute> recomputes);
  // A lower bound of the step by computation alone, for any cut in which the stage has these
  // blocks. It never falls where the stage takes over blocks of its neighbours.
  Seconds least_through(const CutFrame& frame, const ScheduleForms& schedule, int stage, BlockRange range) const;
  // `choice`: the number of what the stage recomputes.
  StageOfCut stage_of_cut(CutFrame& frame, const ParallelSpec& spec, const Placements& placements,
                          const ScheduleForms& schedule, int stage, BlockRange range, std::size_t choice);

  NetworkCache& networks() { return views_.networks(); }

 private:
  enum class Wanted { bound, all };
  Estimate estimate(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule,
                    Wanted wanted);
  // For one replica, or for all where they are alike.
  Estimate estimate_replica(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule,
                            Wanted wanted);
  // Its parts, which leave what they find in `stages_` to the next: the stages of the layout, and
  // one of them; all that is memory; the bounds of stages.
  void begin_stages(const ParallelSpec& spec);
  HeldStage held(const ParallelSpec& spec, const Placements& placements, int stage);
  Estimate memory_of_ranks(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule);
  BlockRange tied_on_rank(int stage) const;
  void bound_stages(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule);
  // What the bound consists of. `plays`: the actions of the schedule; `updates`: what follows the
  // gradients.
  StepTime parts_of(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule, bool plays,
                    const StepBound& step, Seconds updates, Seconds bound) const;
  // Whether it is known what stages do behind their last backward: with replicas that are alike,
  // where nothing but other stages' reductions is on the data axis's stream.
  bool knows_reductions(const ParallelSpec& spec, const Placements& placements, const MeshView& view) const;
  Seconds agreement(const ParallelSpec& spec, const Placements& placements, const MeshView& view) const;
  Seconds norm_copy(int environment) const;

  const OpGraph& graph_;
  const TrainingSpec training_;
  const ModelBlocks blocks_;
  MeshViews views_;
  KnownBlockCosts costs_;
  KnownDataCosts data_;
  RankMemories memories_;
  StageBounds stage_bounds_;
  // The estimate at work.
  BoundedStages stages_;
  std::vector<HeldStage> held_;
  // The numbers of the shapes of stages with the same recompute, looked up once: by whether they
  // run backwards in two parts. per_stage is no stage's.
  std::array<std::array<std::optional<int>, index_of(Recompute::per_stage)>, 2> numbers_;
};

}  // namespace parplan
