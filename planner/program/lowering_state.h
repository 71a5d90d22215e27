#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/plan/schedule.h"
#include "planner/program/activation_slots.h"
#include "planner/program/known_blocks.h"
#include "planner/program/lower.h"
#include "planner/program/lower_block.h"
#include "planner/program/program.h"
#include "planner/program/rank_buckets.h"

namespace parplan {

// What a call on pieces of buffers does, where it is done often: its name, and the sizes and places
// of its pieces.
using PiecesKey = std::tuple<std::string_view, std::int64_t, std::int64_t, std::int64_t>;

// What all ranks of a job have in common, found once for them. The job must outlive it; used by one
// thread. `blocks`: shared with other jobs of the model; null: lowered for this one alone.
class JobLowering {
 public:
  explicit JobLowering(const Job& job, KnownBlocks* blocks = nullptr);

  const Job& job;
  std::vector<int> tied_blocks;  // of the whole graph: they use a tied parameter
  // By stage: whether it runs backwards in two parts.
  std::vector<char> splits_backward;

  // A block, lowered once for all ranks and blocks for which that is the same.
  const LoweredBlock& lowered(int block, const BlockContext& context);
  // What the pipeline of a replica does, at this coordinate of the data axis.
  const Schedule& schedule_of(int replica);

 private:
  struct Known {
    int kind = 0;  // Block::kind
    BlockContext context;
    std::shared_ptr<const LoweredBlock> lowered;
  };
  KnownBlocks* blocks_;
  std::vector<Known> known_;
  std::map<std::int64_t, Schedule> schedules_;  // by micro-batches, where replicas have unlike numbers
};

// The Program of one rank under construction, which the passes of lower.cpp share. Each pass is a
// function over it, in the file that its comment names.
struct Lowering {
  Lowering(JobLowering& shared, int rank);

  JobLowering& shared;
  const Job& job;
  const OpGraph& graph;
  Coordinates at;                // of the rank in the mesh
  const Schedule& schedule;      // of its replica
  const std::vector<int>& tied_blocks;
  std::vector<int> stages;       // that the rank holds, ascending
  // By block of the graph: whether its input arrives, or is handed over by the stage before, in a
  // buffer of its own.
  std::vector<char> input_apart;
  std::vector<char> splits_backward;  // by stage
  Program program;

  // The Segments of blocks of one kind (Block::kind) and layout (by number), after a block of one
  // layout, with their input apart or not, on a stage that splits backwards or not: made once.
  struct BlockSegments {
    int forward = 0;
    std::optional<int> backward;
    // The parts of a backward on a stage that runs it so; blocks that are not divided have no
    // second one.
    std::optional<int> backward_inputs, backward_weights;
    std::int64_t saved_bytes = 0;
    std::int64_t for_weights_bytes = 0, left_bytes = 0;
    std::int64_t input_bytes = 0;   // of the activation that enters, and of its gradient
    std::int64_t output_bytes = 0;  // of the one that leaves
    std::int64_t gradient_bytes = 0;  // LoweredBlock
    // Copies where a block keeps what it saves on the host or in a file: there, and back; by way of
    // the host, in two steps (offload_saved.cpp).
    struct Copies {
      std::optional<int> out, back;
      std::optional<int> write, read;
    };
    Copies saved = {}, for_weights = {};
    Copies for_first_part = {};  // back: of what is kept for weights, what the first part reads
  };
  static std::int64_t bytes_for_weights(const BlockSegments& block) {
    return block.for_weights_bytes + block.left_bytes;
  }
  using SegmentsKey = std::tuple<int, int, int, bool, bool>;
  std::map<SegmentsKey, BlockSegments> block_segments;
  std::vector<const BlockSegments*> segments_at;  // by block of the graph, for those that the rank holds

  std::vector<int> bucket_at;  // by block of the graph, for those that the rank holds: of its own bucket
  std::vector<RankBucket> rank_buckets;  // program.buckets before they get buffers
  std::vector<int> like_units;           // by bucket: the first one with equal units
  std::vector<std::optional<int>> tied_buckets;    // by block of the graph
  std::vector<std::optional<int>> frozen_buckets;  // likewise: of its own frozen parameters

  // Numbers of buffers. The buffers of a list take turns.
  std::vector<int> gathered;  // ZeRO-3, or parameters elsewhere: of a block; as many as gathered_buffers
  std::vector<int> gathered_frozen;
  std::vector<int> unreduced;   // ZeRO-2, 3: gradients of a block; two
  std::optional<int> gathered_tied;
  // ZeRO-2, 3: the gradients of a tied parameter, by its bucket.
  struct UnreducedTied {
    int buffer = 0;
    bool holds_gradients = false;  // of uses since the last reduction
  };
  std::map<int, UnreducedTied> unreduced_tied;
  std::vector<int> staged_state;       // on the host, for what is updated on NVMe
  std::vector<int> staged_parameters;  // on the host, for parameters on NVMe
  std::vector<int> staged_gradients;  // sums that are elsewhere, while a backward adds to them
  std::vector<int> staged_sums;       // on the host, for such sums on NVMe
  // By bucket: whether an earlier backward of the step has left such a sum there.
  std::vector<char> has_sum;
  // By slot, then position; blocks that keep what they save on the host come behind the others.
  std::vector<std::vector<int>> saved, for_weights;
  std::vector<std::vector<int>> left;  // by slot, then `position_for_weights`
  // By block of the graph, for those that the rank holds: the positions.
  std::vector<int> position_in_slot, position_for_weights;
  std::vector<int> head;  // what the last block saves, where it has slots of its own
  // On the device, for blocks that keep what they save elsewhere; on the host, for files.
  std::vector<int> staged, staged_for_weights;
  // By block of the graph: the layer whose place on the device it fills before that one does, where
  // it saves elsewhere and needs none of `staged`.
  std::vector<std::optional<int>> in_place_of;
  std::vector<int> staged_on_host;
  std::vector<int> input;       // of a stage, from another rank, where it lies apart
  std::vector<int> gradient;    // of an activation between blocks
  std::vector<int> output;      // an activation on its way to another rank
  int scratch = 0;

  Slots slots;  // which buffers each action takes

  // Turns taken so far.
  int gathers = 0;
  int frozen_gathers = 0;
  int reductions = 0;
  int stagings = 0, stagings_for_weights = 0, gradient_stagings = 0, state_stagings = 0;
  int parameter_stagings = 0, stagings_on_host = 0, sum_stagings = 0;
  // By bucket that is updated on NVMe: the buffer on the host that has been read for it.
  std::map<std::size_t, int> state_in;
  // By bucket whose sum of gradients is there: likewise.
  std::map<std::size_t, int> sum_in;
  // Reads from NVMe that `read_ahead` moves, each before another call.
  struct EarlyRead {
    int call = 0;
    int before = 0;
  };
  std::vector<EarlyRead> early_reads;
  // By buffer in a file or on the host for one: the last call that it takes part in.
  std::map<int, int> last_use;
  // Calls are many, and few differ in more than their buffers. Where the bindings of a Segment
  // stand in what `add_call` is given, by Segment; the Segments of `call_again`, by what they move.
  std::vector<std::vector<std::size_t>> bound_at;
  std::map<PiecesKey, int> known_pieces;

  int next_call() const { return static_cast<int>(program.calls.size()); }
  int rank_of_stage(int stage) const { return schedule.rank_of_stage[stage]; }
  BlockRange blocks_of(int stage) const { return job.layout.stages[stage]; }
  SegmentsKey segments_key(int block) const;
  const BlockSegments& segments_of(int block) const { return *segments_at[block]; }
  // The number of its own bucket in program.buckets.
  int bucket_index(int block) const { return bucket_at[block]; }
  const Bucket& bucket_of(int block) const { return program.buckets[bucket_index(block)]; }
  // Whether another rank of the data axis updates this one's parameters.
  bool is_replica() const { return job.layout.has_master() && at.dp > 0; }
  DataShards shards_of(int block) const { return rank_buckets[bucket_index(block)].shards; }
  bool has_own_slots(int block) const { return slots.head > 0 && block + 1 == static_cast<int>(graph.blocks.size()); }
  // Where a block keeps what its forward saves for its backward.
  Home home_of_saved(int block) const;
  // The bucket of the tied parameter that a block uses.
  std::optional<int> tied_bucket_of(int block) const { return tied_buckets[block]; }
};

// The passes, in the order in which `lower` calls them.
void set_groups(Lowering& lowering);                             // lower.cpp
void set_neighbours(Lowering& lowering);
void lower_blocks(Lowering& lowering);                           // lower.cpp
void make_buckets(Lowering& lowering);                           // make_buffers.cpp
void make_buffers(Lowering& lowering);                           // make_buffers.cpp
void begin_step(Lowering& lowering);                             // step_begin_and_end.cpp
void run_actions(Lowering& lowering);                            // run_actions.cpp
// Of the data axis, under engines that do not overlap them with the backward.
void reduce_at_end(Lowering& lowering);                          // run_actions.cpp
void end_step(Lowering& lowering);                               // step_begin_and_end.cpp
// With a master: before a forward, it sends its parameters to the replicas; replicas clear their
// gradients before each backward but the first; after it, the master adds them to its own.
void hand_out_parameters(Lowering& lowering);                    // master.cpp
void clear_sent_gradients(Lowering& lowering, int micro_batch);  // master.cpp
void collect_gradients(Lowering& lowering);                      // master.cpp
// Where the host updates the bucket's shard: copies the gradients that are ready once the data axis
// has summed them, the others after every reduction, and the updated parameters.
void copy_ready_gradients(Lowering& lowering, int bucket);       // offload.cpp
void copy_other_gradients(Lowering& lowering, int bucket);       // offload.cpp
void copy_norm(Lowering& lowering);                              // offload.cpp: and the loss scale
// Whether the rank's host has all gradients and sums their squares: where their sums are there, or
// in a file.
bool sums_squares_on_host(const Lowering& lowering);             // offload.cpp
// The sum that starts there, from zero; and back, to be summed over the ranks.
void begin_norm_on_host(Lowering& lowering);                     // offload.cpp
void return_norm(Lowering& lowering);                            // offload.cpp
void copy_updated_parameters(Lowering& lowering, int bucket);    // offload.cpp
// Where an update's state or parameters are on NVMe (offload_state.cpp): reads for the first
// buckets, which may be early; and once a bucket is updated, the write of both, and the read for a
// later one.
void begin_reads_of_state(Lowering& lowering);
void write_state(Lowering& lowering, std::size_t bucket);
// Where sums of a bucket's gradients are on the host or on NVMe (offload_gradients.cpp): a buffer
// on the device with what earlier backwards of the step have left, or zeros, for a backward to add
// to; and its copy out, after the last one of this rank's shard alone.
bool stages_gradients(const Lowering& lowering, int bucket);
int fetch_sum(Lowering& lowering, int bucket);
void copy_sum_out(Lowering& lowering, int bucket, int from, bool last_micro_batch);
// Where they are on NVMe: a read for the host of these elements of this rank's shard, into the same
// place of a buffer (`sum_in`); and, after the host's call on them, that it was the last.
bool is_sum_in_file(const Lowering& lowering, int bucket);
void read_sum(Lowering& lowering, int bucket, const std::vector<BucketRange>& ranges);
void done_with_sum(Lowering& lowering, int bucket);
// What the ranks of other axes than the data axis add to gradients that it has summed, in that
// buffer, or in the bucket's own at the end of the step. In step_begin_and_end.cpp.
void reduce_over_other_axes(Lowering& lowering, int bucket, int gradients);
// Reads as early as their buffers allow what the device needs from NVMe (offload_files.cpp).
void read_ahead(Lowering& lowering);
// Notes a read that was just added: what it reads is in the file, and its buffer on the host free,
// once the last calls on these are done. And that a call is the last on a buffer so far.
void may_be_early(Lowering& lowering, int file, int on_host);
void may_follow_early(Lowering& lowering);  // it comes behind all others so far
void note_use(Lowering& lowering, int buffer);
// Where parameters are elsewhere: the copy of this rank's shard into the place of the whole.
void bring_parameters(Lowering& lowering, int bucket, int whole);  // offload.cpp
// Where a block's calls find what its forward has saved: the buffers of a slot, or, where that is
// elsewhere, others on the device that take turns.
struct SavedBuffers {
  int saved = 0;
  std::optional<int> for_weights;
};
// For a forward, after which what a block keeps elsewhere is copied there; and for a backward or a
// part of it, copied back. Other blocks find it in their slot. In offload_saved.cpp.
SavedBuffers saved_for_forward(Lowering& lowering, int block, const ActionSlots& slots);
void copy_saved_out(Lowering& lowering, int block, const ActionSlots& slots, const SavedBuffers& from);
SavedBuffers fetch_saved(Lowering& lowering, int block, const ActionSlots& slots, Phase phase);
// The Segments of these copies, for a block that keeps what it saves in `home`.
void add_saved_copies(Lowering& lowering, const LoweredBlock& block, Home home, Lowering::BlockSegments& segments);
// Muon's part of the end of the step (orthogonalize.cpp): the momentum of a bucket's matrices, in
// the place of their gradients; and their update along the directions that follow from it. Where
// the data axis shards the optimizer, momenta are gathered, one rank orthogonalizes all matrices of
// a block, a reduce-scatter gives the others their shards of the directions, and the update comes
// last. The scratch that this needs.
void update_momentum(Lowering& lowering, std::size_t bucket);
void orthogonalize_matrices(Lowering& lowering, std::size_t bucket);
void move_matrices(Lowering& lowering, std::size_t bucket);
std::int64_t orthogonalization_scratch(const Lowering& lowering, const RankBucket& bucket);
void plan_memory(Program& program, const TrainingSpec& training, Bytes overhead);  // memory.cpp
void count_communication(Program& program);                      // lower.cpp

// Calls ---------------------------------------------------------------------- lowering_state.cpp

int add_segment(Program& program, Segment segment);  // equal Segments are kept once
int add_buffer(Program& program, std::string name, MemoryCategory category, std::int64_t bytes,
               bool persistent = false);

// A call of a block's Segment. `bound` names the buffer of every binding; those that the Segment
// does not bind are left out.
using Bound = std::pair<const char*, std::optional<int>>;
Call& add_call(Lowering& lowering, int segment, std::initializer_list<Bound> bound, int micro_batch,
               BufferIds frees);

// A byte range of a buffer.
struct Piece {
  int buffer = 0;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  Access access = Access::update;
};
// A call of a Segment that binds exactly the buffers of its pieces: `pieces` of each instruction.
Call& call_on_pieces(Lowering& lowering, std::string name, Stream stream, std::vector<Instruction> instructions,
                     const std::vector<std::vector<Piece>>& pieces, BufferIds frees = {});
// The same for calls of which there are many, on apart buffers in the order of their pieces: `make`
// calls call_on_pieces, for the first of each key.
template <class Make>
Call& call_again(Lowering& lowering, const PiecesKey& key, std::initializer_list<int> buffers, BufferIds frees,
                 Make make) {
  const auto [known, is_first] = lowering.known_pieces.try_emplace(key, 0);
  if (is_first) {
    Call& call = make();
    known->second = call.segment;
    call.frees = std::move(frees);
    return call;
  }
  Call& call = lowering.program.calls.emplace_back();
  call.segment = known->second;
  call.buffers = buffers;
  call.frees = std::move(frees);
  return call;
}
// Elements [begin, end) of this rank's shard of a bucket, which it updates: all of them, and where
// they lie in buffers that hold the whole bucket or the shard.
BucketRange shard_of(const Bucket& bucket);
Piece gradient_piece(const Lowering& lowering, std::size_t bucket, int buffer, BucketRange range, Access access);
Piece parameter_piece(const Lowering& lowering, std::size_t bucket, BucketRange range, Access access);
Piece in_shard(int buffer, BucketRange range, std::int64_t element, Access access);
// Where an update finds a bucket's state and parameters for these elements: in their own buffers,
// or in the buffer on the host that was read for it from NVMe. In offload_state.cpp.
struct StatePieces {
  std::optional<Piece> first_moment, second_moment, master;
  std::optional<Piece> parameters;                   // only where they are on NVMe
  std::optional<Piece> first_scales, second_scales;  // of moments in 8 bits
};
StatePieces state_pieces(const Lowering& lowering, std::size_t bucket, BucketRange range);
// The same collective on every piece, on the stream of its axis.
void collective(Lowering& lowering, std::string name, InstructionKind kind, GroupKey group,
                const std::vector<Piece>& pieces, DataType type = DataType::fp32);
// The group by which a stage's rank exchanges with the rank of a neighbouring stage: stages go
// around the ring of ranks, or down the ranks and back.
GroupKey towards(const Schedule& schedule, int stage, int neighbour);
Instruction communication(InstructionKind kind, GroupKey group, Stream stream, DataType type = DataType::fp32);

}  // namespace parplan
