#include "planner/report/launch_line.h"

#include <algorithm>

#include <fmt/format.h>

#include "planner/cluster/visible_devices.h"

namespace parplan {
namespace {

// A word for a POSIX shell: unchanged where nothing in it is special, otherwise in single quotes.
std::string quoted(const std::string& word) {
  constexpr std::string_view plain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-./,:=+@%";
  if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

// The number of ranks on each machine that holds any.
struct MachineRanks {
  int count = 0;
  const NodeGroup* group = nullptr;
  bool operator==(const MachineRanks&) const = default;
};
std::vector<MachineRanks> ranks_by_machine(const Plan& plan) {
  std::vector<MachineRanks> machines;
  int left = plan.spec.mesh.size();
  for (const NodeGroup& group : plan.cluster.groups)
    for (int node = 0; node < group.nodes; ++node)
      for (int device = 0; device < group.devices_per_node() && left > 0; device += group.devices_per_machine()) {
        machines.push_back({.count = std::min({group.devices_per_machine(), group.devices_per_node() - device, left}),
                            .group = &group});
        left -= machines.back().count;
      }
  return machines;
}

// Commands that are started once for all nodes: the order of machines matters where nodes differ.
void add_commands_of_several_nodes(const Plan& plan, const std::vector<MachineRanks>& machines, const std::string& run,
                                   LaunchLine& line) {
  const int ranks = plan.spec.mesh.size();
  const int most = std::ranges::max(machines, {}, &MachineRanks::count).count;
  const auto has_most = [&](const MachineRanks& machine) { return machine.count == most; };
  const bool alike = std::ranges::all_of(machines, has_most);
  // ppr fills node by node, so only the last may have fewer ranks.
  const bool fills = std::all_of(machines.begin(), machines.end() - 1, has_most);
  const bool cores = plan.cluster.backend() == BackendKind::cpu;
  line.commands.push_back(fmt::format("mpirun -n {} --hostfile hosts --map-by {}{} {}", ranks,
                                      fills ? fmt::format("ppr:{}:node", most) : "slot", cores ? " --bind-to core" : "",
                                      run));
  if (alike)
    line.commands.push_back(fmt::format("srun --mpi=pmix --kill-on-bad-exit=1 --nodes {} --ntasks-per-node {} {}",
                                        machines.size(), most, run));
  // torchrun numbers machines in any order, which matters where they are heterogeneous, in racks,
  // or far from one another; and it has no CPU ranks.
  const bool one_kind = std::ranges::all_of(
      machines, [&](const MachineRanks& machine) { return machine.group == machines.front().group; });
  if (alike && !cores && one_kind && !plan.cluster.groups.front().node.devices_per_machine &&
      plan.cluster.network.levels.size() <= 1)
    line.commands.push_back(fmt::format(
        "torchrun --no-python --nnodes {} --nproc-per-node {} --rdzv-backend c10d --rdzv-endpoint node1:29400 {}",
        machines.size(), most, run));
  std::string slots;
  int node = 1;
  const bool unlike = plan.cluster.groups.size() > 1;
  for (auto machine = machines.begin(); machine != machines.end();) {
    const auto end =
        std::find_if(machine, machines.end(), [&](const MachineRanks& other) { return other != *machine; });
    const auto nodes = static_cast<int>(end - machine);
    slots += fmt::format("{}slots={} of node{}{}{}", slots.empty() ? "" : ", ", machine->count, nodes > 1 ? "s " : " ",
                         nodes > 1 ? fmt::format("{} to {}", node, node + nodes - 1) : fmt::format("{}", node),
                         unlike ? fmt::format(" ({})", machine->group->device.name) : "");
    node += nodes;
    machine = end;
  }
  line.notes.push_back(fmt::format("'hosts' holds a line a node, such as 'node1 slots={}', in the cluster's order: {}",
                                   machines.front().count, slots));
}

}  // namespace

LaunchLine launch_line(const Plan& plan, const std::string& plan_file) {
  const Cluster& cluster = plan.cluster;
  LaunchLine line;
  if (!cluster.device_ids.empty()) {
    const std::vector<int> devices(cluster.device_ids.begin(), cluster.device_ids.begin() + plan.spec.mesh.size());
    const VisibilitySetting setting = visibility_of(cluster.backend(), devices);
    line.environment = setting.variables;
    if (!setting.in_this_order)
      line.notes.push_back(fmt::format("the driver shows these devices in its own order, not in that of {}",
                                       setting.variables.back().second));
  }
  const BackendRow& backend = row_of(cluster.backend());
  if (!backend.runs) {
    line.notes.push_back(
        fmt::format("parplan runs nothing on {}: another framework has to carry the plan out", backend.runtime));
    return line;
  }
  if (const Engine& engine = plan.training.engine; !is_own(engine)) {
    line.notes.push_back(fmt::format(
        "the plan is for {}, which has to carry it out: parplan runs plans for its own runtime", engine.title));
    return line;
  }
  const std::string run = "parplan run " + quoted(plan_file);
  const std::vector<MachineRanks> machines = ranks_by_machine(plan);
  if (machines.size() == 1) {
    line.commands.push_back(run);
  } else {
    add_commands_of_several_nodes(plan, machines, run, line);
  }
  return line;
}

std::string shell_line(const LaunchLine& line, std::size_t command) {
  std::string text;
  for (const auto& [name, value] : line.environment) text += name + "=" + quoted(value) + " ";
  if (command < line.commands.size()) return text + line.commands[command];
  if (!text.empty()) text.pop_back();
  return text;
}

std::string write_launch_line(const LaunchLine& line) {
  std::string text;
  const std::size_t lines = std::max<std::size_t>(line.commands.size(), line.environment.empty() ? 0 : 1);
  for (std::size_t i = 0; i < lines; ++i)
    text += fmt::format("{:<9} {}\n", i == 0 ? "start" : "  or", shell_line(line, i));
  for (const std::string& note : line.notes) text += fmt::format("          ({})\n", note);
  return text;
}

}  // namespace parplan
