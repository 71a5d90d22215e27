#pragma once

#include <cstdint>
#include <span>

#include "planner/graph/training.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"
#include "planner/plan/step.h"

namespace parplan {

// What decides the memory of one stage's ranks, without a Program. Sizes are those of
// planner/program/buckets.h and of lowered blocks; a test holds `stage_memory` equal to the memory
// plan of the lowered Program.
struct BucketSizes {
  std::int64_t elements = 0;  // padded
  bool tied = false;
  bool used_twice = false;
  std::int64_t times = 1;     // equal buckets of so many blocks
};
struct SavedSizes {
  std::int64_t bytes = 0;     // of one block and micro-batch
  std::int64_t times = 1;     // equal blocks
};
struct StageSizes {
  std::span<const BucketSizes> buckets;
  std::span<const SavedSizes> saved;
  std::int64_t crossing_bytes = 0;
  std::int64_t scratch_bytes = 0;             // most of all its Segments and of step_scratch_bytes
  int in_flight = 1;
  bool last_stage = true;
};

// Buffers start at multiples of this: what a GPU's vector loads and the CPU's cache lines like.
inline constexpr std::int64_t buffer_alignment = 256;

MemoryUse stage_memory(const StageSizes& sizes, const ParallelSpec& spec, const Placements& placements,
                       const TrainingSpec& training);

}  // namespace parplan
