#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "planner/cost/cost_model.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout.h"
#include "planner/plan/parallel_spec.h"
#include "planner/cost/contention.h"
#include "planner/plan/pipeline_time.h"
#include "planner/plan/placement.h"
#include "planner/plan/spec_hash.h"
#include "planner/plan/step_result.h"
#include "planner/program/lower.h"
#include "planner/program/lower_block.h"
#include "planner/program/memory.h"
#include "planner/simulator/block_shapes.h"

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

// The lower bounds of a step by what one stage does.
struct StageOfCut {
  Seconds opening;   // what the first stage adds to the pipeline, if this is the first
  Seconds pipeline;  // by the way through this stage
  Seconds alone;     // of the step without its end, if this stage never waited
  Seconds end;       // of the step, once gradients are reduced
};

// Whether every boundary between stages looks like the first: with whole nodes per stage, and no
// network levels above the nodes.
bool boundaries_are_alike(const Cluster& cluster, const DeviceMesh& mesh);

// Estimates candidates of one model on one cluster, from Segments that are each lowered and costed
// once and kept. The graph and the cluster must outlive it; used by one thread.
class Estimator {
  struct Costs;
  struct DataCosts;
  // What copies take where a block keeps what it saves elsewhere, both ways in a micro-batch:
  // where its input lies with the rest, and where it does not.
  struct SavedCopies {
    Seconds out, back;
    Seconds out_without_input, back_without_input;
    Seconds for_weights;  // back once more, for the second part of a backward
    Seconds write, read;  // at least, where that is in a file
  };
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
                                                const Placements& placements, Recompute recompute);
  // Where blocks of a kind keep what they save.
  Home home_of_saved(const ParallelSpec& spec, std::size_t kind) const;
  // The time of a forward and backward of a block of each kind on `stage` with this recompute.
  std::vector<Seconds> kind_seconds(const ParallelSpec& spec, const Placements& placements, int stage,
                                    Recompute recompute);
  // The same on the devices of one replica alone.
  std::vector<Seconds> kind_seconds(const ParallelSpec& spec, const Placements& placements, int stage,
                                    Recompute recompute, int replica);
  // Those of all replicas as prefix sums, with bytes, for a stage with this recompute.
  // `room`: another table, whose memory it takes.
  BlockTable block_table(const ParallelSpec& spec, const Placements& placements, int stage, Recompute recompute,
                         BlockTable room = {});
  // What a block of each kind on `stage` takes of a step on the stream of the data axis: gathers
  // and reductions, with ZeRO-2 and 3 of every micro-batch.
  std::vector<Seconds> kind_data_seconds(const ParallelSpec& spec, const Placements& placements, int stage);
  // What of a stage's memory grows with its blocks, by Block::kind, and what does not, at least:
  // the steps and `least_fixed` of its block_table.
  struct KindBytes {
    std::vector<std::int64_t> state, saved;
    std::int64_t least_fixed = 0;
    std::int64_t libraries = 0;  // of least_fixed, outside the arena
  };
  KindBytes kind_bytes(const ParallelSpec& spec, const Placements& placements, Recompute recompute);
  Bytes capacity(const DeviceMesh& mesh, int stage);
  const std::vector<Bytes>& capacities(const DeviceMesh& mesh);
  // The memory that a rank needs for stages of these blocks, to the byte. `recompute`: of each of
  // them.
  Bytes peak(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule, int rank,
             std::span<const BlockRange> stages, StageRecompute recompute);
  Bytes peak(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule, int rank,
             BlockRange stage, StageRecompute recompute) {
    return peak(spec, placements, schedule, rank, {&stage, 1}, recompute);
  }
  // A number that encodes whether the range has no, one or several blocks of each kind. The part of
  // a stage's memory that does not grow with blocks depends on nothing else about them, unless the
  // stage's input lies apart.
  std::uint64_t kinds_in(BlockRange range) const;
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
      const Costs* costs = nullptr;
      const DataCosts* data = nullptr;
      const std::vector<SavedCopies>* copies = nullptr;  // null: none
      bool sequential = false;
    };
    std::vector<std::vector<Way>> ways;  // by stage, then what it recomputes
    // What stage_of_cut has found of stages whose blocks are all alike.
    struct AlikeKey {
      const Costs* costs = nullptr;
      const DataCosts* data = nullptr;
      int kind = 0, blocks = 0;
      bool is_first = false;  // stage
      auto operator<=>(const AlikeKey&) const = default;
    };
    std::map<AlikeKey, StageBound> alike = {};
  };
  // `recomputes`: what each stage may choose from.
  CutFrame cut_frame(const ParallelSpec& spec, const Placements& placements, std::span<const Recompute> recomputes);
  // A lower bound of the step by computation alone, for any cut in which the stage has these
  // blocks. It never falls where the stage takes over blocks of its neighbours.
  Seconds least_through(const CutFrame& frame, const ScheduleForms& schedule, int stage, BlockRange range) const;
  // `choice`: the number of what the stage recomputes.
  StageOfCut stage_of_cut(CutFrame& frame, const ParallelSpec& spec, const Placements& placements,
                          const ScheduleForms& schedule, int stage, BlockRange range, std::size_t choice);

  NetworkCache& networks() { return networks_; }

 private:
  struct Costs {  // of BlockShapes under one cost model
    std::vector<StepTime> forward, backward;                    // by Block::kind
    std::vector<Seconds> forward_seconds, backward_seconds;     // their totals
    std::vector<Seconds> weights_seconds;  // the second part of a backward in two, in the totals
    std::vector<BoundTimes> forward_bound, backward_bound;  // of whole backwards
  };
  struct Environment {
    PerAxis<GroupNetwork> along;  // that blocks communicate over
    // The context axis's parts, where it has such (DeviceMesh::cp_ulysses); of one rank else.
    GroupNetwork exchange, keys;
    std::shared_ptr<const DeviceKind> device;
    DeviceRates rates;
    std::optional<HostShare> host;
    std::optional<NvmeShare> nvme;
  };
  // The part of the cluster that a mesh uses.
  struct MeshView {
    std::vector<int> environments;               // by rank of the pipeline
    bool is_uniform = true;                      // a single environment
    PerAxis<const GroupNetwork*> along;          // of the planned axes; null where one is not used
    const GroupNetwork* shard = nullptr;         // over which ZeRO shards: the data axis's, or a part of it
    const GroupNetwork* replicas = nullptr;      // of that part; null without hybrid sharding
    std::vector<const GroupNetwork*> next;       // by rank but the last; empty until asked for
    std::vector<Bytes> capacities;               // by rank
    std::vector<std::optional<Bytes>> hosts;     // by rank: what it may take of the host's memory, where that is known
    std::vector<std::optional<Bytes>> drives;    // likewise of its NVMe drives
  };
  // The costs of the work around one bucket.
  struct BucketCosts {
    Seconds gather;        // of a block's parameters for its forward
    Seconds gather_again;  // the same for its backward: nothing where it has none
    Seconds regather;      // of those that are updated, at the end of the step
    Seconds reduce, accumulate, clear, begin_clear, norm, update;
    // Muon's work on matrices, by the rank that does it for all that share out the state; and what
    // goes over the data axis before and after it.
    Seconds orthogonalize, exchange;
    Seconds across;  // hybrid sharding: of the sum of a shard over its replicas
    Seconds to_host, from_host;  // copies of gradients and of updated parameters, where the host updates
    Seconds read, write;         // by an update, of what is on NVMe
    // Copies of a block's parameters to the device, before each of its gathers, where they are
    // elsewhere; and for its backward.
    Seconds up, up_again;
    Seconds read_up, read_again;  // from NVMe before these, where they are there
    // A copy of sums of gradients on the host, each way in a micro-batch: not back before the
    // first, and `to_host` after the last.
    Seconds sum;
    // The same to and from NVMe, where they are there; and of this rank's shard.
    Seconds sum_read, sum_write;
    Seconds shard_read, shard_write;
    // With a master, of every micro-batch: parameters to the replicas, and their gradients back.
    Seconds hand_out, collect;
  };
  // A collective of a reduction, and what it takes from kernels beside it.
  struct Reduction {
    Seconds duration;
    Contention takes;
  };
  struct DataCosts {
    std::vector<BucketCosts> own;  // by Block::kind
    BucketCosts tied;
    // Those behind a block's last backward, likewise; none is known where copies take turns with
    // them.
    std::vector<std::vector<Reduction>> reductions;
    // Bytes of parameters, gradients and optimizer, likewise; the tied parameter used twice.
    std::vector<std::int64_t> own_state;
    std::int64_t tied_state = 0;
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
  // What blocks of a stage take where they have the same shapes. `copies`: null where nothing that
  // they save is copied.
  struct WayOfBlocks {
    const Costs* costs = nullptr;
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
  struct Visit {
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
  // The same of a rank, over its stages.
  struct RankBound {
    std::optional<Seconds> before;  // forwards and transfers of the stages before its first one
    Seconds busy;                   // with forwards and backwards, in a step
    Seconds behind;
    // Sums over the stages so far: reductions, and what the rank computes after the last
    // micro-batch's backward on the next of them ends.
    Seconds reduces, backwards;
    Seconds behind_all;  // the most by which reductions outlast the rest, over its stages
    Seconds norms, updates, regathers, returns, finish;
    Seconds drives;
    Seconds reads, writes, update_reads, update_writes;
    Seconds copied;
    Seconds data;
    Seconds out, back;  // copies to and from the host, in a step
  };
  // The least times of the slowest rank.
  struct StepBound {
    // When all gradients are reduced, if only one rank mattered.
    Seconds synchronised;
    Seconds updated;  // when a rank has updated on its host, after copying its gradients there
    Seconds ended;    // when a rank has updated and gathered, where it awaits no norm
    // On the first stage's rank, where its backward is the last: gathers of updated parameters,
    // which follow its reductions, and all that follows the backward in any case.
    Seconds regathers, first_finish;
    Seconds finish;
    Seconds data;
    Seconds copies;  // when all copies to and from the host are done
    Seconds drives;  // when all reads and writes on NVMe are done, if a rank had nothing else to do
    StepTime parts;  // of a micro-batch on the first rank
  };

  enum class Wanted { bound, all };
  Estimate estimate(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule,
                    Wanted wanted);
  // For one replica, or for all where they are alike.
  Estimate estimate_replica(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule,
                            Wanted wanted);
  // That the estimate is for.
  std::int64_t micro_batches_of(const ParallelSpec& spec) const {
    return replica_ ? micro_batches(spec, training_, *replica_) : micro_batches(spec, training_);
  }
  // The blocks of a stage; of one that runs backwards in two parts where the schedule has such.
  int shapes_of(const ParallelSpec& spec, const Placements& placements, Recompute recompute, int stage);
  // The same where only some of its blocks may recompute.
  StageShapes stage_shapes(const ParallelSpec& spec, const Placements& placements, const StageRecompute& recompute,
                           int stage, BlockRange blocks);
  const Costs& costs_of(int shapes, int environment);
  // By Block::kind; null where the recipe keeps all that blocks save on the device.
  const std::vector<SavedCopies>* copies_of(const ParallelSpec& spec, int shapes, int environment);
  // Whether one stream carries out all that ranks of an environment do.
  bool is_sequential(int environment) const;
  MeshView& view_of(const DeviceMesh& mesh);
  MeshView make_view(const DeviceMesh& mesh);
  const GroupNetwork& next_network(const DeviceMesh& mesh, MeshView& view, int from, int to);
  const DataCosts& data_costs_of(const ParallelSpec& spec, const Placements& placements, const BlockShapes& shapes,
                                 const MeshView& view, int environment);
  std::vector<Reduction> reductions_of(const BucketElements& trained, const ParallelSpec& spec,
                                       const DataShards& shards, const MeshView& view, const Environment& where) const;
  MemoryUse memory_of_rank(const ParallelSpec& spec, const Placements& placements, const ScheduleForms& schedule,
                           int rank, std::span<const HeldStage> held);
  // Returns what the last block saves, where the rank holds it: it has slots of its own.
  std::int64_t share_slots(const ParallelSpec& spec, std::span<const HeldStage> held);
  // The same of what is kept for weight gradients.
  void share_slots_for_weights(const ParallelSpec& spec, std::span<const HeldStage> held);
  // What the layers of a stage save, as make_buffers.cpp has it.
  SavedByStage saved_by(const ParallelSpec& spec, const HeldStage& stage) const;
  bool is_handed_its_input(const ParallelSpec& spec, int stage) const {
    return stage > 0 && rank_of_stage(spec, stage) == rank_of_stage(spec, stage - 1);
  }
  // From the first block that uses the tied parameter to the last; empty where none does.
  BlockRange tied_in(BlockRange range) const;
  // `tied_on_rank`: the same over all stages of the rank.
  StageBound bound_of_stage(const ParallelSpec& spec, const Placements& placements, BlockRange range,
                            BlockRange tied_on_rank, int stage, bool on_first_rank, bool sequential,
                            const WayOfStage& way, const BlockShapes& shapes, const DataCosts& data);
  // Whether `reductions_of_stage` knows what stages do behind their last backward: with replicas
  // that are alike, where nothing but other stages' reductions is on the data axis's stream.
  bool knows_reductions(const ParallelSpec& spec, const Placements& placements, const MeshView& view) const;
  // The reductions of a stage of a rank that uses no tied parameter, and what they slow at least.
  // Its gradient is reduced block by block, from the last one on. `sent_back`: what the bytes of a
  // transfer to the stage before take on NICs; nothing where sends are posted, which wait for what
  // the receiver's rank has in flight.
  StageReductions reductions_of_stage(BlockRange range, bool alone_on_rank, const WayOfStage& way,
                                      const DataCosts& data, Seconds sent_back) const;
  // The least time of a stage's forward and of its backward by what its blocks keep on the host.
  std::pair<Seconds, Seconds> chains_of_copies(const WayOfStage& way) const;
  // `goes_back`: in the shape of a V; `on_host`: the host updates.
  StepBound bound_of_ranks(const PipelineShape& shape, bool goes_back, bool on_host);
  Seconds norm_copy(int environment) const;
  // When all that ranks do before their gradients are known everywhere ends, from the step's first
  // forward on: by playing the schedule's actions, and by its closed form.
  Seconds end_of_ranks(const Schedule& schedule, bool in_parts, bool norm, Seconds follows_first);
  Seconds end_of_stages(const ScheduleForms& schedule, const PipelineShape& shape, Seconds ends_first,
                        const std::function<Seconds(const StageBound&)>& follows) const;
  static StagePath path_of(const CutFrame& frame, int stage, BlockRange range);
  Seconds agreement(const ParallelSpec& spec, const Placements& placements, const MeshView& view) const;

  const OpGraph& graph_;
  const Cluster& cluster_;
  TrainingSpec training_;
  std::shared_ptr<KnownBlockShapes> known_shapes_;
  NetworkCache networks_;
  std::vector<char> uses_tied_;  // by block
  std::vector<int> tied_blocks_;
  Bytes least_memory_;  // of a rank without blocks
  // Whether the stages of any cut hold equal state together: the blocks that tie a parameter are
  // never on one stage.
  bool has_fixed_state_ = true;
  // By block: the end of the run of equal blocks that contains it.
  std::vector<int> run_ends_;
  std::vector<bool> is_layer_kind_;
  std::vector<std::vector<int>> blocks_of_kind_;  // [kind][block]: blocks of the kind before it
  std::unordered_map<ParallelSpec, int, SpecHash> shapes_index_;  // by block_key
  std::vector<std::shared_ptr<const BlockShapes>> shapes_;
  std::vector<char> also_whole_;  // likewise: whether backwards in two parts also run whole
  std::vector<Environment> environments_;
  std::map<std::pair<int, int>, Costs> costs_;  // shapes, environment
  std::map<std::pair<int, int>, std::vector<SavedCopies>> copies_;  // likewise
  std::unordered_map<DeviceMesh, MeshView, MeshHash> views_;
  std::pair<const DeviceMesh, MeshView>* last_view_ = nullptr;  // that was asked for
  // Whose estimate is made, by its coordinate on the data axis: on its own devices, with its own
  // number of micro-batches. None where replicas are alike.
  std::optional<int> replica_;
  std::map<std::pair<DeviceMesh, int>, MeshView> replica_views_;
  Bytes overhead_of(const ParallelSpec& spec);  // memory_overhead, the last one kept
  struct KnownOverhead {
    DeviceMesh mesh;
    PerAxis<bool> rings;
    Bytes bytes;
  };
  std::optional<KnownOverhead> last_overhead_;
  // The buffers for activations that enter stages, by rank of a pipeline whose ranks hold several
  // stages: the last ones kept.
  const std::vector<int>& inputs_of_ranks(const ScheduleForms& schedule, const PipelineShape& shape, InputSlots inputs);
  struct Inputs {
    Schedule (*actions)(const PipelineShape& shape) = nullptr;
    InputSlots inputs{};
    std::array<int, 4> shape{};  // ranks, stages, micro-batches and groups of these
    std::vector<int> of_rank;
  };
  std::optional<Inputs> last_inputs_;
  struct DataCostsKey {
    ParallelSpec spec;  // its bucket_key
    const GroupNetwork* network = nullptr;
    int environment = 0;
    bool operator==(const DataCostsKey&) const = default;
  };
  struct DataCostsHash {
    std::size_t operator()(const DataCostsKey& key) const {
      std::size_t seed = SpecHash()(key.spec);
      add_hash(seed, std::hash<const GroupNetwork*>()(key.network));
      add_hash(seed, static_cast<std::size_t>(key.environment));
      return seed;
    }
  };
  std::unordered_map<DataCostsKey, DataCosts, DataCostsHash> data_costs_;
  // Buffers that estimates reuse.
  std::vector<BucketSizes> buckets_, frozen_;
  std::vector<SavedSizes> saved_, for_weights_, left_;
  std::vector<std::int64_t> sizes_, host_sizes_;  // of what a stage's blocks save, by home
  std::vector<SavedSizes> host_saved_;
  std::vector<std::pair<std::int64_t, std::int64_t>> sizes_for_weights_;
  std::vector<Visit> visits_;
  std::vector<int> rank_of_stage_;
  int first_back_ = 0;               // played_time
  std::vector<BlockRange> ranges_;   // by stage
  std::vector<HeldStage> held_;
  std::vector<StageBound> bounds_;   // by stage
  std::vector<StageReductions> reductions_;  // likewise, where they are known and actions are played
  std::vector<Seconds> on_nics_;             // likewise, of transfers: what their bytes take on NICs
  std::vector<RankBound> ranks_;
  std::vector<Seconds> before_;      // by stage: forwards and transfers of the stages before it
  std::vector<Seconds> forward_, backward_, transfer_, plain_forward_, plain_backward_, weights_;  // by stage
};

}  // namespace parplan
