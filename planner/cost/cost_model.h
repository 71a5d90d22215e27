#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/cluster/group_network.h"
#include "planner/cluster/mesh.h"
#include "planner/program/program.h"

namespace parplan {

// The cost of instructions on one rank of the pipeline. Where heterogeneous devices share it (along
// the other axes), `device` is as slow as the slowest of them in everything: they wait for one
// another.
struct CostModel {
  std::shared_ptr<const DeviceKind> device;
  DeviceRates rates;                          // with as many devices of a node at work as the job uses
  std::map<GroupKey, GroupNetwork> networks;  // of the groups that the rank is in

  const GroupNetwork& network(GroupKey group) const;  // a network of one rank if there is none
};

// The networks that groups see in one cluster, computed once per mesh: a search asks for the same
// ones again and again. The caller owns it, and one thread uses it at a time; the cluster must
// outlive it.
class NetworkCache {
 public:
  explicit NetworkCache(const Cluster& cluster) : cluster_(&cluster) {}
  NetworkCache(Cluster&&) = delete;
  const Cluster& cluster() const { return *cluster_; }
  const GroupNetwork& group(const DeviceMesh& mesh, Axis axis);                        // group_network
  // Hybrid sharding: of the ranks that share out a bucket, and of those that hold the same shard.
  const GroupNetwork& shard(const DeviceMesh& mesh);
  const GroupNetwork& replicas(const DeviceMesh& mesh);
  const GroupNetwork& stages(const DeviceMesh& mesh, int from_stage, int to_stage);    // stage_network
  // The device of a stage, at the rates with as many devices of a node at work as the job uses.
  struct StageDevice {
    std::shared_ptr<const DeviceKind> device;
    DeviceRates rates;
  };
  const StageDevice& device(const DeviceMesh& mesh, int stage);

 private:
  const Cluster* cluster_;
  std::map<std::pair<DeviceMesh, Axis>, GroupNetwork> groups_;
  std::map<std::pair<DeviceMesh, Members>, GroupNetwork> data_parts_;
  std::map<std::tuple<DeviceMesh, int, int>, GroupNetwork> stages_;
  // By the groups at work (bit by group) and the number of devices of a node at work.
  std::map<std::tuple<std::uint64_t, int>, StageDevice> devices_;
};

// tensor, data and pipeline groups see the network of their axis, and parts of the data group their
// own; next and previous what the two ranks of the pipeline see from this one to the other, around
// the ring; tied what the first and the last rank see.
CostModel cost_model(NetworkCache& networks, const DeviceMesh& mesh, int rank);
CostModel cost_model(const Cluster& cluster, const DeviceMesh& mesh, int rank);
// One cost model for each rank of the pipeline, the first rank first.
std::vector<CostModel> cost_models(NetworkCache& networks, const DeviceMesh& mesh);

// Bytes of the whole buffer of a communication (collective_time.h, letter S).
Bytes communicated_bytes(const Instruction& instruction);

// The time of a kernel is kernel_time. The time of a communication is collective_time, counted from
// when all its ranks have arrived.
Seconds duration(const Instruction& instruction, const CostModel& model);

}  // namespace parplan
