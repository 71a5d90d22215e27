#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "planner/graph/training.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"
#include "planner/plan/schedule.h"
#include "planner/plan/step.h"
#include "planner/program/bucket_work.h"

namespace parplan {

// What determines the memory of one stage's ranks, without a Program. Sizes are those of
// planner/program/buckets.h and of lowered blocks; a test holds `stage_memory` equal to the memory
// plan of the lowered Program.
struct BucketSizes {
  std::int64_t elements = 0;  // padded
  bool tied = false;
  bool used_twice = false;
  std::int64_t times = 1;  // equal buckets of so many blocks
};
struct SavedSizes {
  std::int64_t bytes = 0;     // of one block and micro-batch
  std::int64_t times = 1;     // equal blocks
};
struct StageSizes {
  std::span<const BucketSizes> buckets;
  std::span<const SavedSizes> saved;
  std::int64_t crossing_bytes = 0;
  std::int64_t scratch_bytes = 0;  // the largest of its Segments' and of step_scratch_bytes
  int in_flight = 1;
  bool last_stage = true;
};

// Buffers start at multiples of this, which suits a GPU's vector loads and the CPU's cache lines.
inline constexpr std::int64_t buffer_alignment = 256;

// What a stage uses a buffer for.
enum class BufferRole {
  parameters,        // of a bucket: whole, or this rank's shard (ZeRO-3)
  gradients,         // of a bucket: whole, or this rank's shard (ZeRO-2, 3)
  second_gradients,  // of a tied parameter that the stage uses twice
  first_moment,
  second_moment,
  master,
  loss_scale,
  gathered,          // ZeRO-3: the parameters of a block while it computes
  gathered_tied,
  unreduced,         // ZeRO-2, 3: the gradients of a block until they are reduced
  unreduced_tied,
  saved,             // by a block's forward for its backward
  output,            // an activation on its way to the next stage
  scratch,
  gradient,          // of an activation between blocks
  norm,
  loss,
};
// Whether it keeps its value between steps.
constexpr bool is_persistent(BufferRole role) { return role <= BufferRole::loss_scale; }

struct StageBuffer {
  BufferRole role{};
  MemoryCategory category{};
  std::int64_t bytes = 0;
  std::int64_t times = 1;  // equal buffers of equal blocks
  // The number of buffers that take turns; several buffers in a row are listed slot by slot.
  int slots = 1;
  std::size_t of = 0;  // the bucket or the saved block that it belongs to
};

// Calls visit(StageBuffer) for every buffer of a stage, in the order of its arena. Lowering
// allocates this list, and `stage_memory` sums it.
template <class Visit>
void for_each_buffer(const StageSizes& sizes, const ParallelSpec& spec, const Placements& placements,
                     const TrainingSpec& training, Visit visit) {
  const DataShards shards = data_shards(placements, spec.dp());
  const OptimizerState state = optimizer_state(training);
  const std::int64_t element = size_of(training.precision);
  std::int64_t largest_own = 0;
  std::int64_t largest_tied = 0;
  const auto for_each_bucket = [&](auto of_bucket) {
    for (std::size_t i = 0; i < sizes.buckets.size(); ++i) of_bucket(i, sizes.buckets[i]);
  };
  const auto local = [&](const BucketSizes& bucket, bool is_shard) {
    return is_shard ? bucket.elements / spec.dp() : bucket.elements;
  };
  for_each_bucket([&](std::size_t i, const BucketSizes& bucket) {
    std::int64_t& largest = bucket.tied ? largest_tied : largest_own;
    largest = std::max(largest, bucket.elements);
    visit(StageBuffer{.role = BufferRole::parameters,
                      .category = MemoryCategory::parameters,
                      .bytes = local(bucket, shards.parameters) * element,
                      .times = bucket.times,
                      .of = i});
  });
  for_each_bucket([&](std::size_t i, const BucketSizes& bucket) {
    StageBuffer buffer{.role = BufferRole::gradients,
                       .category = MemoryCategory::gradients,
                       .bytes = local(bucket, shards.gradients) * gradient_bytes,
                       .times = bucket.times,
                       .of = i};
    visit(buffer);
    buffer.role = BufferRole::second_gradients;
    if (bucket.used_twice) visit(buffer);
  });
  for_each_bucket([&](std::size_t i, const BucketSizes& bucket) {
    StageBuffer buffer{.category = MemoryCategory::optimizer,
                       .bytes = local(bucket, shards.optimizer) * state_bytes,
                       .times = bucket.times,
                       .of = i};
    const auto visit_as = [&](bool is_kept, BufferRole role) {
      buffer.role = role;
      if (is_kept) visit(buffer);
    };
    visit_as(state.first_moment, BufferRole::first_moment);
    visit_as(state.second_moment, BufferRole::second_moment);
    visit_as(state.master, BufferRole::master);
  });
  const auto one = [&](BufferRole role, MemoryCategory category, std::int64_t bytes, int slots = 1) {
    visit(StageBuffer{.role = role, .category = category, .bytes = bytes, .slots = slots});
  };
  if (scales_loss(training)) one(BufferRole::loss_scale, MemoryCategory::optimizer, sizeof(LossScale));
  constexpr int pair = 2;  // one is filled or emptied while the other is in use
  if (shards.parameters) {
    one(BufferRole::gathered, MemoryCategory::buffers, largest_own * element, pair);
    if (largest_tied > 0) one(BufferRole::gathered_tied, MemoryCategory::buffers, largest_tied * element);
  }
  if (shards.gradients) {
    one(BufferRole::unreduced, MemoryCategory::buffers, largest_own * gradient_bytes, pair);
    if (largest_tied > 0) one(BufferRole::unreduced_tied, MemoryCategory::buffers, largest_tied * gradient_bytes);
  }
  for (std::size_t i = 0; i < sizes.saved.size(); ++i)
    visit(StageBuffer{.role = BufferRole::saved,
                      .category = MemoryCategory::activations,
                      .bytes = sizes.saved[i].bytes,
                      .times = sizes.saved[i].times,
                      .slots = sizes.in_flight,
                      .of = i});
  const int turns = exchange_buffers(spec.pp(), static_cast<int>(micro_batches(spec, training)));
  if (!sizes.last_stage) one(BufferRole::output, MemoryCategory::buffers, sizes.crossing_bytes, turns);
  one(BufferRole::scratch, MemoryCategory::activations, sizes.scratch_bytes);
  one(BufferRole::gradient, MemoryCategory::activations, sizes.crossing_bytes, turns);
  constexpr std::int64_t number = 4;  // fp32
  if (computes_norm(training)) one(BufferRole::norm, MemoryCategory::buffers, number);
  if (sizes.last_stage) one(BufferRole::loss, MemoryCategory::buffers, number);
}

MemoryUse stage_memory(const StageSizes& sizes, const ParallelSpec& spec, const Placements& placements,
                       const TrainingSpec& training);

}  // namespace parplan
