#include "planner/program/lowering_state.h"

#include <algorithm>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/program/bucket_work.h"
#include "planner/program/events.h"

namespace parplan {

namespace {

std::vector<int> find_tied_blocks(const OpGraph& graph) {
  std::vector<int> tied;
  const auto is_tied = [&](TensorId id) { return std::ranges::find(graph.tied, id) != graph.tied.end(); };
  for (std::size_t b = 0; b < graph.blocks.size() && !graph.tied.empty(); ++b)
    for (int i = graph.blocks[b].first_op; i < graph.blocks[b].last_op; ++i)
      if (std::ranges::any_of(graph.ops[i].parameters, is_tied)) {
        tied.push_back(static_cast<int>(b));
        break;
      }
  return tied;
}

// What the passes rely on.
void check(const Job& job, const std::vector<int>& tied_blocks, const std::vector<char>& splits) {
  const Layout& layout = job.layout;
  PARPLAN_ASSERT(static_cast<int>(layout.stages.size()) == job.schedule.stages() &&
                     static_cast<int>(job.schedule.ranks.size()) == layout.mesh.degree_of(Axis::pp),
                 fmt::format("{} stages, a schedule of {} on {} ranks, pp {}", layout.stages.size(),
                             job.schedule.stages(), job.schedule.ranks.size(), layout.mesh.degree_of(Axis::pp)));
  PARPLAN_ASSERT(layout.layout_of_block.size() == job.graph->blocks.size(),
                 fmt::format("{} blocks with layouts of {}", layout.layout_of_block.size(), job.graph->blocks.size()));
  Degrees degree = layout.mesh.degree;
  degree.pp = 1;
  for (const BlockLayout& block : layout.layouts)
    PARPLAN_ASSERT(block.degree == degree && block.micro_batch == layout.layouts.front().micro_batch &&
                       block.recompute != Recompute::per_stage,
                   "blocks have the mesh's degrees, one size of micro-batches and a recompute of their own");
  // The first part of a backward leaves sums that a reduction of every micro-batch would miss.
  for (int stage = 0; stage < job.schedule.stages(); ++stage)
    for (int block = layout.stages[stage].first; block < layout.stages[stage].last && splits[stage] != 0; ++block)
      PARPLAN_ASSERT(
          !data_shards(layout.of_block(block)).gradients,
          fmt::format("stage {} runs backwards in two parts, and the gradients of block {} are sharded", stage, block));
  for (const int block : tied_blocks) {
    const Placements &own = layout.of_block(block).placements, &first = layout.of_block(tied_blocks.front()).placements;
    PARPLAN_ASSERT(&own == &first || own == first, "blocks that tie a parameter are laid out alike");
  }
}

}  // namespace

JobLowering::JobLowering(const Job& for_job, KnownBlocks* blocks)
    : job(for_job),
      tied_blocks(find_tied_blocks(*for_job.graph)),
      splits_backward(parplan::splits_backward(for_job.schedule)),
      blocks_(blocks) {
  check(job, tied_blocks, splits_backward);
}

const LoweredBlock& JobLowering::lowered(int block, const BlockContext& context) {
  const int kind = job.graph->blocks[block].kind;
  const auto known = std::ranges::find_if(
      known_, [&](const Known& one) { return one.kind == kind && one.context == context; });
  if (known != known_.end()) return *known->lowered;
  known_.push_back({.kind = kind,
                    .context = context,
                    .lowered = blocks_ != nullptr
                                   ? blocks_->of(*job.graph, block, context)
                                   : std::make_shared<const LoweredBlock>(lower_block(*job.graph, block, context))});
  return *known_.back().lowered;
}

const Schedule& JobLowering::schedule_of(int replica) {
  if (job.layout.replica_micro_batches.empty()) return job.schedule;
  const std::int64_t count = micro_batches(job.layout, job.training, replica);
  const auto [known, is_new] = schedules_.try_emplace(count);
  if (is_new) known->second = first_micro_batches(job.schedule, static_cast<int>(count));
  return known->second;
}

Lowering::Lowering(JobLowering& of_job, int rank)
    : shared(of_job),
      job(of_job.job),
      graph(*of_job.job.graph),
      at(coordinates_of(of_job.job.layout.mesh, rank)),
      schedule(of_job.schedule_of(at.dp)),
      tied_blocks(of_job.tied_blocks),
      splits_backward(parplan::splits_backward(schedule)) {
  program.rank = rank;
  program.pipeline_rank = at.pp;
  program.replica = at.dp;
  for (int stage = 0; stage < schedule.stages(); ++stage)
    if (rank_of_stage(stage) == at.pp) stages.push_back(stage);
  segments_at.assign(graph.blocks.size(), nullptr);
  bucket_at.assign(graph.blocks.size(), -1);
  int buckets = 0;  // every block has one of its own, in the order of blocks
  for (const int stage : stages)
    for (int block = blocks_of(stage).first; block < blocks_of(stage).last; ++block) bucket_at[block] = buckets++;
  input_apart.assign(graph.blocks.size(), false);
  for (int stage = 1; stage < schedule.stages(); ++stage)
    input_apart[blocks_of(stage).first] =
        job.layout.input_slots == InputSlots::one_more || hands_over(schedule, {stage - 1, Phase::forward, 0});
}

Lowering::SegmentsKey Lowering::segments_key(int block) const {
  const std::vector<int>& layouts = job.layout.layout_of_block;
  return {graph.blocks[block].kind, layouts[block], layouts[std::max(block - 1, 0)], input_apart[block] != 0,
          splits_backward[job.layout.stage_of_block(block)] != 0};
}

Home Lowering::home_of_saved(int block) const {
  return is_layer(graph, block) && has_backward(graph, block) ? job.layout.of_block(block).saved : Home::device;
}

int add_segment(Program& program, Segment segment) {
  const auto known = std::find(program.segments.begin(), program.segments.end(), segment);
  if (known != program.segments.end()) return static_cast<int>(known - program.segments.begin());
  program.segments.push_back(std::move(segment));
  return static_cast<int>(program.segments.size()) - 1;
}

int add_buffer(Program& program, std::string name, MemoryCategory category, std::int64_t bytes, bool persistent) {
  program.buffers.push_back({std::move(name), category, bytes, 0, persistent});
  return static_cast<int>(program.buffers.size()) - 1;
}

Call& add_call(Lowering& lowering, int segment, std::initializer_list<Bound> bound, int micro_batch,
               BufferIds frees) {
  Program& program = lowering.program;
  Call call;
  call.segment = segment;
  call.micro_batch = micro_batch;
  call.frees = std::move(frees);
  const std::vector<std::string>& bindings = program.segments[segment].bindings;
  // A Segment is called from one place, which always names the same buffers in the same order.
  if (lowering.bound_at.size() <= static_cast<std::size_t>(segment))
    lowering.bound_at.resize(static_cast<std::size_t>(segment) + 1);
  std::vector<std::size_t>& bound_at = lowering.bound_at[segment];
  for (std::size_t i = bound_at.size(); i < bindings.size(); ++i) {
    const auto is_named = [&](const Bound& b) { return bindings[i] == b.first; };
    bound_at.push_back(static_cast<std::size_t>(std::find_if(bound.begin(), bound.end(), is_named) - bound.begin()));
  }
  call.buffers.reserve(bindings.size());
  for (std::size_t i = 0; i < bindings.size(); ++i) {
    PARPLAN_ASSERT(bound_at[i] < bound.size() && bound.begin()[bound_at[i]].second,
                   fmt::format("nothing bound to '{}' of {}", bindings[i], program.segments[segment].name));
    const int buffer = *bound.begin()[bound_at[i]].second;
    call.buffers.push_back(buffer);
    if (buffer == lowering.scratch) call.frees.push_back(buffer);
  }
  program.calls.push_back(std::move(call));
  return program.calls.back();
}

Call& call_on_pieces(Lowering& lowering, std::string name, Stream stream, std::vector<Instruction> instructions,
                     const std::vector<std::vector<Piece>>& pieces, BufferIds frees) {
  Segment segment;
  segment.name = std::move(name);
  segment.stream = stream;
  BufferIds buffers;
  for (std::size_t i = 0; i < instructions.size(); ++i)
    for (const Piece& piece : pieces[i]) {
      auto at = std::find(buffers.begin(), buffers.end(), piece.buffer);
      if (at == buffers.end()) {
        buffers.push_back(piece.buffer);
        segment.bindings.push_back(fmt::format("buffer {}", buffers.size() - 1));
        at = buffers.end() - 1;
      }
      instructions[i].operands.push_back(
          {static_cast<int>(at - buffers.begin()), piece.offset, piece.bytes, piece.access});
    }
  segment.instructions = std::move(instructions);
  order_instructions(segment);
  Call call;
  call.segment = add_segment(lowering.program, std::move(segment));
  call.buffers = std::move(buffers);
  call.frees = std::move(frees);
  lowering.program.calls.push_back(std::move(call));
  return lowering.program.calls.back();
}

BucketRange shard_of(const Bucket& bucket) {
  return {0, bucket.shard_elements};
}

Piece in_shard(int buffer, BucketRange range, std::int64_t element, Access access) {
  return {buffer, range.begin * element, range.size() * element, access};
}

namespace {

Piece in_whole(const Bucket& bucket, int buffer, BucketRange range, std::int64_t element, Access access) {
  Piece piece = in_shard(buffer, range, element, access);
  piece.offset += begin_in_whole(bucket) * element;
  return piece;
}

}  // namespace

Piece gradient_piece(const Lowering& lowering, std::size_t index, int buffer, BucketRange range, Access access) {
  const std::int64_t element = gradient_bytes(lowering.job.training);
  if (lowering.rank_buckets[index].shards.gradients) return in_shard(buffer, range, element, access);
  return in_whole(lowering.program.buckets[index], buffer, range, element, access);
}

Piece parameter_piece(const Lowering& lowering, std::size_t index, BucketRange range, Access access) {
  const std::int64_t element = size_of(lowering.job.training.precision);
  const Bucket& bucket = lowering.program.buckets[index];
  if (lowering.rank_buckets[index].shards.parameters) return in_shard(bucket.parameters, range, element, access);
  return in_whole(bucket, bucket.parameters, range, element, access);
}

GroupKey towards(const Schedule& schedule, int stage, int neighbour) {
  const bool returns = is_v(schedule) && 2 * std::min(stage, neighbour) >= schedule.stages();
  if (returns) return neighbour > stage ? next_stage_on_return : previous_stage_on_return;
  return neighbour > stage ? next_stage : previous_stage;
}

Instruction communication(InstructionKind kind, GroupKey group, Stream stream, DataType type) {
  Instruction instruction;
  instruction.kind = kind;
  instruction.group = group;
  instruction.stream = stream;
  instruction.label = label_of(group.axis);
  instruction.type = type;
  instruction.name = name(kind);
  return instruction;
}

void collective(Lowering& lowering, std::string name, InstructionKind kind, GroupKey group,
                const std::vector<Piece>& pieces, DataType type) {
  const Stream stream = stream_of(kind, group);
  std::vector<Instruction> instructions;
  std::vector<std::vector<Piece>> operands;
  for (const Piece& piece : pieces) {
    instructions.push_back(communication(kind, group, stream, type));
    operands.push_back({piece});
  }
  call_on_pieces(lowering, std::move(name), stream, std::move(instructions), operands);
}

}  // namespace parplan
