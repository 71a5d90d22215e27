#include "planner/plan/unlike_replicas.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

namespace parplan {

std::vector<int> kinds_of_replicas(const Cluster& cluster, const DeviceMesh& mesh) {
  // groups_of_stage of every stage of every replica, in one go over the ranks.
  const int of_data = mesh.degree_of(Axis::dp), of_pipeline = mesh.degree_of(Axis::pp);
  const int apart = mesh.stride_of(Axis::dp), stages_apart = mesh.stride_of(Axis::pp);
  const auto replicas = static_cast<std::size_t>(of_data);
  std::vector<std::vector<std::uint64_t>> stages(
      replicas, std::vector<std::uint64_t>(static_cast<std::size_t>(of_pipeline), 0));
  for (int rank = 0, group = 0, end = cluster.groups.front().devices(); rank < mesh.size(); ++rank) {
    while (rank >= end) end += cluster.groups[static_cast<std::size_t>(++group)].devices();
    stages[static_cast<std::size_t>(rank / apart % of_data)]
          [static_cast<std::size_t>(rank / stages_apart % of_pipeline)] |= std::uint64_t{1} << group;
  }
  std::vector<int> kinds;
  std::map<std::vector<std::uint64_t>, int> known;
  for (std::size_t replica = 0; replica < replicas; ++replica)
    kinds.push_back(known.try_emplace(std::move(stages[replica]), static_cast<int>(replica)).first->second);
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

std::optional<std::string> unlike_last_backwards(const Schedule& schedule, const ParallelSpec& spec) {
  const std::set<int> counts(spec.replica_micro_batches.begin(), spec.replica_micro_batches.end());
  std::map<int, Action> last;  // by stage: of one of the replicas
  for (const std::vector<Action>& actions : schedule.ranks)
    for (const Action& action : actions) {
      if (flow_of(action.phase) != Flow::backward || !counts.contains(action.micro_batch + 1)) continue;
      const Action& other = last.emplace(action.stage, action).first->second;
      if (other.phase == action.phase) continue;
      const bool is_whole = action.phase == Phase::backward;
      return fmt::format(
          "{} is a whole backward and {} the first part of one, and both are the last of replicas with unlike numbers "
          "of micro-batches, which reduce gradients together: write both alike",
          write_action(is_whole ? action : other), write_action(is_whole ? other : action));
    }
  return std::nullopt;
}

}  // namespace parplan
