#pragma once

#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/cluster/mesh.h"
#include "planner/cost/cost_model.h"
#include "planner/graph/engine.h"
#include "planner/plan/spec_hash.h"

namespace parplan {

// What blocks see of the cluster on a rank of the pipeline.
struct StageEnvironment {
  PerAxis<GroupNetwork> along;  // that blocks communicate over
  // The context axis's parts, where it has such (DeviceMesh::cp_ulysses); of one rank else.
  GroupNetwork exchange, keys;
  std::shared_ptr<const DeviceKind> device;
  DeviceRates rates;
  std::optional<HostShare> host;
  std::optional<NvmeShare> nvme;
};

// The part of the cluster that a mesh uses.
struct MeshView {
  std::vector<int> environments;            // by rank of the pipeline: their numbers
  bool is_uniform = true;                   // a single environment
  PerAxis<const GroupNetwork*> along;       // of the planned axes; null where one is not used
  const GroupNetwork* shard = nullptr;      // over which ZeRO shards: the data axis's, or a part of it
  const GroupNetwork* replicas = nullptr;   // of that part; null without hybrid sharding
  std::vector<const GroupNetwork*> next;    // by rank but the last; empty until asked for
  std::vector<Bytes> capacities;            // by rank
  std::vector<std::optional<Bytes>> hosts;  // by rank: what it may take of the host's memory, where that is known
  std::vector<std::optional<Bytes>> drives;  // likewise of its NVMe drives
};

// Whether every boundary between stages looks like the first: with whole nodes per stage, and no
// network levels above the nodes.
bool boundaries_are_alike(const Cluster& cluster, const DeviceMesh& mesh);

// Views of one cluster by the meshes that are laid over it, each made once. The cluster must
// outlive it; used by one thread.
class MeshViews {
 public:
  MeshViews(const Cluster& cluster, const Engine& engine)
      : cluster_(cluster), engine_(engine), networks_(cluster, engine) {}

  MeshView& of(const DeviceMesh& mesh);
  // The network between two ranks of the pipeline: each and the next, or around the ring.
  const GroupNetwork& between(const DeviceMesh& mesh, MeshView& view, int from, int to);

  const StageEnvironment& environment(int number) const { return environments_[static_cast<std::size_t>(number)]; }
  Execution execution(int environment) const;
  // Whether one stream carries out all that ranks of an environment do.
  bool is_sequential(int environment) const { return execution(environment) == sequential_execution; }

  const Cluster& cluster() const { return cluster_; }
  NetworkCache& networks() { return networks_; }

  // The replica with unlike micro-batches whose devices alone are seen, by its coordinate on the
  // data axis. None where replicas are alike.
  void see_replica(std::optional<int> replica) { replica_ = replica; }
  std::optional<int> replica() const { return replica_; }

 private:
  MeshView make(const DeviceMesh& mesh);

  const Cluster& cluster_;
  Engine engine_;
  NetworkCache networks_;
  std::vector<StageEnvironment> environments_;
  std::unordered_map<DeviceMesh, MeshView, MeshHash> views_;
  std::pair<const DeviceMesh, MeshView>* last_ = nullptr;  // that was asked for
  std::optional<int> replica_;
  std::map<std::pair<DeviceMesh, int>, MeshView> replica_views_;
};

}  // namespace parplan
