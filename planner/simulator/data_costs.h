#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include "planner/base/hash.h"
#include "planner/base/units.h"
#include "planner/cost/contention.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"
#include "planner/plan/spec_hash.h"
#include "planner/simulator/block_shapes.h"
#include "planner/simulator/mesh_views.h"

namespace parplan {

// The costs of the work around one bucket.
struct BucketCosts {
  Seconds gather;        // of a block's parameters for its forward
  Seconds gather_again;  // the same for its backward: nothing where it has none
  Seconds regather;      // of those that are updated, at the end of the step
  Seconds reduce, accumulate, clear, begin_clear, norm, update;
  // Muon's work on matrices, by the rank that does it for all that share out the state; and what
  // goes over the data axis before and after it.
  Seconds orthogonalize, exchange;
  Seconds across;  // hybrid sharding: of the sum of a shard over its replicas
  Seconds to_host, from_host;  // copies of gradients and of updated parameters, where the host updates
  Seconds read, write;         // by an update, of what is on NVMe
  // Copies of a block's parameters to the device, before each of its gathers, where they are
  // elsewhere; and for its backward.
  Seconds up, up_again;
  Seconds read_up, read_again;  // from NVMe before these, where they are there
  // A copy of sums of gradients on the host, each way in a micro-batch: not back before the
  // first, and `to_host` after the last.
  Seconds sum;
  // The same to and from NVMe, where they are there; and of this rank's shard.
  Seconds sum_read, sum_write;
  Seconds shard_read, shard_write;
  // With a master, of every micro-batch: parameters to the replicas, and their gradients back.
  Seconds hand_out, collect;
};

// A collective of a reduction, and what it takes from kernels beside it.
struct DataReduction {
  Seconds duration;
  Contention takes;
};

// What the buckets of a stage cost.
struct DataCosts {
  std::vector<BucketCosts> own;  // by Block::kind
  BucketCosts tied;
  // Those behind a block's last backward, likewise; none is known where copies take turns with
  // them.
  std::vector<std::vector<DataReduction>> reductions;
  // Bytes of parameters, gradients and optimizer, likewise; the tied parameter used twice.
  std::vector<std::int64_t> own_state;
  std::int64_t tied_state = 0;
};

// What the state of blocks costs over the data axis, computed once for each layout of it, network
// and environment. What it refers to must outlive it; used by one thread.
class KnownDataCosts {
 public:
  KnownDataCosts(const OpGraph& graph, const TrainingSpec& training, MeshViews& views)
      : graph_(graph), training_(training), views_(views) {}

  // `shapes`: of any stage's blocks; they differ in nothing that state depends on.
  const DataCosts& of(const ParallelSpec& spec, const Placements& placements, const BlockShapes& shapes,
                      const MeshView& view, int environment);

 private:
  std::vector<DataReduction> reductions_of(const BucketElements& trained, const ParallelSpec& spec,
                                           const DataShards& shards, const MeshView& view,
                                           const StageEnvironment& where) const;

  struct Key {
    ParallelSpec spec;  // its bucket_key
    const GroupNetwork* network = nullptr;
    int environment = 0;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const {
      std::size_t seed = SpecHash()(key.spec);
      add_hash(seed, std::hash<const GroupNetwork*>()(key.network));
      add_hash(seed, static_cast<std::size_t>(key.environment));
      return seed;
    }
  };

  const OpGraph& graph_;
  const TrainingSpec& training_;
  MeshViews& views_;
  std::unordered_map<Key, DataCosts, Hash> costs_;
};

}  // namespace parplan
