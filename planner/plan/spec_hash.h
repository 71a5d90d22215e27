#pragma once

#include <cstddef>

#include "planner/base/hash.h"
#include "planner/plan/parallel_spec.h"

namespace parplan {

// Hashes of memos that are asked often: cheap. A choice that is left out of them costs collisions
// alone.
struct MeshHash {
  std::size_t operator()(const DeviceMesh& mesh) const {
    std::size_t numbers = static_cast<std::size_t>(64 * mesh.dp_shard + mesh.cp_ulysses), order = 0;
    for (const Axis axis : all_axes) numbers = 8191 * numbers + static_cast<std::size_t>(mesh.degree_of(axis));
    for (const Axis axis : mesh.order) order = 8 * order + static_cast<std::size_t>(axis);
    add_hash(numbers, order);
    return numbers;
  }
};
struct SpecHash {
  std::size_t operator()(const ParallelSpec& spec) const {
    std::size_t seed = MeshHash()(spec.mesh), choices = static_cast<std::size_t>(spec.micro_batch);
    for (const int choice : {static_cast<int>(spec.sequence_parallel), spec.zero_stage, static_cast<int>(spec.schedule),
                             static_cast<int>(spec.recompute), spec.virtual_stages, static_cast<int>(spec.cp_method),
                             static_cast<int>(spec.dp_method), static_cast<int>(spec.tp_overlap)})
      choices = 31 * choices + static_cast<std::size_t>(choice);
    add_hash(seed, choices);
    for (const int blocks : spec.stage_blocks) add_hash(seed, static_cast<std::size_t>(blocks));
    return seed;
  }
};

}  // namespace parplan
