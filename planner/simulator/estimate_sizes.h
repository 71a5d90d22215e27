#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "planner/program/bucket_layout.h"
#include "planner/program/lower_block.h"
#include "planner/program/memory.h"
#include "planner/program/rank_buckets.h"
#include "planner/simulator/block_shapes.h"

// Sizes that the parts of an estimate share.
namespace parplan {

// Calls visit(elements) for each unit of a bucket (BucketUnit), padded.
template <class Visit>
void for_each_unit(const BucketElements& bucket, const ParallelSpec& spec, const TrainingSpec& training, Visit visit) {
  if (bucket.all == 0) return;
  const bool by_parameter =
      spec.gather_unit == GatherUnit::parameter || (training.engine.lists_shards && gathers_parameters(spec));
  if (!by_parameter) return visit(padded_elements(bucket.all, spec.shard_ranks(), training));
  std::int64_t unit = 0;
  for (std::size_t i = 0; i < bucket.of_parameters.size(); ++i) {
    if (i > 0 && bucket.begins_unit[i] != 0) {
      visit(unit);
      unit = 0;
    }
    unit += padded_elements(bucket.of_parameters[i], spec.shard_ranks(), training);
  }
  visit(unit);
}

// Elements of a bucket.
inline std::int64_t padded(const BucketElements& bucket, const ParallelSpec& spec, const TrainingSpec& training) {
  std::int64_t all = 0;
  for_each_unit(bucket, spec, training, [&](std::int64_t elements) { all += elements; });
  return all;
}

inline BucketSizes bucket_of(const BucketElements& elements, const ParallelSpec& spec, const Placements& placements,
                             const TrainingSpec& training) {
  return {.elements = padded(elements, spec, training),
          .shards = data_shards(placements, spec.replicas()),
          .shard_ranks = spec.shard_ranks(),
          .homes = placements.state.homes,
          .reduced = spec.replicas() > 1 && spec.dp_method != DataMethod::master};
}

// The bucket of what blocks of a kind train.
inline BucketSizes own_bucket(const BlockShapes& shapes, std::size_t kind, const ParallelSpec& spec,
                              const Placements& placements, const TrainingSpec& training) {
  BucketSizes bucket = bucket_of(shapes.own_elements[kind], spec, placements, training);
  bucket.without_second = shapes.matrix_elements[kind];
  return bucket;
}

// The bucket of the tied parameter on a rank with so many uses.
inline BucketSizes tied_bucket(const BlockShapes& shapes, const ParallelSpec& spec, const Placements& placements,
                               const TrainingSpec& training, int uses) {
  BucketSizes tied = bucket_of(shapes.tied_elements, spec, placements, training);
  tied.tied = true;
  tied.homes = homes_of_tied(tied.homes);
  tied.frozen = shapes.tied_is_frozen;
  tied.accumulates_twice = uses > 1 && spec.tied_gradients == TiedGradients::apart;
  return tied;
}

// The bucket of what is frozen of blocks of a kind.
inline BucketSizes frozen_bucket(const BlockShapes& shapes, std::size_t kind, const ParallelSpec& spec,
                                 const Placements& placements, const TrainingSpec& training) {
  BucketSizes bucket = bucket_of(shapes.frozen_elements[kind], spec, placements, training);
  bucket.frozen = true;
  return bucket;
}

inline Bytes persistent(const MemoryUse& use) { return use.parameters + use.gradients + use.optimizer; }

// What a block's saved activations take in one slot.
inline std::int64_t saved_with_reserve(std::int64_t bytes, const TrainingSpec& training) {
  return (align_up(Bytes(bytes), buffer_alignment) + reserve_of(bytes, MemoryCategory::activations, training)).count;
}

// State with what the allocator keeps beside it, where there are no activations.
inline Bytes held_by_state(const MemoryUse& use) {
  return persistent(use) + use.reserve;
}

// The larger of the activations on either side of a block.
inline std::int64_t crossing_bytes(const LoweredBlock& block) {
  return std::max(block.input_bytes, block.output_bytes);
}

// What one rank sends of it.
inline Bytes sent_bytes(std::int64_t crossing, const ParallelSpec& spec, const Placements& placements,
                        const TrainingSpec& training) {
  return Bytes(crossing / transfer_parts(placements.residual, spec.mesh, training.engine));
}

}  // namespace parplan
