#include "planner/program/memory.h"

#include <algorithm>

#include "planner/graph/op.h"
#include "planner/plan/schedule.h"

namespace parplan {

MemoryUse stage_memory(const StageSizes& sizes, const ParallelSpec& spec, const Placements& placements,
                       const TrainingSpec& training) {
  const DataShards shards = data_shards(placements, spec.dp());
  const std::int64_t element = size_of(training.precision);
  const bool adaptive = training.optimizer != Optimizer::sgd;
  const int moments =
      (adaptive || training.momentum != 0.0 ? 1 : 0) + (adaptive ? 1 : 0) + (is_half(training.precision) ? 1 : 0);

  MemoryUse use;
  const auto add = [&](Bytes& part, std::int64_t bytes, std::int64_t times = 1) {
    part += align_up(Bytes(bytes), buffer_alignment) * times;
  };
  std::int64_t largest_own = 0;
  std::int64_t largest_tied = 0;
  for (const BucketSizes& bucket : sizes.buckets) {
    const auto local = [&](bool is_sharded) { return is_sharded ? bucket.elements / spec.dp() : bucket.elements; };
    add(use.parameters, local(shards.parameters) * element, bucket.times);
    add(use.gradients, local(shards.gradients) * 4, bucket.used_twice ? 2 : bucket.times);
    add(use.optimizer, local(shards.optimizer) * 4, moments * bucket.times);
    std::int64_t& largest = bucket.tied ? largest_tied : largest_own;
    largest = std::max(largest, bucket.elements);
  }
  if (scales_loss(training)) add(use.optimizer, sizeof(LossScale));
  if (shards.parameters) {
    add(use.buffers, largest_own * element, 2);
    add(use.buffers, largest_tied * element);
  }
  if (shards.gradients) {
    add(use.buffers, largest_own * 4, 2);
    add(use.buffers, largest_tied * 4);
  }
  for (const SavedSizes& saved : sizes.saved) add(use.activations, saved.bytes, saved.times * sizes.in_flight);
  const std::int64_t turns = exchange_buffers(spec.pp(), static_cast<int>(micro_batches(spec, training)));
  if (!sizes.last_stage) add(use.buffers, sizes.crossing_bytes, turns);
  add(use.activations, sizes.scratch_bytes);
  add(use.activations, sizes.crossing_bytes, turns - 1);
  // The last buffer ends where its bytes do.
  const bool norm = computes_norm(training);
  if (sizes.last_stage || norm) {
    add(use.activations, sizes.crossing_bytes);
    if (sizes.last_stage && norm) add(use.buffers, 4);
    use.buffers += Bytes(4);
  } else {
    use.activations += Bytes(sizes.crossing_bytes);
  }
  return use;
}

}  // namespace parplan
