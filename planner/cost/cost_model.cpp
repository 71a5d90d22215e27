#include "planner/cost/cost_model.h"

#include <algorithm>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/cost/collective.h"
#include "planner/cost/kernel.h"

namespace parplan {

const GroupNetwork& NetworkCache::group(const DeviceMesh& mesh, Axis axis) {
  const auto [entry, added] = groups_.try_emplace({{mesh.degree, mesh.order}, axis});
  if (added) entry->second = group_network(*cluster_, mesh, axis);
  return entry->second;
}

const GroupNetwork& NetworkCache::stages(const DeviceMesh& mesh, int from_stage, int to_stage) {
  const auto [entry, added] = stages_.try_emplace({{mesh.degree, mesh.order}, from_stage, to_stage});
  if (added) entry->second = stage_network(*cluster_, mesh, from_stage, to_stage);
  return entry->second;
}

CostModel cost_model(NetworkCache& networks, const DeviceMesh& mesh, int stage) {
  const Cluster& cluster = networks.cluster();
  const int stages = mesh.degree_of(Axis::pp);
  PARPLAN_ASSERT(stage >= 0 && stage < stages, fmt::format("stage {} of {}", stage, stages));
  CostModel model{.device = cluster.device,
                  .rates = rates_at(cluster.device, std::min(mesh.size(), cluster.devices_per_node())),
                  .networks = {}};
  const auto set = [&](GroupKind group, const GroupNetwork& network) {
    model.networks[static_cast<std::size_t>(group)] = network;
  };
  set(GroupKind::tensor, networks.group(mesh, Axis::tp));
  set(GroupKind::data, networks.group(mesh, Axis::dp));
  set(GroupKind::pipeline, networks.group(mesh, Axis::pp));
  if (stages > 1) set(GroupKind::tied, networks.stages(mesh, 0, stages - 1));
  if (stage + 1 < stages) set(GroupKind::next, networks.stages(mesh, stage, stage + 1));
  if (stage > 0) set(GroupKind::previous, networks.stages(mesh, stage, stage - 1));
  return model;
}

CostModel cost_model(const Cluster& cluster, const DeviceMesh& mesh, int stage) {
  NetworkCache networks(cluster);
  return cost_model(networks, mesh, stage);
}

Bytes communicated_bytes(const Instruction& instruction) {
  std::int64_t bytes = 0;
  for (const Operand& operand : instruction.operands) bytes = std::max(bytes, operand.bytes);
  return Bytes(bytes);
}

Seconds duration(const Instruction& instruction, const CostModel& model) {
  if (instruction.kind == InstructionKind::kernel)
    return kernel_time(instruction.op, instruction.shape, instruction.type, model.device, model.rates);
  return collective_time(instruction.kind, communicated_bytes(instruction), model.network(instruction.group),
                         model.device.backend);
}

}  // namespace parplan
