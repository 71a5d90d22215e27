#include <numeric>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "planner/program/bucket_work.h"
#include "planner/program/lower_block.h"
#include "planner/program/lowering_state.h"

namespace parplan {
namespace {

// Parameters --------------------------------------------------------------------------------------

void gather_into(Lowering& lowering, const Bucket& bucket, int whole) {
  const DataType type = in_memory(lowering.job.training.precision);
  const std::int64_t element = size_of(type);
  constexpr const char* title = "data.all_gather.parameters";
  const GroupKey group = shard_group(lowering.job.layout.mesh);
  call_again(lowering, {title, bucket.shard_elements, bucket.elements, 0}, {bucket.parameters, whole}, {},
             [&]() -> Call& {
               return call_on_pieces(lowering, title, Stream::dp,
                                     {communication(InstructionKind::all_gather, group, Stream::dp, type)},
                                     {{{bucket.parameters, 0, bucket.shard_elements * element, Access::read},
                                       {whole, 0, bucket.elements * element, Access::write}}});
             });
}

// ZeRO-3: the whole bucket of a block, gathered into one of two buffers that take turns. Nothing
// where the block has no parameters of its own.
std::optional<int> gather(Lowering& lowering, int block) {
  const Bucket& bucket = lowering.bucket_of(block);
  if (bucket.elements == 0) return std::nullopt;
  const int whole = lowering.gathered[lowering.gathers++ % lowering.gathered.size()];
  gather_into(lowering, bucket, whole);
  return whole;
}

// Runs `visit(block, parameters, tied parameters)` over blocks while their parameters are whole;
// `visit` returns the number of the block's call. The next block's parameters are gathered while
// one block computes.
template <class Visit>
void visit_blocks(Lowering& lowering, const std::vector<int>& blocks, Visit visit) {
  std::optional<int> ready;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const int block = blocks[i];
    const std::optional<int> tied = lowering.tied_bucket_of(block);
    const auto tied_bucket = [&]() -> const Bucket& { return lowering.program.buckets[*tied]; };
    if (!lowering.shards_of(block).parameters) {
      visit(block, lowering.bucket_of(block).parameters,
            tied ? std::optional(tied_bucket().parameters) : std::nullopt);
      continue;
    }
    if (!ready) ready = gather(lowering, block);
    const std::optional<int> current = ready;
    ready = i + 1 < blocks.size() && lowering.shards_of(blocks[i + 1]).parameters ? gather(lowering, blocks[i + 1])
                                                                                 : std::nullopt;
    if (tied) gather_into(lowering, tied_bucket(), *lowering.gathered_tied);
    const int call = visit(block, current, tied ? lowering.gathered_tied : std::nullopt);
    std::vector<int>& frees = lowering.program.calls[call].frees;
    if (current) frees.push_back(*current);
    if (tied) frees.push_back(*lowering.gathered_tied);
  }
}

// Gradients ---------------------------------------------------------------------------------------

void clear(Lowering& lowering, int buffer, std::int64_t elements) {
  if (elements == 0) return;
  constexpr const char* title = "fill_zero";
  call_again(lowering, {title, elements, 0, 0}, {buffer}, {}, [&]() -> Call& {
    return call_on_pieces(lowering, title, Stream::compute, {clear_gradients(elements, Label::dp)},
                          {{{buffer, 0, elements * gradient_bytes, Access::write}}});
  });
}

// Hybrid sharding: sums a shard over the ranks that hold the same one.
void reduce_over_replicas(Lowering& lowering, const Piece& shard) {
  collective(lowering, "data.all_reduce.shards", InstructionKind::all_reduce_sum, shard_replicas, {shard});
}

// Comes after a block's backward. Without sharded gradients, the accumulated bucket is reduced
// once, after the last micro-batch; with them, each micro-batch's bucket is reduced and added to
// this rank's shard. With hybrid sharding, this sums over the shard group; shards are summed over
// the replicas of the group once, after the last micro-batch.
void reduce_over_data_axis(Lowering& lowering, int index, int accumulator, int unreduced, bool last_micro_batch) {
  const Bucket& bucket = lowering.program.buckets[index];
  const DataShards shards = lowering.rank_buckets[index].shards;
  const DeviceMesh& mesh = lowering.job.layout.mesh;
  if (group_size(mesh, Axis::dp) == 1 || bucket.elements == 0) return;
  const bool is_hybrid = mesh.dp_shard > 0 && shards.optimizer;
  const GroupKey group = is_hybrid ? shard_group(mesh) : all_along(Axis::dp);
  const std::int64_t bytes = bucket.elements * gradient_bytes;
  const std::int64_t shard_bytes = bucket.shard_elements * gradient_bytes;
  const InstructionKind kind = gradient_reduction(shards);
  if (!shards.gradients) {
    if (last_micro_batch)
      collective(lowering, fmt::format("data.{}.gradients", name(kind)), kind, group, {{accumulator, 0, bytes}});
    if (last_micro_batch && is_hybrid)
      reduce_over_replicas(lowering, {accumulator, bucket.shard_begin * gradient_bytes, shard_bytes});
    return;
  }
  constexpr const char* title = "data.reduce_scatter.gradients";
  call_again(lowering, {title, bucket.elements, bucket.shard_begin, bucket.shard_elements}, {unreduced, accumulator},
             {unreduced}, [&]() -> Call& {
               return call_on_pieces(lowering, title, Stream::dp,
                                     {communication(kind, group, Stream::dp),
                                      accumulate_gradients(bucket.shard_elements, Stream::dp, Label::dp)},
                                     {{{unreduced, 0, bytes, Access::update}},
                                      {{unreduced, bucket.shard_begin * gradient_bytes, shard_bytes, Access::read},
                                       {accumulator, 0, shard_bytes, Access::update}}});
             });
  if (last_micro_batch && is_hybrid) reduce_over_replicas(lowering, {accumulator, 0, shard_bytes});
}

// Stages ------------------------------------------------------------------------------------------

// Whether an action is of the last micro-batch, after which gradients are whole.
bool is_last(const Lowering& lowering, const Action& action) {
  return action.micro_batch + 1 == micro_batches(lowering.job.layout, lowering.job.training);
}

// Sends a buffer to the rank of a neighbouring stage, or receives it from there.
Call& transfer(Lowering& lowering, const char* what, InstructionKind kind, int stage, int neighbour, int buffer,
               std::int64_t bytes) {
  const GroupKey group = towards(stage, neighbour);
  return call_again(lowering, {what, static_cast<std::int64_t>(kind), static_cast<std::int64_t>(group.members), bytes},
                    {buffer}, {}, [&]() -> Call& {
                      const Stream stream = stream_of(kind, group);
                      const Access access = kind == InstructionKind::send ? Access::read : Access::write;
                      const DataType type = in_memory(lowering.job.training.precision);
                      return call_on_pieces(lowering, fmt::format("pipeline.{}.{}", name(kind), what), stream,
                                            {communication(kind, group, stream, type)}, {{{buffer, 0, bytes, access}}});
                    });
}

// The buffer of the activation that enters a stage, where it lies apart from what its first block
// saves.
std::optional<int> input_of_stage(const Lowering& lowering, BlockRange range, const ActionSlots& slots) {
  return lowering.input_apart[range.first] ? std::optional(lowering.input[slots.input]) : std::nullopt;
}

// The neighbouring stage from which an action receives its input, or to which it sends its result:
// nothing where there is none.
std::optional<int> stage_of(const std::optional<Action>& neighbour) {
  return neighbour ? std::optional(neighbour->stage) : std::nullopt;
}

// Where a block saves what its backward reads.
int saved_of(const Lowering& lowering, int block, const ActionSlots& slots) {
  return lowering.has_own_slots(block) ? lowering.head[slots.head]
                                       : lowering.saved[slots.saved][lowering.position_in_slot[block]];
}

// The buffer of a block for a micro-batch: nothing where the rank has no such slots.
std::optional<int> of_slot(const std::vector<std::vector<int>>& slots, int slot, std::size_t block) {
  return slots.empty() ? std::nullopt : std::optional(slots[slot][block]);
}

void forward(Lowering& lowering, const Action& action, const ActionSlots& slots) {
  const int stages = lowering.job.schedule.stages();
  const BlockRange range = lowering.blocks_of(action.stage);
  const std::optional<int> from = stage_of(input_of(action, stages)), to = stage_of(output_of(action, stages));
  std::optional<int> to_send;
  if (to) to_send = lowering.output[slots.exchange];
  const std::optional<int> input = input_of_stage(lowering, range, slots);
  if (from)
    transfer(lowering, "activation", InstructionKind::receive, action.stage, *from,
             input.value_or(saved_of(lowering, range.first, slots)), lowering.segments_of(range.first).input_bytes);
  std::vector<int> blocks(static_cast<std::size_t>(range.size()));
  std::iota(blocks.begin(), blocks.end(), range.first);
  visit_blocks(lowering, blocks, [&](int block, std::optional<int> parameters, std::optional<int> tied_parameters) {
    const std::size_t at = block - range.first;
    add_call(lowering, lowering.segments_of(block).forward,
             {{binding::parameters, parameters},
              {binding::tied_parameters, tied_parameters},
              {binding::saved, saved_of(lowering, block, slots)},
              {binding::for_weights, of_slot(lowering.for_weights, slots.for_weights, at)},
              {binding::input, input},
              {binding::output, block + 1 < range.last ? saved_of(lowering, block + 1, slots) : to_send},
              {binding::loss, lowering.program.loss_buffer},
              {binding::scratch, lowering.scratch}},
             action.micro_batch, {});
    return lowering.next_call() - 1;
  });
  if (to)
    transfer(lowering, "activation", InstructionKind::send, action.stage, *to, *to_send,
             lowering.segments_of(range.last - 1).output_bytes)
        .frees.push_back(*to_send);
}

void backward(Lowering& lowering, const Action& action, const ActionSlots& slots) {
  Program& program = lowering.program;
  const int stages = lowering.job.schedule.stages();
  const BlockRange range = lowering.blocks_of(action.stage);
  const int gradient = lowering.gradient[slots.exchange];
  const std::optional<int> input = input_of_stage(lowering, range, slots);
  const std::optional<int> from = stage_of(input_of(action, stages)), to = stage_of(output_of(action, stages));
  const bool last_micro_batch = is_last(lowering, action);
  const bool in_parts = action.phase == Phase::backward_inputs, has_parts = lowering.splits_backward[action.stage] != 0;
  if (from)
    transfer(lowering, "gradient", InstructionKind::receive, action.stage, *from, gradient,
             lowering.segments_of(range.last - 1).output_bytes);
  std::vector<int> blocks(static_cast<std::size_t>(range.size()));
  std::iota(blocks.rbegin(), blocks.rend(), range.first);
  visit_blocks(lowering, blocks, [&](int block, std::optional<int> parameters, std::optional<int> tied_parameters) {
    const int own = lowering.bucket_index(block);
    const Bucket& bucket = program.buckets[own];
    const std::optional<int> tied = lowering.tied_bucket_of(block);
    // Where the gradients are summed in the end, and where this backward leaves them. The first
    // block that uses a tied parameter is the last to go backward: uses that share an accumulator
    // are reduced there.
    std::optional<int> tied_accumulator;
    bool completes_tied = false;
    if (tied) {
      const bool is_first_use = block == lowering.rank_buckets[*tied].blocks.front();
      const std::optional<int> second = program.buckets[*tied].second_gradients;
      tied_accumulator = is_first_use ? program.buckets[*tied].gradients
                                      : second.value_or(program.buckets[*tied].gradients);
      completes_tied = is_first_use || second;
    }
    int gradients = bucket.gradients;
    std::optional<int> tied_gradients = tied_accumulator;
    if (lowering.shards_of(block).gradients) {
      gradients = lowering.unreduced[lowering.reductions++ % lowering.unreduced.size()];
      clear(lowering, gradients, bucket.elements);
      if (tied) {
        Lowering::UnreducedTied& unreduced = lowering.unreduced_tied.at(*tied);
        tied_gradients = unreduced.buffer;
        if (!unreduced.holds_gradients) clear(lowering, *tied_gradients, program.buckets[*tied].elements);
        unreduced.holds_gradients = !completes_tied;
      }
    }
    const auto at = static_cast<std::size_t>(block - range.first);
    const Lowering::BlockSegments& segments = lowering.segments_of(block);
    const int saved = saved_of(lowering, block, slots);
    const std::optional<int> for_weights = of_slot(lowering.for_weights, slots.for_weights, at);
    std::vector<int> frees{saved};
    if (has_parts && !in_parts) frees.push_back(*for_weights);
    if (input && block == range.first) frees.push_back(*input);
    if (!to && block == range.first) frees.push_back(gradient);
    const int call = lowering.next_call();
    add_call(lowering, in_parts ? *segments.backward_inputs : *segments.backward,
             {{binding::parameters, parameters},
              {binding::tied_parameters, tied_parameters},
              {binding::gradients, gradients},
              {binding::tied_gradients, tied_gradients},
              {binding::saved, saved},
              {binding::for_weights, for_weights},
              {binding::left, in_parts ? of_slot(lowering.left, slots.left, at) : std::nullopt},
              {binding::input, input},
              {binding::gradient, gradient},
              {binding::loss, program.loss_buffer},
              {binding::loss_scale, program.loss_scale_buffer},
              {binding::scratch, lowering.scratch}},
             action.micro_batch, std::move(frees));
    if (!in_parts || !segments.backward_weights)
      reduce_over_data_axis(lowering, own, bucket.gradients, gradients, last_micro_batch);
    if (completes_tied) reduce_over_data_axis(lowering, *tied, *tied_accumulator, *tied_gradients, last_micro_batch);
    return call;
  });
  if (to)
    transfer(lowering, "gradient", InstructionKind::send, action.stage, *to, gradient,
             lowering.segments_of(range.first).input_bytes)
        .frees.push_back(gradient);
}

// The second part of a backward. It reads no parameters, and nothing waits for its results but the
// reduction of the block's gradients.
void backward_weights(Lowering& lowering, const Action& action, const ActionSlots& slots) {
  const BlockRange range = lowering.blocks_of(action.stage);
  for (int block = range.last; block-- > range.first;) {
    const std::optional<int> segment = lowering.segments_of(block).backward_weights;
    if (!segment) continue;
    const auto at = static_cast<std::size_t>(block - range.first);
    const int own = lowering.bucket_index(block), gradients = lowering.program.buckets[own].gradients;
    const std::optional<int> for_weights = of_slot(lowering.for_weights, slots.for_weights, at);
    const std::optional<int> left = of_slot(lowering.left, slots.left, at);
    add_call(lowering, *segment,
             {{binding::gradients, gradients},
              {binding::for_weights, for_weights},
              {binding::left, left},
              {binding::scratch, lowering.scratch}},
             action.micro_batch, {*for_weights, *left});
    reduce_over_data_axis(lowering, own, gradients, gradients, is_last(lowering, action));
  }
}

}  // namespace

void run_actions(Lowering& lowering) {
  const std::vector<Action>& actions = lowering.job.schedule.ranks[lowering.program.pipeline_rank];
  for (std::size_t i = 0; i < actions.size(); ++i) {
    const int first = lowering.next_call();
    const auto run = actions[i].phase == Phase::forward            ? forward
                     : actions[i].phase == Phase::backward_weights ? backward_weights
                                                                   : backward;
    run(lowering, actions[i], lowering.slots.actions[i]);
    lowering.program.tasks.push_back({actions[i], first, lowering.next_call()});
  }
}

}  // namespace parplan
