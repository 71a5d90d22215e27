#include "planner/simulator/mesh_views.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "planner/cluster/host_share.h"

namespace parplan {

bool boundaries_are_alike(const Cluster& cluster, const DeviceMesh& mesh) {
  return groups_in_use(cluster, mesh.size()).size() == 1 && cluster.network.levels.size() <= 1 &&
         mesh.stride_of(Axis::pp) % cluster.groups.front().devices_per_node() == 0;
}

Execution MeshViews::execution(int number) const { return execution_of(*environment(number).device, engine_); }

MeshView& MeshViews::of(const DeviceMesh& mesh) {
  if (replica_) {
    const auto [entry, inserted] = replica_views_.try_emplace({mesh, *replica_});
    if (inserted) entry->second = make(mesh);
    return entry->second;
  }
  if (last_ != nullptr && last_->first == mesh) return last_->second;
  const auto [entry, inserted] = views_.try_emplace(mesh);
  last_ = &*entry;
  if (inserted) entry->second = make(mesh);
  return entry->second;
}

MeshView MeshViews::make(const DeviceMesh& mesh) {
  MeshView view;
  const int stages = mesh.degree_of(Axis::pp);
  const auto is_used = [&](Axis axis) {
    return is_planned(axis) && (!may_be_unnamed(axis) || mesh.degree_of(axis) > 1);
  };
  for (const Axis axis : all_axes)
    if (is_used(axis)) view.along[axis] = &networks_.group(mesh, axis);
  view.shard = &networks_.shard(mesh);
  if (mesh.dp_shard > 0) view.replicas = &networks_.replicas(mesh);
  PerAxis<GroupNetwork> along_blocks;
  for (const Axis axis : block_axes)
    if (is_used(axis)) along_blocks[axis] = *view.along[axis];
  const bool exchanges = mesh.cp_ulysses > 1;
  const GroupNetwork exchange = exchanges ? networks_.exchange(mesh) : GroupNetwork{};
  const GroupNetwork keys = exchanges ? networks_.keys(mesh) : GroupNetwork{};
  const NetworkCache::StageDevice* before = nullptr;
  for (int s = 0; s < stages; ++s) {
    const NetworkCache::StageDevice& device =
        replica_ ? networks_.device(mesh, s, *replica_) : networks_.device(mesh, s);
    if (std::exchange(before, &device) == &device) {
      view.environments.push_back(view.environments.back());
      view.capacities.push_back(view.capacities.back());
      view.hosts.push_back(view.hosts.back());
      view.drives.push_back(view.drives.back());
      continue;
    }
    const auto found = std::find_if(environments_.begin(), environments_.end(), [&](const StageEnvironment& known) {
      return known.device == device.device && known.rates == device.rates && known.along == along_blocks &&
             known.exchange == exchange && known.keys == keys;
    });
    view.environments.push_back(static_cast<int>(found - environments_.begin()));
    if (found == environments_.end())
      environments_.push_back({along_blocks, exchange, keys, device.device, device.rates, device.host, device.nvme});
    const std::uint64_t groups =
        replica_ ? groups_of_stage(cluster_, mesh, s, *replica_) : groups_of_stage(cluster_, mesh, s);
    view.capacities.push_back(usable_memory(memory_capacity(cluster_, groups), cluster_.memory_headroom));
    view.hosts.push_back(host_memory(cluster_, mesh, groups));
    view.drives.push_back(nvme_capacity(cluster_, mesh, groups));
    view.is_uniform = view.is_uniform && view.environments.back() == view.environments.front();
  }
  return view;
}

const GroupNetwork& MeshViews::between(const DeviceMesh& mesh, MeshView& view, int from, int to) {
  if (to != from + 1) return networks_.stages(mesh, from, to);
  if (view.next.empty()) {
    const bool alike = boundaries_are_alike(cluster_, mesh);
    for (int s = 0; s + 1 < mesh.degree_of(Axis::pp); ++s)
      view.next.push_back(&networks_.stages(mesh, alike ? 0 : s, alike ? 1 : s + 1));
  }
  return *view.next[static_cast<std::size_t>(from)];
}

}  // namespace parplan
