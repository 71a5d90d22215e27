#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "planner/plan/schedule.h"
#include "planner/program/buckets.h"
#include "planner/program/lower.h"
#include "planner/program/program.h"
#include "planner/program/slots.h"

namespace parplan {

// The Program of one rank under construction, which the passes of lower.cpp share. Each pass is a
// function over it, in the file that its comment names.
struct Lowering {
  Lowering(const Job& job, int rank);

  const Job& job;
  const OpGraph& graph;
  Coordinates at;        // of the rank in the mesh
  BlockRange range;      // the blocks of its stage
  DataShards shards;
  Program program;

  // The Segments of each kind of block (Block::kind), made once.
  struct BlockSegments {
    int forward = 0;
    int backward = 0;
    std::int64_t saved_bytes = 0;
  };
  std::map<int, BlockSegments> kinds;
  std::int64_t crossing_bytes = 0;  // of an activation between stages, and of its gradient

  std::vector<StageBucket> stage_buckets;  // program.buckets before they get buffers

  // Numbers of buffers. The buffers of a list take turns.
  std::vector<int> gathered;    // ZeRO-3: parameters of a block; two
  std::vector<int> unreduced;   // ZeRO-2, 3: gradients of a block; two
  std::optional<int> gathered_tied, unreduced_tied;
  std::vector<std::vector<int>> saved;  // by slot, then block of the stage
  std::vector<int> gradient;    // of an activation between blocks
  std::vector<int> output;      // an activation on its way to the next stage; none on the last
  int scratch = 0;

  Slots slots;  // which buffers each action takes

  // Turns taken so far.
  int gathers = 0;
  int reductions = 0;
  // Transfers are many: all transfers of one kind and direction share one Segment.
  std::map<std::pair<InstructionKind, GroupKey>, int> transfers;

  bool is_first() const { return program.stage == 0; }
  bool is_last() const { return program.stage == job.spec.pp() - 1; }
  int next_call() const { return static_cast<int>(program.calls.size()); }
  const BlockSegments& segments_of(int block) const { return kinds.at(graph.blocks[block].kind); }
  Bucket& bucket_of(int block) { return program.buckets[block - range.first]; }
  // The bucket of the tied parameter that a block uses.
  std::optional<int> tied_bucket_of(int block) const;
};

// The passes, in the order in which `lower` calls them.
void set_groups(Lowering& lowering);                             // lower.cpp
void lower_blocks(Lowering& lowering);                           // lower.cpp
void make_buckets(Lowering& lowering);                           // make_buffers.cpp
void make_buffers(Lowering& lowering);                           // make_buffers.cpp
void begin_step(Lowering& lowering);                             // around_tasks.cpp
void run_actions(Lowering& lowering);                            // tasks.cpp
void end_step(Lowering& lowering);                               // around_tasks.cpp
void plan_memory(Program& program, Bytes overhead);              // memory.cpp
void count_communication(Program& program);                      // lower.cpp

// Calls ---------------------------------------------------------------------------- lowering.cpp

int add_segment(Program& program, Segment segment);  // equal Segments are kept once
int add_buffer(Program& program, std::string name, MemoryCategory category, std::int64_t bytes,
               bool persistent = false);

// A call of a block's Segment. `bound` names the buffer of every binding; those that the Segment
// does not bind are left out.
using Bound = std::pair<const char*, std::optional<int>>;
Call& add_call(Lowering& lowering, int segment, std::initializer_list<Bound> bound, int micro_batch,
               std::vector<int> frees);

// A byte range of a buffer.
struct Piece {
  int buffer = 0;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  Access access = Access::update;
};
// A call of a Segment that binds exactly the buffers of its pieces: `pieces` of each instruction.
Call& call_on_pieces(Lowering& lowering, std::string name, Stream stream, std::vector<Instruction> instructions,
                     const std::vector<std::vector<Piece>>& pieces, std::vector<int> frees = {});
// The same collective on every piece, on the stream of its axis.
void collective(Lowering& lowering, std::string name, InstructionKind kind, GroupKey group,
                const std::vector<Piece>& pieces);
Instruction communication(InstructionKind kind, GroupKey group, Stream stream, DataType type = DataType::fp32);

}  // namespace parplan
