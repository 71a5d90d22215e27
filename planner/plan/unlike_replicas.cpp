#include "planner/plan/unlike_replicas.h"

#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace parplan {

std::vector<int> kinds_of_replicas(const Cluster& cluster, const DeviceMesh& mesh) {
  std::vector<int> kinds;
  std::map<std::vector<std::uint64_t>, int> known;
  for (int replica = 0; replica < mesh.degree_of(Axis::dp); ++replica) {
    std::vector<std::uint64_t> stages;
    for (int stage = 0; stage < mesh.degree_of(Axis::pp); ++stage)
      stages.push_back(groups_of_stage(cluster, mesh, stage, replica));
    kinds.push_back(known.try_emplace(std::move(stages), replica).first->second);
  }
  return kinds;
}

std::vector<int> unlike_replicas(const Cluster& cluster, const ParallelSpec& spec) {
  if (spec.replica_micro_batches.empty()) return {0};
  std::vector<int> replicas;
  const std::vector<int> kinds = kinds_of_replicas(cluster, spec.mesh);
  std::set<std::pair<int, int>> known;
  for (int replica = 0; replica < spec.dp(); ++replica) {
    const bool is_new = known.emplace(spec.replica_micro_batches[replica], kinds[replica]).second;
    // Ranks that share out a bucket meet their group and, once, those at their place in others.
    if (is_new || spec.mesh.dp_shard > 0) replicas.push_back(replica);
  }
  return replicas;
}

}  // namespace parplan
