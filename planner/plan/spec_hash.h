#pragma once

#include <cstddef>

#include <boost/container_hash/hash.hpp>

#include "planner/plan/parallel_spec.h"

namespace parplan {

// Hashes of memos that are asked often: cheap. A choice that is left out of them costs collisions
// alone.
struct MeshHash {
  std::size_t operator()(const DeviceMesh& mesh) const {
    std::size_t numbers = static_cast<std::size_t>(mesh.dp_shard), order = 0;
    for (const Axis axis : all_axes) numbers = 8191 * numbers + static_cast<std::size_t>(mesh.degree_of(axis));
    for (const Axis axis : mesh.order) order = 8 * order + static_cast<std::size_t>(axis);
    boost::hash_combine(numbers, order);
    return numbers;
  }
};
struct SpecHash {
  std::size_t operator()(const ParallelSpec& spec) const {
    std::size_t seed = MeshHash()(spec.mesh), choices = static_cast<std::size_t>(spec.micro_batch);
    for (const int choice : {static_cast<int>(spec.sequence_parallel), spec.zero_stage, static_cast<int>(spec.schedule),
                             static_cast<int>(spec.recompute), spec.virtual_stages, static_cast<int>(spec.cp_method)})
      choices = 31 * choices + static_cast<std::size_t>(choice);
    boost::hash_combine(seed, choices);
    if (!spec.stage_blocks.empty()) boost::hash_combine(seed, spec.stage_blocks);
    return seed;
  }
};

}  // namespace parplan
