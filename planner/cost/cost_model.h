#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "planner/base/hash.h"
#include "planner/cluster/cluster.h"
#include "planner/cluster/group_network.h"
#include "planner/cluster/host_share.h"
#include "planner/cluster/mesh.h"
#include "planner/graph/engine.h"
#include "planner/plan/parallel_spec.h"
#include "planner/program/program.h"

namespace parplan {

// How a rank executes its streams.
struct Execution {
  // Streams, as bits, whose work waits in the compute stream's line, in launch order; that of the
  // others runs beside it. Both ends of a transfer block their stream until it is done; where
  // transfers are in line, sends are posted, and the receiver copies.
  unsigned in_line = 0;
  std::size_t stream_of(Stream stream) const { return in_line >> index_of(stream) & 1u ? 0 : index_of(stream); }
  // Whether the sender goes on at once.
  bool is_posted(const Instruction& instruction) const {
    return instruction.kind == InstructionKind::send && (in_line >> index_of(instruction.stream) & 1u) != 0;
  }
  bool posts_sends() const { return (in_line >> index_of(Stream::send_next) & 1u) != 0; }
  bool operator==(const Execution&) const = default;
};
static_assert(index_of(Stream::compute) == 0);
// CPU ranks: one core does everything, but for reads and writes of files, which threads wait for.
inline constexpr Execution sequential_execution{
    .in_line = ((1u << stream_count) - 1) & ~(1u << index_of(Stream::to_nvme)) & ~(1u << index_of(Stream::from_nvme))};
Execution execution_of(const DeviceKind& device, const Engine& engine);
// What the host of an accelerator takes to submit an op; a CPU's ranks are their own host.
inline Seconds host_per_op(const DeviceKind& device, const Engine& engine) {
  return is_accelerator(device.backend) ? engine.host_per_op : Seconds(0.0);
}

// The cost of instructions on one rank of the pipeline. Where heterogeneous devices share it (along
// the other axes), `device` is as slow as the slowest of them in everything: they wait for one
// another.
struct CostModel {
  std::shared_ptr<const DeviceKind> device;
  DeviceRates rates;                          // with as many devices of a node at work as the job uses
  Execution execution{};
  Seconds host_per_op{};                      // Engine::host_per_op
  bool blocks_launches = false;               // Engine::blocks_launches
  bool fills_outputs = false;                 // Engine::fills_outputs
  bool lists_updates = false;                 // Engine::lists_updates
  std::map<GroupKey, GroupNetwork> networks;  // of the groups that the rank is in
  std::optional<HostShare> host = {};         // absent where cores are the devices, or nothing is known
  std::optional<NvmeShare> nvme = {};         // absent where nothing is known

  const GroupNetwork& network(GroupKey group) const;  // a network of one rank if there is none
};

// The networks that groups see in one cluster, computed once for all meshes that lay such groups
// out alike: a search asks for the same ones again and again. The caller owns it, and one thread
// uses it at a time; the cluster must outlive it. The engine decides what overlaps, and what the
// host costs.
class NetworkCache {
 public:
  explicit NetworkCache(const Cluster& cluster, const Engine& engine = {}) : cluster_(&cluster), engine_(engine) {}
  NetworkCache(Cluster&&, const Engine& engine = {}) = delete;
  const Cluster& cluster() const { return *cluster_; }
  const GroupNetwork& group(const DeviceMesh& mesh, Axis axis);                        // group_network
  // Hybrid sharding: of the ranks that share out a bucket, and of those that hold the same shard.
  const GroupNetwork& shard(const DeviceMesh& mesh);
  const GroupNetwork& replicas(const DeviceMesh& mesh);
  // Hierarchical context parallelism: of the ranks that exchange tokens for heads, and of those
  // that meet one another's keys.
  const GroupNetwork& exchange(const DeviceMesh& mesh);
  const GroupNetwork& keys(const DeviceMesh& mesh);
  // The one that `ranks` consecutive ranks of the tensor axis see (holders_of_copies).
  const GroupNetwork& copies(const DeviceMesh& mesh, int ranks);
  // All ranks of a stage. Where the pipeline is neither the outermost axis nor the innermost, as if
  // it were the innermost: as many ranks on as many nodes.
  const GroupNetwork& stage(const DeviceMesh& mesh);
  const GroupNetwork& stages(const DeviceMesh& mesh, int from_stage, int to_stage);    // stage_network
  const Engine& engine() const { return engine_; }
  // The device of a stage, at the rates with as many devices of a node at work as the job uses.
  struct StageDevice {
    std::shared_ptr<const DeviceKind> device;
    DeviceRates rates;
    std::optional<HostShare> host;
    std::optional<NvmeShare> nvme;
  };
  const StageDevice& device(const DeviceMesh& mesh, int stage);
  // That of one replica's ranks alone, by its coordinate on the data axis.
  const StageDevice& device(const DeviceMesh& mesh, int stage, int replica);

 private:
  const StageDevice& device_of(const DeviceMesh& mesh, std::uint64_t groups);
  const GroupNetwork& of_groups(const DeviceMesh& mesh, int size, int stride);

  const Cluster* cluster_;
  Engine engine_;
  // By the ranks of the mesh, those of a group, and the stride from one of these to the next.
  std::unordered_map<std::tuple<int, int, int>, GroupNetwork, TupleHash> groups_;
  // By the ranks of the mesh, the pipeline's and their stride, and the two stages.
  std::map<std::array<int, 5>, GroupNetwork> stages_;
  // By the groups at work (bit by group) and the number of devices of a node at work.
  std::map<std::tuple<std::uint64_t, int>, StageDevice> devices_;
};

// The networks of the groups of hierarchical context parallelism, and of the neighbours in them.
void set_context_groups(const GroupNetwork& exchange, const GroupNetwork& keys,
                        std::map<GroupKey, GroupNetwork>& networks);

// That of kernels on a device under an engine, without networks and homes.
CostModel kernel_model(std::shared_ptr<const DeviceKind> device, const DeviceRates& rates, const Engine& engine);
// tensor, data and pipeline groups see the network of their axis, and parts of the data and the
// tensor group their own; next and previous what the two ranks of the pipeline see from this one to
// the other, around the ring; tied what the first and the last rank see.
CostModel cost_model(NetworkCache& networks, const DeviceMesh& mesh, int rank);
CostModel cost_model(const Cluster& cluster, const DeviceMesh& mesh, int rank);
// That of one replica, on its own devices, where replicas have unlike numbers of micro-batches;
// else as above.
CostModel cost_model(NetworkCache& networks, const ParallelSpec& spec, int rank, int replica);
// One cost model for each rank of the pipeline, the first rank first, of one unlike replica after
// the other.
std::vector<CostModel> cost_models(NetworkCache& networks, const ParallelSpec& spec);

// Bytes of the whole buffer of a communication (collective_time.h, letter S).
Bytes communicated_bytes(const Instruction& instruction);

// How many kernels it is.
int launches(const Instruction& instruction);
// How many ops the host submits for it: its kernels, and where an optimizer takes tensors in lists
// its share of a list's launch.
double submissions(const Instruction& instruction, bool lists_updates);

// The time of a kernel is kernel_time, with a kernel more for each result that is filled before it
// is written; that of a communication is collective_time, counted from when all its ranks have
// arrived. Copies between the homes and kernels of the host's processor:
// planner/cost/host_time.h.
Seconds duration(const Instruction& instruction, const CostModel& model);

// The time of a kernel alone, without the host's, by where it comes from (kernel_time.h); nothing
// for what is no kernel.
TimeByOrigin kernel_time_by_origin(const Instruction& instruction, const CostModel& model);
// Likewise of a communication alone (collective_time.h); a transfer counts where it arrives.
TimeByCommunicationOrigin communication_time_by_origin(const Instruction& instruction, const CostModel& model);

}  // namespace parplan
