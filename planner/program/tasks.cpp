#include <numeric>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "planner/program/bucket_work.h"
#include "planner/program/lowering.h"

namespace parplan {
namespace {

// Parameters --------------------------------------------------------------------------------------

void gather_into(Lowering& lowering, const Bucket& bucket, int whole) {
  const DataType type = in_memory(lowering.job.training.precision);
  const std::int64_t element = size_of(type);
  call_on_pieces(lowering, "data.all_gather.parameters", Stream::dp,
                 {communication(InstructionKind::all_gather, all_along(Axis::dp), Stream::dp, type)},
                 {{{bucket.parameters, 0, bucket.shard_elements * element, Access::read},
                   {whole, 0, bucket.elements * element, Access::write}}});
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
    if (!lowering.shards.parameters) {
      visit(block, lowering.bucket_of(block).parameters,
            tied ? std::optional(tied_bucket().parameters) : std::nullopt);
      continue;
    }
    if (!ready) ready = gather(lowering, block);
    const std::optional<int> current = ready;
    ready = i + 1 < blocks.size() ? gather(lowering, blocks[i + 1]) : std::nullopt;
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
  call_on_pieces(lowering, "fill_zero", Stream::compute, {clear_gradients(elements, Label::dp)},
                 {{{buffer, 0, elements * gradient_bytes, Access::write}}});
}

// Comes after a block's backward. Without sharded gradients, the accumulated bucket is reduced
// once, after the last micro-batch; with them, each micro-batch's bucket is reduced and added to
// this rank's shard.
void reduce_over_data_axis(Lowering& lowering, const Bucket& bucket, int accumulator, int unreduced,
                           bool last_micro_batch) {
  if (lowering.job.spec.dp() == 1 || bucket.elements == 0) return;
  const std::int64_t bytes = bucket.elements * gradient_bytes;
  const InstructionKind kind = gradient_reduction(lowering.shards);
  if (!lowering.shards.gradients) {
    if (last_micro_batch)
      collective(lowering, fmt::format("data.{}.gradients", name(kind)), kind, all_along(Axis::dp),
                 {{accumulator, 0, bytes}});
    return;
  }
  const std::int64_t shard_bytes = bucket.shard_elements * gradient_bytes;
  call_on_pieces(lowering, "data.reduce_scatter.gradients", Stream::dp,
                 {communication(kind, all_along(Axis::dp), Stream::dp),
                  accumulate_gradients(bucket.shard_elements, Stream::dp, Label::dp)},
                 {{{unreduced, 0, bytes, Access::update}},
                  {{unreduced, bucket.shard_begin * gradient_bytes, shard_bytes, Access::read},
                   {accumulator, 0, shard_bytes, Access::update}}},
                 {unreduced});
}

// Stages ------------------------------------------------------------------------------------------

Call& transfer(Lowering& lowering, std::string name, InstructionKind kind, GroupKey group, Stream stream,
               int buffer) {
  const auto [known, first] = lowering.transfers.try_emplace({kind, group}, 0);
  if (!first) {
    Call& call = lowering.program.calls.emplace_back();
    call.segment = known->second;
    call.buffers = {buffer};
    return call;
  }
  const Access access = kind == InstructionKind::send ? Access::read : Access::write;
  Call& call = call_on_pieces(lowering, std::move(name), stream,
                              {communication(kind, group, stream, in_memory(lowering.job.training.precision))},
                              {{{buffer, 0, lowering.crossing_bytes, access}}});
  known->second = call.segment;
  return call;
}

void forward(Lowering& lowering, int micro_batch, const ActionSlots& slots) {
  const std::vector<int>& slot = lowering.saved[slots.saved];
  std::optional<int> to_send;
  if (!lowering.is_last()) to_send = lowering.output[slots.exchange];
  if (!lowering.is_first())
    transfer(lowering, "pipeline.receive.activation", InstructionKind::receive, previous_stage,
             Stream::receive_previous, slot.front());
  std::vector<int> blocks(slot.size());
  std::iota(blocks.begin(), blocks.end(), lowering.range.first);
  visit_blocks(lowering, blocks, [&](int block, std::optional<int> parameters, std::optional<int> tied_parameters) {
    const std::size_t at = block - lowering.range.first;
    add_call(lowering, lowering.segments_of(block).forward,
             {{binding::parameters, parameters},
              {binding::tied_parameters, tied_parameters},
              {binding::saved, slot[at]},
              {binding::output, at + 1 < slot.size() ? slot[at + 1] : to_send},
              {binding::loss, lowering.program.loss_buffer},
              {binding::scratch, lowering.scratch}},
             micro_batch, {});
    return lowering.next_call() - 1;
  });
  if (to_send)
    transfer(lowering, "pipeline.send.activation", InstructionKind::send, next_stage, Stream::send_next, *to_send)
        .frees.push_back(*to_send);
}

void backward(Lowering& lowering, int micro_batch, const ActionSlots& slots) {
  Program& program = lowering.program;
  const std::vector<int>& slot = lowering.saved[slots.saved];
  const int gradient = lowering.gradient[slots.exchange];
  const bool last_micro_batch = micro_batch + 1 == micro_batches(lowering.job.spec, lowering.job.training);
  if (!lowering.is_last())
    transfer(lowering, "pipeline.receive.gradient", InstructionKind::receive, next_stage, Stream::receive_next,
             gradient);
  std::vector<int> blocks(slot.size());
  std::iota(blocks.rbegin(), blocks.rend(), lowering.range.first);
  visit_blocks(lowering, blocks, [&](int block, std::optional<int> parameters, std::optional<int> tied_parameters) {
    const Bucket& bucket = lowering.bucket_of(block);
    const std::optional<int> tied = lowering.tied_bucket_of(block);
    // Where the gradients are summed in the end, and where this backward leaves them.
    std::optional<int> tied_accumulator;
    if (tied) {
      const bool is_first_use = block == lowering.stage_buckets[*tied].blocks.front();
      tied_accumulator = is_first_use ? program.buckets[*tied].gradients : program.buckets[*tied].second_gradients;
    }
    int gradients = bucket.gradients;
    std::optional<int> tied_gradients = tied_accumulator;
    if (lowering.shards.gradients) {
      gradients = lowering.unreduced[lowering.reductions++ % lowering.unreduced.size()];
      clear(lowering, gradients, bucket.elements);
      if (tied) {
        tied_gradients = lowering.unreduced_tied;
        clear(lowering, *tied_gradients, program.buckets[*tied].elements);
      }
    }
    const int saved = slot[block - lowering.range.first];
    std::vector<int> frees{saved};
    if (lowering.is_first() && block == lowering.range.first) frees.push_back(gradient);
    const int call = lowering.next_call();
    add_call(lowering, lowering.segments_of(block).backward,
             {{binding::parameters, parameters},
              {binding::tied_parameters, tied_parameters},
              {binding::gradients, gradients},
              {binding::tied_gradients, tied_gradients},
              {binding::saved, saved},
              {binding::gradient, gradient},
              {binding::loss, program.loss_buffer},
              {binding::loss_scale, program.loss_scale_buffer},
              {binding::scratch, lowering.scratch}},
             micro_batch, std::move(frees));
    reduce_over_data_axis(lowering, bucket, bucket.gradients, gradients, last_micro_batch);
    if (tied)
      reduce_over_data_axis(lowering, program.buckets[*tied], *tied_accumulator, *tied_gradients, last_micro_batch);
    return call;
  });
  if (!lowering.is_first())
    transfer(lowering, "pipeline.send.gradient", InstructionKind::send, previous_stage, Stream::send_previous,
             gradient)
        .frees.push_back(gradient);
}

}  // namespace

void run_actions(Lowering& lowering) {
  const std::vector<Action>& actions = lowering.job.schedule.ranks[lowering.program.stage];
  for (std::size_t i = 0; i < actions.size(); ++i) {
    const int first = lowering.next_call();
    const auto run = actions[i].phase == Phase::forward ? forward : backward;
    run(lowering, actions[i].micro_batch, lowering.slots.actions[i]);
    lowering.program.tasks.push_back({actions[i], first, lowering.next_call()});
  }
}

}  // namespace parplan
