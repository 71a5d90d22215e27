#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>

#include "planner/graph/training_spec.h"
#include "planner/plan/placement.h"
#include "planner/plan/schedule.h"
#include "planner/plan/step_result.h"
#include "planner/program/bucket_work.h"

namespace parplan {

// What determines the memory of one rank, without a Program. Sizes are those of
// planner/program/rank_buckets.h and of lowered blocks; a test holds `rank_memory` equal to the
// memory plan of the lowered Program.
struct BucketSizes {
  std::int64_t elements = 0;  // padded
  DataShards shards = {};     // over `shard_ranks`
  int shard_ranks = 1;
  bool tied = false;
  bool frozen = false;             // neither gradients nor optimizer state
  bool accumulates_twice = false;  // used twice, with an accumulator for each use
  StateHomes homes = {};
  std::int64_t times = 1;  // equal buckets of so many blocks
  bool of_layer = false;   // of a block between the first and the last
  bool reduced = false;    // its gradients are summed over data-parallel ranks, without a master
  std::int64_t without_second = 0;  // elements that have no second moment (BucketLayout::matrix_elements)
};
struct SavedSizes {
  std::int64_t bytes = 0;     // of one block and micro-batch
  std::int64_t times = 1;     // equal blocks
  Home home = {};
};
// Buffers in which the parameters of blocks are whole, that take turns.
struct GatheredBuffers {
  int in_forwards = 1, in_backwards = 1;
  int all() const { return std::max(in_forwards, in_backwards); }
};
struct RankSizes {
  std::span<const BucketSizes> buckets;
  std::span<const SavedSizes> saved;  // of one slot
  // Likewise what forwards save, and what backward_inputs leaves, for backward_weights.
  std::span<const SavedSizes> for_weights = {};
  std::span<const SavedSizes> left = {};
  // The most that a block with these on the host or in a file has of them on the device: 0 where
  // none has.
  std::int64_t staged_bytes = 0, staged_for_weights_bytes = 0;
  std::int64_t in_file_bytes = 0;  // likewise the most that such a block has in a file at once
  // Activations between blocks: the largest gradient (0 where no backward needs one), and the
  // largest sent to another rank (0 where none is).
  std::int64_t gradient_bytes = 0;
  std::int64_t sent_bytes = 0;
  std::int64_t scratch_bytes = 0;  // the largest of its Segments' and of step_scratch_bytes
  int in_flight = 1;               // slots of saved activations
  // What the last block saves, and its slots, where it has its own (activation_slots.h).
  std::int64_t head_bytes = 0;
  int head_in_flight = 0;
  // Without a pipeline, what the last block saves on the device, which is free when its gradients,
  // and those of the block before, are reduced.
  std::int64_t last_saved_bytes = 0;
  int for_weights_in_flight = 0;   // slots of activation_slots.h
  int left_in_flight = 0;
  int outputs = 1, gradients = 1;  // exchange_buffers of schedule.h, on each of the rank's ways
  GatheredBuffers gathered = {};   // gathered_buffers, where parameters are brought
  // The activation that arrives, where it lies apart from what its block saves, and its buffers.
  std::int64_t input_bytes = 0;
  int inputs = 0;
  bool computes_loss = true;
  // Each block has one backward a step, on one stage: there are no sums over micro-batches.
  bool one_backward = true;
  bool updates = true;  // else a master does, which keeps the optimizer's state and the norm
};

// Buffers start at multiples of this, which suits a GPU's vector loads and the CPU's cache lines.
inline constexpr std::int64_t buffer_alignment = 256;

// Buffers on the device that take turns for what layers keep on the host. In a forward, one is
// filled by a layer, which also leaves its output in the next one's, while a third is copied out;
// in a backward, one is read while another is filled for the layer before. As many for sums of
// gradients on the host: a backward adds to one, another comes for the block before, and a third is
// copied out.
inline constexpr int staging_buffers = 3;

// What layers of a stage that have a backward save of a micro-batch.
struct SavedByStage {
  std::int64_t most_elsewhere = 0;  // bytes, of those that save on the host or in a file
  int on_device = 0;                // layers that save on the device
  std::int64_t least_on_device = std::numeric_limits<std::int64_t>::max();  // bytes, of these
};
// Whether those that save elsewhere need no such buffers, but take turns in what those behind them
// fill later in the forward, and have read before in the backward: as TransformerEngine has it
// (pytorch/cpu_offload.py, DefaultOffloadSynchronizer), so that the device never holds more than
// the layers that stay there save.
constexpr bool take_turns_with_others(const SavedByStage& saved) {
  return saved.on_device >= staging_buffers && saved.most_elsewhere <= saved.least_on_device;
}

// As many on the host for the optimizer's state on NVMe: one bucket's is updated in one, the next
// one's is read into another, and a third is written back (ZeRO-Infinity, Rajbhandari et al. 2021,
// arXiv:2104.07857; DeepSpeed's pipeline_read and pipeline_write).
inline constexpr int state_buffers = 3;

// Buffers on the host that take turns for parameters in a file on their way to the device: as many
// are read ahead, for the blocks that come (DeepSpeed's offload_param.buffer_count, 5 unless set:
// deepspeed/runtime/zero/offload_config.py). As many for what layers keep in a file, both ways, and
// for sums of gradients.
inline constexpr int file_buffers = 5;

// Whether sums of gradients are elsewhere, and on the device only while a backward adds to them.
// Those of a tied parameter add up over several blocks, and stay on the device.
inline bool stages_gradients(const BucketSizes& bucket) {
  return !bucket.frozen && !bucket.tied && bucket.homes.gradients != Home::device;
}
// Whether parameters are whole on the device only while their block computes.
inline bool are_brought(const DataShards& shards, const StateHomes& homes) {
  return shards.parameters || homes.parameters != Home::device;
}

// Blocks ahead of the one that computes whose parameters are brought, in a forward or a backward,
// under a plan's prefetch_depth; and the buffers of a kind that take turns for them.
inline int blocks_ahead(int prefetch_depth, const Engine& engine, Phase phase) {
  return prefetch_depth + (phase == Phase::forward ? engine.gathers_further_forward : engine.gathers_further_backward);
}
inline GatheredBuffers gathered_buffers(int prefetch_depth, const Engine& engine, int blocks_of_stage) {
  // More than all blocks of the largest stage of a rank, and the next one again, none is ahead.
  const auto in = [&](Phase phase) {
    return 1 + std::min(blocks_ahead(prefetch_depth, engine, phase), blocks_of_stage);
  };
  return {.in_forwards = in(Phase::forward), .in_backwards = in(Phase::backward)};
}

// What a rank uses a buffer for.
enum class BufferRole {
  parameters,        // of a bucket: whole, or this rank's shard (ZeRO-3)
  gradients,         // of a bucket: whole, or this rank's shard (ZeRO-2, 3)
  second_gradients,  // of a tied parameter's second use, where each has an accumulator
  half_gradients,    // Engine::half_gradients; nothing reads them
  reduced_copies,    // Engine::copies_to_buckets; nothing reads them
  dummy_gradients,   // Engine::dummy_gradients; nothing reads them
  reduced_bucket,    // Engine::bucket_elements; nothing reads it
  first_moment,
  second_moment,
  first_scales,  // of the blocks of quantized moments
  second_scales,
  master,
  host_parameters,  // updated on the host in half precision, to be copied to the device
  loss_scale,
  staged_state,       // on the host, what a bucket that is updated has on NVMe of its state and parameters
  staged_parameters,  // on the host, parameters that are on NVMe, on their way to the device
  host_gradients,     // of this rank's shard, for an update on the host
  host_norm,          // a copy for such updates; where gradients are on the host, summed there
  host_loss_scale,    // the same
  gathered,           // ZeRO-3, or parameters elsewhere: those of a block while it computes
  gathered_frozen,
  gathered_tied,
  unreduced,  // ZeRO-2, 3: the gradients of a block until they are reduced
  unreduced_tied,
  staged_gradients,  // sums that are elsewhere, while a backward adds to them
  staged_sums,       // on the host, sums that are on NVMe, both ways
  saved,             // by a block's forward for its backward
  head,              // the same of the last block, where it has slots of its own
  for_weights,       // by a block's forward for its backward_weights
  left,              // by a block's backward_inputs for its backward_weights
  staged,            // on the device, what a block has saved elsewhere
  staged_for_weights,
  staged_on_host,  // what a block has saved in a file, both ways
  input,           // an activation from another rank, until its backward
  output,          // an activation on its way to another rank
  scratch,
  gradient,  // of an activation between blocks
  norm,
  loss,
};
// Whether it keeps its value between steps.
constexpr bool is_persistent(BufferRole role) { return role <= BufferRole::loss_scale; }

struct RankBuffer {
  BufferRole role{};
  MemoryCategory category{};
  Home home{};
  std::int64_t bytes = 0;
  std::int64_t times = 1;  // equal buffers of equal blocks
  // The number of buffers that take turns; several buffers in a row are listed slot by slot.
  int slots = 1;
  std::size_t of = 0;  // the bucket or the saved block that it belongs to
  bool counted = true;  // else another buffer is in its place, always or when memory is fullest
  bool kept = false;    // not counted, since it is not in use when most is, but kept by the engine's allocator
};

// Under Engine::makes_gradients_late, which of what is saved and the gradients is in use when most
// is: all that forwards save when backwards begin, all gradients when they end.
struct InUse {
  bool saved = true, gradients = true;
};
inline InUse in_use(const RankSizes& sizes, const TrainingSpec& training) {
  if (!training.engine.makes_gradients_late || !sizes.one_backward) return {};
  std::int64_t saved = 0, gradients = 0;
  for (const SavedSizes& block : sizes.saved)
    if (block.home == Home::device) saved += block.bytes * block.times;
  for (const BucketSizes& bucket : sizes.buckets)
    if (!bucket.frozen && bucket.homes.gradients == Home::device)
      gradients += (bucket.shards.gradients ? bucket.elements / bucket.shard_ranks : bucket.elements) * bucket.times *
                   gradient_bytes(training);
  return {.saved = saved >= gradients, .gradients = saved < gradients};
}

// Whether the master copy is all that a rank keeps of its shard of the parameters.
inline bool holds_master_alone(const BucketSizes& bucket, const TrainingSpec& training) {
  return training.engine.casts_shards && bucket.shards.parameters && !bucket.frozen && bucket.homes == StateHomes{} &&
         optimizer_state(training).master;
}

// Calls visit(RankBuffer) for every buffer of a rank, in the order of the arena in its home.
// Lowering allocates this list, and `rank_memory` sums it.
template <class Visit>
void for_each_buffer(const RankSizes& sizes, const TrainingSpec& training, Visit visit) {
  const std::int64_t element = size_of(training.precision);
  // Elements of the largest bucket whose parameters are gathered, or whose gradients are reduced,
  // while its block computes. The gradients of a tied parameter add up over several blocks.
  struct Largest {
    std::optional<std::int64_t> gathered, unreduced;
  };
  std::int64_t staged_gradients = 0;
  Largest own, frozen, tied;
  const InUse used = in_use(sizes, training);
  const auto for_each_bucket = [&](auto of_bucket) {
    for (std::size_t i = 0; i < sizes.buckets.size(); ++i) of_bucket(i, sizes.buckets[i]);
  };
  const auto local = [&](const BucketSizes& bucket, bool is_shard) {
    return is_shard ? bucket.elements / bucket.shard_ranks : bucket.elements;
  };
  for_each_bucket([&](std::size_t i, const BucketSizes& bucket) {
    Largest& largest = bucket.tied ? tied : bucket.frozen ? frozen : own;
    const auto take = [&](bool is_there, std::optional<std::int64_t>& most) {
      if (is_there) most = std::max(most.value_or(0), bucket.elements);
    };
    take(are_brought(bucket.shards, bucket.homes), largest.gathered);
    if (!bucket.tied && !bucket.frozen) take(bucket.shards.gradients, largest.unreduced);
    if (stages_gradients(bucket)) staged_gradients = std::max(staged_gradients, local(bucket, bucket.shards.gradients));
    visit(RankBuffer{.role = BufferRole::parameters,
                     .category = MemoryCategory::parameters,
                     .home = bucket.homes.parameters,
                     .bytes = local(bucket, bucket.shards.parameters) * element,
                     .times = bucket.times,
                     .of = i,
                     .counted = !holds_master_alone(bucket, training)});
  });
  for_each_bucket([&](std::size_t i, const BucketSizes& bucket) {
    if (bucket.frozen) return;
    RankBuffer buffer{.role = BufferRole::gradients,
                      .category = MemoryCategory::gradients,
                      .home = bucket.homes.gradients,
                      .bytes = local(bucket, bucket.shards.gradients) * gradient_bytes(training),
                      .times = bucket.times,
                      .of = i,
                      .counted = used.gradients || bucket.homes.gradients != Home::device};
    buffer.kept = !buffer.counted;
    visit(buffer);
    buffer.counted = true;
    buffer.kept = false;
    buffer.role = BufferRole::second_gradients;
    if (bucket.accumulates_twice) visit(buffer);
    buffer.role = BufferRole::half_gradients;
    buffer.bytes = local(bucket, bucket.shards.gradients) * element;
    if (training.engine.half_gradients && training.precision == DataType::bf16) visit(buffer);
    buffer.role = BufferRole::reduced_copies;
    buffer.bytes = bucket.elements * size_of(left_type(training));
    if (training.engine.copies_to_buckets && bucket.reduced && !bucket.shards.optimizer) visit(buffer);
  });
  for_each_bucket([&](std::size_t i, const BucketSizes& bucket) {
    if (bucket.frozen || !sizes.updates) return;
    RankBuffer buffer{.category = MemoryCategory::optimizer,
                       .home = bucket.homes.optimizer,
                       .times = bucket.times,
                       .of = i};
    const OptimizerState state = optimizer_state(training, bucket.homes);
    const std::int64_t elements = local(bucket, bucket.shards.optimizer);
    const auto visit_as = [&](bool is_kept, BufferRole role, std::int64_t bytes) {
      buffer.role = role;
      buffer.bytes = bytes;
      if (is_kept) visit(buffer);
    };
    visit_as(state.first_moment, BufferRole::first_moment, state.moment_bytes(elements));
    // The same on each rank, though not all of them hold elements that have one.
    const std::int64_t seconds = std::min(elements, bucket.elements - bucket.without_second);
    visit_as(state.second_moment, BufferRole::second_moment, state.moment_bytes(seconds));
    visit_as(state.first_moment && state.quantized, BufferRole::first_scales, state.scale_bytes(elements));
    visit_as(state.second_moment && state.quantized, BufferRole::second_scales, state.scale_bytes(elements));
    visit_as(state.master, BufferRole::master, elements * state_bytes);
  });
  bool any_on_host = false;
  std::int64_t staged_buckets = 0, staged_state = 0;
  std::int64_t filed_buckets = 0, filed = 0;  // with parameters in a file
  std::int64_t filed_turns = 0, filed_sums = 0;  // of sums of gradients that are there
  for_each_bucket([&](std::size_t i, const BucketSizes& bucket) {
    if (const std::int64_t bytes = local(bucket, bucket.shards.parameters) * element;
        bucket.homes.parameters == Home::nvme && bytes > 0) {
      filed_buckets += bucket.times;
      filed = std::max(filed, bytes);
    }
    if (bucket.frozen || !updates_on_host(bucket.homes)) return;
    any_on_host = true;
    if (const std::int64_t bytes = local(bucket, bucket.shards.gradients) * gradient_bytes(training);
        stages_gradients(bucket) && bucket.homes.gradients == Home::nvme && bytes > 0) {
      filed_turns += 2 * bucket.times;  // one to be written, one to be read for its update
      filed_sums = std::max(filed_sums, bytes);
    }
    const std::int64_t shard = local(bucket, bucket.shards.optimizer);
    const auto visit_as = [&](bool is_there, BufferRole role, MemoryCategory category, std::int64_t bytes) {
      if (is_there)
        visit(RankBuffer{
            .role = role, .category = category, .home = Home::host, .bytes = bytes, .times = bucket.times, .of = i});
    };
    visit_as(bucket.homes.gradients == Home::device, BufferRole::host_gradients, MemoryCategory::gradients,
             shard * gradient_bytes(training));
    visit_as(bucket.homes.parameters == Home::device && is_half(training.precision), BufferRole::host_parameters,
             MemoryCategory::parameters, shard * element);
    const std::int64_t bytes = shard * bytes_on_nvme(training, bucket.homes);
    if (bytes == 0) return;
    staged_buckets += bucket.times;
    staged_state = std::max(staged_state, bytes);
  });
  if (staged_buckets > 0)
    visit(RankBuffer{.role = BufferRole::staged_state,
                     .category = MemoryCategory::buffers,
                     .home = Home::host,
                     .bytes = staged_state,
                     .slots = static_cast<int>(std::min<std::int64_t>(staged_buckets, state_buffers))});
  if (filed_buckets > 0)
    visit(RankBuffer{.role = BufferRole::staged_parameters,
                     .category = MemoryCategory::buffers,
                     .home = Home::host,
                     .bytes = filed,
                     .slots = static_cast<int>(std::min<std::int64_t>(filed_buckets, file_buffers))});
  if (filed_turns > 0)
    visit(RankBuffer{.role = BufferRole::staged_sums,
                     .category = MemoryCategory::buffers,
                     .home = Home::host,
                     .bytes = filed_sums,
                     .slots = static_cast<int>(std::min<std::int64_t>(filed_turns, file_buffers))});
  const auto on_host = [&](BufferRole role, std::int64_t bytes) {
    visit(RankBuffer{.role = role, .category = MemoryCategory::buffers, .home = Home::host, .bytes = bytes});
  };
  if (any_on_host && scales_loss(training)) on_host(BufferRole::host_loss_scale, sizeof(LossScale));
  if (any_on_host && computes_norm(training)) on_host(BufferRole::host_norm, 4);
  const auto one = [&](BufferRole role, MemoryCategory category, std::int64_t bytes, int slots = 1) {
    visit(RankBuffer{.role = role, .category = category, .bytes = bytes, .slots = slots});
  };
  if (training.engine.dummy_gradients) {
    std::int64_t largest = 0;
    for (const BucketSizes& bucket : sizes.buckets)
      if (bucket.of_layer && !bucket.frozen) largest = std::max(largest, bucket.elements);
    if (largest > 0) one(BufferRole::dummy_gradients, MemoryCategory::buffers, largest * element);
  }
  if (const Engine& engine = training.engine; engine.copies_sharded && engine.bucket_elements > 0 &&
      std::ranges::any_of(sizes.buckets, [](const BucketSizes& bucket) {
        return bucket.shards.gradients && !bucket.frozen && bucket.elements > 0;
      }))
    one(BufferRole::reduced_bucket, MemoryCategory::buffers, std::int64_t{engine.bucket_elements} * element);
  if (scales_loss(training) && (sizes.updates || !training.engine.master_computes_loss))
    one(BufferRole::loss_scale, MemoryCategory::optimizer, sizeof(LossScale));
  constexpr int pair = 2;  // one is emptied while the other is in use
  // Those that forwards alone need are empty when backwards, which hold more, fill memory: what
  // they reduce is then where these were.
  const int in_both = std::min(sizes.gathered.in_forwards, sizes.gathered.in_backwards);
  const int in_forwards_alone = sizes.gathered.in_forwards - in_both;
  const bool has_room = in_forwards_alone * (own.gathered.value_or(0) + frozen.gathered.value_or(0)) * element <=
                        pair * own.unreduced.value_or(0) * gradient_bytes(training);
  const auto gathered = [&](BufferRole role, const std::optional<std::int64_t>& elements) {
    if (!elements) return;
    RankBuffer buffer{.role = role,
                      .category = MemoryCategory::buffers,
                      .bytes = *elements * element,
                      .slots = sizes.gathered.all() - in_forwards_alone};
    visit(buffer);
    buffer.slots = in_forwards_alone;
    buffer.counted = !has_room;
    if (buffer.slots > 0) visit(buffer);
  };
  gathered(BufferRole::gathered, own.gathered);
  gathered(BufferRole::gathered_frozen, frozen.gathered);
  if (tied.gathered) one(BufferRole::gathered_tied, MemoryCategory::buffers, *tied.gathered * element);
  if (own.unreduced) {
    RankBuffer buffer{.role = BufferRole::unreduced,
                      .category = MemoryCategory::buffers,
                      .bytes = *own.unreduced * gradient_bytes(training)};
    const std::int64_t in_freed = !training.engine.reduces_where_freed || buffer.bytes == 0
                                      ? std::int64_t{0}
                                      : std::min<std::int64_t>(sizes.last_saved_bytes / buffer.bytes, pair);
    buffer.slots = pair - static_cast<int>(in_freed);
    if (buffer.slots > 0) visit(buffer);
    buffer.slots = static_cast<int>(in_freed);
    buffer.counted = false;
    if (buffer.slots > 0) visit(buffer);
  }
  for_each_bucket([&](std::size_t i, const BucketSizes& bucket) {
    if (bucket.tied && !bucket.frozen && bucket.shards.gradients)
      visit(RankBuffer{.role = BufferRole::unreduced_tied,
                       .category = MemoryCategory::buffers,
                       .bytes = bucket.elements * gradient_bytes(training),
                       .of = i});
  });
  if (staged_gradients > 0)
    one(BufferRole::staged_gradients, MemoryCategory::buffers, staged_gradients * gradient_bytes(training),
        staging_buffers);
  // On the host, whole: there, which of them comes last depends on the order of blocks.
  const auto of_blocks = [&](BufferRole role, std::span<const SavedSizes> blocks, int slots) {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const bool is_in_use = used.saved || role != BufferRole::saved || blocks[i].home != Home::device;
      visit(RankBuffer{.role = role,
                       .category = MemoryCategory::activations,
                       .home = blocks[i].home,
                       .bytes = blocks[i].home == Home::device
                                    ? blocks[i].bytes
                                    : align_up(Bytes(blocks[i].bytes), buffer_alignment).count,
                       .times = blocks[i].times,
                       .slots = slots,
                       .of = i,
                       .counted = is_in_use,
                       .kept = !is_in_use});
    }
  };
  of_blocks(BufferRole::saved, sizes.saved, sizes.in_flight);
  if (sizes.head_in_flight > 0)
    one(BufferRole::head, MemoryCategory::activations, sizes.head_bytes, sizes.head_in_flight);
  if (sizes.for_weights_in_flight > 0)
    of_blocks(BufferRole::for_weights, sizes.for_weights, sizes.for_weights_in_flight);
  if (sizes.left_in_flight > 0) of_blocks(BufferRole::left, sizes.left, sizes.left_in_flight);
  if (sizes.staged_bytes > 0) one(BufferRole::staged, MemoryCategory::activations, sizes.staged_bytes, staging_buffers);
  if (sizes.staged_for_weights_bytes > 0)
    one(BufferRole::staged_for_weights, MemoryCategory::activations, sizes.staged_for_weights_bytes, staging_buffers);
  if (sizes.in_file_bytes > 0)
    visit(RankBuffer{.role = BufferRole::staged_on_host,
                     .category = MemoryCategory::activations,
                     .home = Home::host,
                     .bytes = sizes.in_file_bytes,
                     .slots = file_buffers});
  if (sizes.input_bytes > 0) one(BufferRole::input, MemoryCategory::activations, sizes.input_bytes, sizes.inputs);
  // An arena ends with a buffer that is filled to its last byte, which scratch need not be.
  const bool goes_back = sizes.gradient_bytes > 0;
  if (!goes_back) one(BufferRole::scratch, MemoryCategory::activations, sizes.scratch_bytes);
  if (sizes.sent_bytes > 0) one(BufferRole::output, MemoryCategory::buffers, sizes.sent_bytes, sizes.outputs);
  if (goes_back) one(BufferRole::scratch, MemoryCategory::activations, sizes.scratch_bytes);
  one(BufferRole::gradient, MemoryCategory::activations, sizes.gradient_bytes, sizes.gradients);
  constexpr std::int64_t number = 4;  // fp32
  if (computes_norm(training) && sizes.updates) one(BufferRole::norm, MemoryCategory::buffers, number);
  if (sizes.computes_loss) one(BufferRole::loss, MemoryCategory::buffers, number);
}

// What an engine's allocator keeps beside a buffer on the device; parplan's own runtime has none.
Bytes reserve_of(std::int64_t bytes, MemoryCategory category, const TrainingSpec& training);

MemoryUse rank_memory(const RankSizes& sizes, const TrainingSpec& training);

}  // namespace parplan
