#pragma once

#include <cstddef>

#include <boost/container_hash/hash.hpp>

#include "planner/plan/parallel_spec.h"

namespace parplan {

// Hashes of memos that are asked often. A choice that is left out of them costs collisions alone.
struct MeshHash {
  std::size_t operator()(const DeviceMesh& mesh) const {
    std::size_t seed = static_cast<std::size_t>(mesh.dp_shard);
    for (const Axis axis : all_axes) boost::hash_combine(seed, mesh.degree_of(axis));
    for (const Axis axis : mesh.order) boost::hash_combine(seed, static_cast<int>(axis));
    return seed;
  }
};
struct SpecHash {
  std::size_t operator()(const ParallelSpec& spec) const {
    std::size_t seed = MeshHash()(spec.mesh);
    boost::hash_combine(seed, spec.micro_batch);
    boost::hash_combine(seed, spec.sequence_parallel);
    boost::hash_combine(seed, spec.zero_stage);
    boost::hash_combine(seed, static_cast<int>(spec.schedule));
    boost::hash_combine(seed, static_cast<int>(spec.recompute));
    boost::hash_combine(seed, spec.virtual_stages);
    boost::hash_combine(seed, static_cast<int>(spec.cp_method));
    boost::hash_combine(seed, spec.stage_blocks);
    return seed;
  }
};

}  // namespace parplan
