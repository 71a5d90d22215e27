#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <boost/container/small_vector.hpp>

#include "planner/base/enum_index.h"
#include "planner/base/units.h"
#include "planner/cluster/mesh.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/memory_home.h"
#include "planner/plan/schedule.h"
#include "planner/plan/step_result.h"

namespace parplan {

// In-order queues of a device: one for computation, one for the collectives of each axis but the
// pipeline's, one for each direction of transfers between stages (and as many for those on the way
// back of a V), one for each direction of copies between the device and the host, and between the
// host and its NVMe drives, one for what the host's processor computes, and one for each direction
// of transfers around the rings of the context and the tensor axis. Only events order work on
// different streams.
enum class Stream {
  compute,
  tp,
  dp,
  send_next,
  receive_previous,
  send_previous,
  receive_next,
  cp,
  ep,
  to_host,
  from_host,
  host,
  ring_send,
  ring_receive,
  send_next_on_return,
  receive_previous_on_return,
  send_previous_on_return,
  receive_next_on_return,
  to_nvme,
  from_nvme,
  count_
};
inline constexpr std::size_t stream_count = count_of<Stream>;
const char* name(Stream stream);
// The streams of transfers with the next rank and the previous one.
struct NeighbourStreams {
  Stream send_next{}, receive_next{};
  Stream send_previous{}, receive_previous{};
};
// The streams of an axis's communication: its collectives, and its transfers.
struct AxisStreams {
  Stream collectives{};
  NeighbourStreams transfers = {collectives, collectives, collectives, collectives};
  NeighbourStreams on_return = transfers;
};
// The collectives of the pipeline axis share the stream of its sends. A ring that sends and
// receives at once needs a stream for each; those of the context and the tensor axis share theirs,
// since a block does not turn both at once. On the way back of a V, activations go where gradients
// of the way down go, in another order than these: they have streams of their own. The transfers of
// every other axis share the stream of its collectives, on which one waits for the other.
constexpr AxisStreams streams_of(Axis axis) {
  constexpr NeighbourStreams ring{.send_next = Stream::ring_send,
                                  .receive_next = Stream::ring_receive,
                                  .send_previous = Stream::ring_send,
                                  .receive_previous = Stream::ring_receive};
  constexpr PerAxis<AxisStreams> streams{
      .pp = {.collectives = Stream::send_next,
             .transfers = {.send_next = Stream::send_next,
                           .receive_next = Stream::receive_next,
                           .send_previous = Stream::send_previous,
                           .receive_previous = Stream::receive_previous},
             .on_return = {.send_next = Stream::send_next_on_return,
                           .receive_next = Stream::receive_next_on_return,
                           .send_previous = Stream::send_previous_on_return,
                           .receive_previous = Stream::receive_previous_on_return}},
      .dp = {.collectives = Stream::dp},
      .cp = {.collectives = Stream::cp, .transfers = ring},
      .ep = {.collectives = Stream::ep},
      .tp = {.collectives = Stream::tp, .transfers = ring}};
  return streams[axis];
}

// The ranks along an axis that a group holds: all of them; the holders of a tied parameter (with
// the first and the last stage); the one rank after this one, or before it, around the ring; those
// of the next and the previous stage on the way back of a V, the one before this one and the one
// after it; of the data axis with hybrid sharding, the ranks that share out a bucket, or those that
// hold the same shard of it; of the context axis with hierarchical context parallelism, the
// consecutive ranks that exchange tokens for heads, or those, one of each such group, that then
// hold the same heads and meet one another's keys: the ring's, where these go around one; of the
// tensor axis with more ranks than key/value heads, the consecutive ranks that hold copies of the
// same ones. `stage`: all ranks of a stage, whichever axis it is named with.
enum class Members : std::uint8_t {
  all,
  tied,
  next,
  previous,
  next_on_return,
  previous_on_return,
  shard,
  replicas,
  heads,
  keys,
  copies,
  stage
};

// The group that an instruction communicates with, named alike on every rank.
struct GroupKey {
  Axis axis{};
  Members members = Members::all;
  int size = 0;  // of `copies`: the ranks in a group
  auto operator<=>(const GroupKey&) const = default;
};
constexpr GroupKey all_along(Axis axis) { return {axis, Members::all}; }
// One rank: sends go to it, receives come from it.
constexpr bool is_on_return(GroupKey group) {
  return group.members == Members::next_on_return || group.members == Members::previous_on_return;
}
constexpr bool is_neighbour(GroupKey group) {
  return group.members == Members::next || group.members == Members::previous || is_on_return(group);
}
// Whether the neighbour is the rank after this one, around the ring.
constexpr bool is_after(GroupKey neighbour) {
  return neighbour.members == Members::next || neighbour.members == Members::previous_on_return;
}
// What a neighbour calls this rank: the next rank receives from its previous one.
constexpr GroupKey seen_from(GroupKey neighbour) {
  switch (neighbour.members) {
    case Members::next: return {neighbour.axis, Members::previous};
    case Members::next_on_return: return {neighbour.axis, Members::previous_on_return};
    case Members::previous_on_return: return {neighbour.axis, Members::next_on_return};
    default: return {neighbour.axis, Members::next};
  }
}
inline constexpr GroupKey tied_stages{Axis::pp, Members::tied};
inline constexpr GroupKey shard_replicas{Axis::dp, Members::replicas};
// All ranks of a stage, along every axis but the pipeline's. What they send counts as the first's
// of these axes that has several ranks (the data axis's where none has).
constexpr GroupKey ranks_of_stage(const DeviceMesh& mesh) {
  for (const Axis axis : all_axes)
    if (axis != Axis::pp && mesh.degree[axis] > 1) return {axis, Members::stage};
  return {Axis::dp, Members::stage};
}
// The group over which ZeRO shards: with hybrid sharding, a part of the data axis's.
constexpr GroupKey shard_group(const DeviceMesh& mesh) {
  return {Axis::dp, mesh.dp_shard > 0 ? Members::shard : Members::all};
}
// The ranks among which a rank exchanges tokens for heads, and those whose keys it meets: with
// hierarchical context parallelism, parts of the context axis's.
inline constexpr GroupKey exchange_group{Axis::cp, Members::heads};
constexpr GroupKey keys_group(int cp_ulysses) {
  return {Axis::cp, cp_ulysses > 1 ? Members::keys : Members::all};
}
inline constexpr GroupKey next_keys{Axis::cp, Members::next};
inline constexpr GroupKey previous_keys{Axis::cp, Members::previous};
constexpr GroupKey holders_of_copies(int ranks) {
  return {Axis::tp, Members::copies, ranks};
}
inline constexpr GroupKey next_stage{Axis::pp, Members::next};
inline constexpr GroupKey previous_stage{Axis::pp, Members::previous};
inline constexpr GroupKey next_stage_on_return{Axis::pp, Members::next_on_return};
inline constexpr GroupKey previous_stage_on_return{Axis::pp, Members::previous_on_return};
std::string name(GroupKey group);  // "tensor", "data", "pipeline"; "tied", "next", "next on return", "data shard"

// A group that contains the rank, or the one rank that is its neighbour.
struct Group {
  GroupKey key;
  std::vector<int> ranks;  // ascending along the axis
  bool operator==(const Group&) const = default;
};

enum class InstructionKind {
  kernel,
  all_reduce_sum,
  all_reduce_max,
  all_gather,
  reduce_scatter,
  all_to_all,
  send,
  receive,
  broadcast,
  reduce_sum,
  gather,
  scatter,
  copy  // between the homes of a rank
};
const char* name(InstructionKind kind);
// Whether it meets other ranks.
constexpr bool communicates(InstructionKind kind) {
  return kind != InstructionKind::kernel && kind != InstructionKind::copy;
}
// The stream of communication with a group.
constexpr Stream stream_of(InstructionKind kind, GroupKey group) {
  const AxisStreams streams = streams_of(group.axis);
  const NeighbourStreams& transfers = is_on_return(group) ? streams.on_return : streams.transfers;
  const bool with_next = group.members == Members::next || group.members == Members::next_on_return;
  if (kind == InstructionKind::send) return with_next ? transfers.send_next : transfers.send_previous;
  if (kind == InstructionKind::receive) return with_next ? transfers.receive_next : transfers.receive_previous;
  return streams.collectives;
}

// A byte range of a buffer that the call binds.
struct Operand {
  int binding = 0;  // index into Call::buffers
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  Access access{};
  bool operator==(const Operand&) const = default;
};

// Lists of instructions and calls. Those are many, and almost all of these are short: a longer one
// takes memory of its own.
using Operands = boost::container::small_vector<Operand, 4>;
using EventIds = boost::container::small_vector<int, 2>;
using BufferIds = boost::container::small_vector<int, 8>;

// One unit of work on one stream. Its operands are, by its kind:
//   kernel           operands in the order of the op's row
//   all_reduce_*     {buffer (update)}
//   all_gather       {shard (read), whole (write)}
//   reduce_scatter   {whole (update)}: afterwards this rank's chunk holds the sum, the rest is
//                    undefined
//   all_to_all       {from (read), to (write)}, apart and of equal size, a multiple of the members:
//                    chunk i of `from` goes to member i, chunk i of `to` comes from member i
//   send, receive    {buffer}
//   broadcast        {buffer}: read by the group's first rank, written by the others
//   reduce_sum       {buffer}: of the first rank (update) afterwards the sum of all (read)
//   gather           {own (read), whole (write)}, or {own} but on the first rank, which puts one
//                    rank's after another's
//   scatter          {own (write), whole (read)}, or {own} but on the first rank: the reverse
//   copy             {from (read), to (write)}, of equal size, in the homes that its stream names
//                    (homes_of_copies): between device and host, or between host and file
// Chunk i of n elements over r ranks is [n*i/r, n*(i+1)/r).
struct Instruction {
  InstructionKind kind{};
  OpKind op{};
  OpShape shape;
  DataType type = DataType::fp32;  // elements of the operands (kernels: compute precision)
  GroupKey group;
  Stream stream{};
  Home home{};  // kernels: whose processor runs it; the host's touches buffers on the host alone
  Label label{};
  Operands operands;
  EventIds waits;  // events of this segment
  std::optional<int> records;
  std::string name;  // the forward op's name within its block, for reports
  // What the host takes to submit it beyond Engine::host_per_op: before a collective, and beside a
  // kernel that it submits in pieces. The runtime does not know of it.
  Seconds submission{};
  bool operator==(const Instruction&) const = default;
};

// The homes that the copies on a stream go between; nothing for streams that have none.
struct CopyHomes {
  Home from{}, to{};
};
constexpr std::optional<CopyHomes> homes_of_copies(Stream stream) {
  switch (stream) {
    case Stream::to_host:
      return CopyHomes{Home::device, Home::host};
    case Stream::from_host:
      return CopyHomes{Home::host, Home::device};
    case Stream::to_nvme:
      return CopyHomes{Home::host, Home::nvme};
    case Stream::from_nvme:
      return CopyHomes{Home::nvme, Home::host};
    default:
      return std::nullopt;
  }
}
// Whether its copies read or write a file, which goes on beside all other work, also of CPU ranks.
constexpr bool is_of_file(Stream stream) {
  return stream == Stream::to_nvme || stream == Stream::from_nvme;
}
// Bytes by the homes that they are copied from, then to.
using CopiedBytes = PerHome<PerHome<Bytes>>;
inline Bytes& copied_on(CopiedBytes& copied, Stream stream) {
  const CopyHomes homes = homes_of_copies(stream).value();
  return copied[homes.from][homes.to];
}

// A straight-line piece of work, repeated for every layer and micro-batch of its kind. Its side
// streams (those of instructions that are not on `stream`) fork from `stream` where the call starts
// and join it at the call's end.
struct Segment {
  std::string name;  // "layers.forward"
  Stream stream{};
  std::vector<std::string> bindings;  // names of what a call binds
  std::vector<Instruction> instructions;
  int events = 0;
  std::int64_t scratch_bytes = 0;  // the size that it needs of the binding "scratch"
  bool operator==(const Segment&) const = default;
};

// A named piece of the arena in its home.
struct Buffer {
  std::string name;
  MemoryCategory category{};
  std::int64_t bytes = 0;
  std::int64_t offset = 0;
  bool persistent = false;  // keeps its value between steps
  Home home{};
  bool counted = true;  // in the Program's memory (RankBuffer::counted)
  bool kept = false;    // RankBuffer::kept
  bool operator==(const Buffer&) const = default;
};

// One run of a Segment on bound buffers.
struct Call {
  int segment = 0;
  BufferIds buffers;
  std::optional<int> micro_batch;  // the data loader's; nothing outside of actions
  EventIds waits;                  // events of the Program
  std::optional<int> records;
  BufferIds frees;  // whose content is undefined afterwards
  bool operator==(const Call&) const = default;
};

// A span of calls that carries out one action of the schedule. The first and the last task of a
// step have none: they hold the clearing of accumulators, and the remaining gradient reductions and
// the optimizer.
struct Task {
  std::optional<Action> action;
  int first_call = 0;
  int last_call = 0;  // one past the last
  bool operator==(const Task&) const = default;
};

// The place of a parameter, or of this rank's part of it, or of a rectangle of that part.
struct ParameterPart {
  TensorId tensor = 0;
  // Local shape: rows x columns (vectors: 1 column) taken from the logical tensor at
  // [row_begin, ...) x [column_begin, ...); rows at or past the logical end are padding.
  std::int64_t rows = 0, columns = 0;
  std::int64_t row_begin = 0, column_begin = 0;
  std::int64_t bucket_offset = 0;  // elements from the start of the bucket
  int bucket = 0;
  // So many consecutive ranks of the tensor axis hold the same rows (TensorDim::shared), each with
  // the gradients of its own share of what they are applied to.
  int copies = 1;
  bool operator==(const ParameterPart&) const = default;
};

// Elements [begin, end) of a bucket, or of a shard.
struct BucketRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
  bool operator==(const BucketRange&) const = default;
};

// Elements of a bucket that a buffer holds side by side, from its element `at` on.
struct HeldRange {
  BucketRange range;
  std::int64_t at = 0;
  bool operator==(const HeldRange&) const = default;
};

// What one collective gathers of a bucket, and reduces: all of it, or a parameter with the padding
// behind it (GatherUnit). Each rank has an equal part.
struct BucketUnit {
  BucketRange range;
  HeldRange own;  // of this rank, and where its shard has it; none where a master has all
  bool operator==(const BucketUnit&) const = default;
};

// Parameters that are updated together: one bucket per block, one per tied parameter, and one for
// what is frozen of a block.
struct Bucket {
  std::string name;
  std::int64_t elements = 0;        // unsharded, padded to a multiple of the data-parallel degree
  // Side by side, from 0 to `elements`. Where something of the bucket is whole on each rank, one.
  std::vector<BucketUnit> units;
  std::int64_t shard_elements = 0;  // of all units: this rank's elements of the optimizer state
  // Each is the whole bucket, or this rank's shard.
  int parameters = 0;  // a shard under ZeRO-3
  std::optional<int> gradients = {};  // a shard under ZeRO-2 and 3; none where the parameters are frozen
  // Of a tied parameter's second use on this rank, where each use has an accumulator.
  std::optional<int> second_gradients = {};
  std::optional<int> first_moment = {}, second_moment = {}, master = {};  // shard_elements each, fp32
  // The bucket begins with so many elements that have no second moment: the second moments of this
  // rank's shard, or room for them, begin with the first element behind these.
  std::int64_t without_second = 0;
  // Where moments are quantized: the scales of their blocks in fp32. Moments are codes of a byte
  // each.
  std::optional<int> first_scales = {}, second_scales = {};
  // Where the host updates the shard: its copy of gradients that are on the device, and what it
  // copies to parameters in half precision that are on the device (others: the master).
  std::optional<int> host_gradients = {}, host_parameters = {};
  bool operator==(const Bucket&) const = default;
};

std::vector<int> buffers_of(const Bucket& bucket);
// What a buffer of the bucket holds: the whole of it, or this rank's shard.
std::vector<HeldRange> held_ranges(const Bucket& bucket, bool is_whole);
// Where elements of this rank's shard begin in buffers that hold the whole of a bucket of one unit.
std::int64_t begin_in_whole(const Bucket& bucket);
// Whether a master updates what this rank trains, and has the only state of it.
inline bool is_updated_elsewhere(const Bucket& bucket) {
  return bucket.gradients && bucket.elements > 0 && bucket.shard_elements == 0;
}

// Everything that one rank does in one training step. The runtime executes it, and the simulator
// predicts its time.
struct Program {
  int rank = 0;
  int pipeline_rank = 0;  // its coordinate on the pipeline axis; actions say which stage they run
  int replica = 0;        // its coordinate on the data axis
  std::vector<Group> groups;
  std::vector<Segment> segments;
  std::vector<Buffer> buffers;
  std::vector<Call> calls;
  std::vector<Task> tasks;
  int events = 0;
  std::vector<Bucket> buckets;
  std::vector<ParameterPart> parameters;
  // fp32: the loss summed over the tokens of the global batch; with the last stage.
  std::optional<int> loss_buffer;
  std::optional<int> norm_buffer;        // fp32: global sum of squared gradients; with clipping
  std::optional<int> loss_scale_buffer;  // LossScale: fp16 only
  // Copies of these two for updates by the host's processor.
  std::optional<int> host_norm_buffer, host_loss_scale_buffer;
  PerHome<std::int64_t> arena_bytes;     // sizes to allocate: the ends of the last buffers
  MemoryUse memory;
  CommunicationVolume communication;
  CopiedBytes copied;  // in a step

  // Empty where this rank has no such group.
  const std::vector<int>& group(GroupKey key) const;
  void set_group(GroupKey key, std::vector<int> ranks);  // added, or replaced
};

// Where the last byte of an arena ends that a step writes, or that keeps its value between steps.
std::int64_t end_of_use(const Program& program, Home home);

// The positions of a kernel's operands in the op's row, without those that its shape omits; nothing
// where the number of operands is wrong.
std::optional<std::vector<int>> operand_positions(const Instruction& instruction);

// Whether the group's first rank has a part of its own in it.
constexpr bool has_root(InstructionKind kind) {
  return kind == InstructionKind::broadcast || kind == InstructionKind::reduce_sum ||
         kind == InstructionKind::gather || kind == InstructionKind::scatter;
}

// Bytes that one rank of a group of `ranks` sends for an instruction over `bytes` bytes of `type`.
std::int64_t sent_bytes(InstructionKind kind, std::int64_t bytes, std::int64_t element_size, int ranks, int index);
// What the rank sends in a call of each Segment.
std::vector<CommunicationVolume> sent_by_segment(const Program& program);
// The first element of chunk `index`.
constexpr std::int64_t chunk_begin(std::int64_t elements, int ranks, int index) { return elements * index / ranks; }

// For people and tests: one line per instruction, buffers with offsets.
std::string write_program(const Program& program);

}  // namespace parplan
