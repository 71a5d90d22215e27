#include "planner/cluster/find_cluster.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/base/text.h"
#include "planner/cluster/nccl/import.h"
#include "planner/cluster/node_layout.h"
#include "planner/cluster/routes.h"
#include "planner/cluster/smi_topology.h"

namespace parplan {
namespace {

bool contains(const std::vector<std::string>& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

bool looks_like_path(const std::string& text) {
  return text.find('/') != std::string::npos || !std::filesystem::path(text).extension().empty();
}

enum class NodesOf { file, any_number };

// A cluster as its file describes it, and whether the file leaves the number of nodes open.
struct Found {
  Cluster cluster;
  NodesOf nodes_of = NodesOf::file;
  bool takes_device = false;  // read with --device and --network, since the file leaves them open
};

Found found_yaml(const YamlNode& document, const ClusterCatalog& catalog) {
  Found found{.cluster = read_cluster(document, catalog)};
  found.nodes_of = document.find("nodes") || document.find("groups") || !found.cluster.device_ids.empty()
                       ? NodesOf::file
                       : NodesOf::any_number;
  return found;
}

Found found_file(const std::string& path, const ClusterCatalog& catalog, const ClusterOptions& options) {
  const std::string text = read_document(path);
  if (is_smi_topology(text)) {
    const SmiTopology topology = read_smi_topology(text, path);
    std::optional<DeviceKind> device;
    if (options.device) device = find_nvidia_card(*options.device, "nvidia-smi topo -m", catalog);
    const bool several_nodes = options.nodes.value_or(1) > 1 || options.devices.value_or(1) > topology.devices();
    std::vector<std::string> missing;
    if (!device) missing.emplace_back("the card (give --device with one of " + join(nvidia_card_names(catalog)) + ")");
    if (several_nodes && !options.network && !topology.nics.empty())
      missing.emplace_back("the speed of its NICs (give --network, such as --network '400 Gbit/s')");
    if (!missing.empty())
      throw ConfigError(Location{.file = path}, "nvidia-smi topo -m does not say " + join(missing, ", nor "));
    return {.cluster = cluster_of(topology, std::filesystem::path(path).stem().string(), *device, options.network),
            .nodes_of = NodesOf::any_number,
            .takes_device = true};
  }
  if (is_xml(text))
    return {.cluster = import_nccl_topology(text, path, catalog, options),
            .nodes_of = NodesOf::any_number,
            .takes_device = true};
  const Location file{.file = path};
  const char* kinds = "a cluster.yaml, the text of nvidia-smi topo -m or NCCL's topology (XML)";
  if (text.find_first_not_of(" \t\r\n") == std::string::npos)
    throw ConfigError(file, fmt::format("the file is empty; expected {}", kinds));
  const std::string ending = std::filesystem::path(path).extension().string();
  const bool is_called_yaml = ending == ".yaml" || ending == ".yml";
  std::optional<YamlNode> document;
  try {
    document = YamlNode::parse(text, path);
  } catch (const ConfigError&) {
    if (is_called_yaml) throw;
  }
  if (!document || (!document->is_map() && !is_called_yaml))
    throw ConfigError(file, fmt::format("expected {}; it is none of them", kinds));
  return found_yaml(*document, catalog);
}

// How many devices the first nodes have together, node by node.
std::vector<int> devices_by_nodes(const Cluster& cluster) {
  std::vector<int> sums;
  for (const NodeGroup& group : cluster.groups)
    for (int node = 0; node < group.nodes; ++node)
      sums.push_back((sums.empty() ? 0 : sums.back()) + group.devices_per_node());
  return sums;
}

// "8, 16, 20, 24"; of a long list the first few and the last.
std::string some_of(const std::vector<int>& sums) {
  constexpr std::size_t shown = 8;
  std::vector<std::string> words;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (sums.size() > shown && i + 2 > shown && i + 1 < sums.size()) continue;
    if (sums.size() > shown && i + 1 == sums.size()) words.emplace_back("...");
    words.push_back(fmt::format("{}", sums[i]));
  }
  return join(words);
}

// The first `nodes` nodes.
void keep_nodes(Cluster& cluster, int nodes) {
  for (NodeGroup& group : cluster.groups) {
    const int kept = std::min(group.nodes, nodes);
    nodes -= kept;
    group.nodes = kept;
  }
  std::erase_if(cluster.groups, [](const NodeGroup& group) { return group.nodes == 0; });
}

// The first `devices` devices of one node.
void keep_first_devices(Cluster& cluster, int devices) {
  NodeGroup& group = cluster.groups.front();
  group.node = first_devices(group.node, devices);
  if (!cluster.device_ids.empty()) cluster.device_ids.resize(static_cast<std::size_t>(devices));
}

// Selects devices of one node; `environment` chooses before --device-ids and --devices do.
void choose_of_node(Cluster& cluster, const ClusterOptions& options, const VisibilityVariables& environment) {
  const int machines = cluster.groups.front().machines();
  if (!options.device_ids.empty() && machines > 1)
    throw ConfigError(fmt::format(
        "--device-ids chooses devices of one machine, and a node of cluster '{}' is {} machines; give --devices",
        cluster.name, machines));
  if (!options.device_ids.empty() && options.devices)
    throw ConfigError("--device-ids says how many devices already; leave --devices out");
  const int there = cluster.devices();
  const DeviceSelection selection =
      select_devices(cluster, machines > 1 ? VisibilityVariables{} : environment, options.device_ids);
  const int shown = cluster.devices();
  if (!options.devices || *options.devices == shown) return;
  if (*options.devices > shown)
    throw ConfigError(
        selection.shown_by.empty()
            ? fmt::format("--devices {}: cluster '{}' has {}", *options.devices, cluster.name,
                          pluralized(there, "device"))
            : fmt::format("--devices {}: {} shows {} of the {} of cluster '{}'; leave --devices out, or let the "
                          "variable show more",
                          *options.devices, selection.shown_by, shown, pluralized(there, "device"), cluster.name));
  keep_first_devices(cluster, *options.devices);
}

// Selects what --devices, --nodes, --device-ids and the environment ask for.
void choose_devices(Cluster& cluster, NodesOf nodes_of, const ClusterOptions& options,
                    const VisibilityVariables& environment) {
  const bool alike = cluster.groups.size() == 1;
  NodeGroup& first = cluster.groups.front();
  const int per_node = first.devices_per_node();
  const bool network = !routes_of(first.node)->uplinks.front().empty();
  const bool any_number = network && nodes_of == NodesOf::any_number;
  const int most = !network ? 1 : any_number ? 1 << 20 : cluster.nodes();
  const Cluster whole = cluster;
  const auto refuse = [&](const std::string& asked) {
    if (!alike) {
      std::vector<std::string> kinds;
      for (const NodeGroup& group : whole.groups)
        kinds.push_back(
            fmt::format("{} of {}", pluralized(group.nodes, "node"), pluralized(group.devices_per_node(), "device")));
      throw ConfigError(
          fmt::format("{}: cluster '{}' has {}, and whole nodes are taken in this order; allowed are 1 to {} nodes, or "
                      "1 to {} devices and {}",
                      asked, cluster.name, join(kinds), most, per_node, some_of(devices_by_nodes(whole))));
    }
    const std::string nodes = !network     ? "no network, so it is one node"
                              : any_number ? "any number of nodes"
                                           : pluralized(most, "node");
    throw ConfigError(
        fmt::format("{}: cluster '{}' has {} a node and {}; allowed are 1 to {}{}", asked, cluster.name,
                    pluralized(per_node, "device"), nodes, per_node,
                    most == 1    ? " devices"
                    : any_number ? fmt::format(" devices and multiples of {}", per_node)
                                 : fmt::format(" devices and multiples of {} up to {}", per_node, per_node * most)));
  };
  const std::string asked_nodes = options.nodes ? fmt::format("--nodes {}", *options.nodes) : "";
  if (options.nodes) {
    if (*options.nodes < 1 || *options.nodes > most) refuse(asked_nodes);
    if (any_number) first.nodes = *options.nodes;
    else keep_nodes(cluster, *options.nodes);
  }
  if (options.devices && options.device_ids.empty()) {
    const int devices = *options.devices;
    const std::string asked = fmt::format("--devices {}{}", devices, options.nodes ? " with " + asked_nodes : "");
    if (devices < 1) refuse(asked);
    if (options.nodes && alike && devices != *options.nodes * per_node && (*options.nodes > 1 || devices > per_node))
      throw ConfigError(fmt::format("{}: {} of cluster '{}' {} {}; leave one of the two out, or make them agree", asked,
                                    pluralized(*options.nodes, "node"), cluster.name,
                                    *options.nodes == 1 ? "has" : "have",
                                    pluralized(*options.nodes * per_node, "device")));
    if (devices <= per_node) {
      if (options.nodes && *options.nodes != 1) refuse(asked);
      keep_nodes(cluster, 1);
    } else if (any_number && !options.nodes) {
      if (devices % per_node != 0 || devices / per_node > most) refuse(asked);
      first.nodes = devices / per_node;
    } else {
      const std::vector<int> sums = devices_by_nodes(cluster);
      const auto found = std::ranges::find(sums, devices);
      if (found == sums.end() || (options.nodes && found + 1 != sums.end())) refuse(asked);
      keep_nodes(cluster, static_cast<int>(found - sums.begin()) + 1);
    }
  }
  if (cluster.nodes() == 1) return choose_of_node(cluster, options, environment);
  if (!options.device_ids.empty())
    throw ConfigError(
        fmt::format("--device-ids chooses devices of one node, and cluster '{}' has {} nodes; give --nodes 1",
                    cluster.name, cluster.nodes()));
}

}  // namespace

std::vector<std::string> device_names(const ClusterCatalog& catalog) {
  return names_of_yaml_files(catalog.devices_folder);
}
std::vector<std::string> cluster_names(const ClusterCatalog& catalog) {
  return names_of_yaml_files(catalog.clusters_folder);
}

std::vector<std::string> nvidia_card_names(const ClusterCatalog& catalog) {
  std::vector<std::string> names = device_names(catalog);
  std::erase_if(names,
                [&](const std::string& name) { return find_device(name, catalog).backend != BackendKind::cuda; });
  return names;
}

DeviceKind find_device(const std::string& name, const ClusterCatalog& catalog) {
  const std::vector<std::string> names = device_names(catalog);
  if (!contains(names, name))
    throw ConfigError(fmt::format("unknown device '{}'; known are {}{}", name, join(names), did_you_mean(name, names)));
  return read_device(YamlNode::load((std::filesystem::path(catalog.devices_folder) / (name + ".yaml")).string()));
}

DeviceKind find_nvidia_card(const std::string& name, const std::string& what, const ClusterCatalog& catalog) {
  if (contains(device_names(catalog), name)) {
    DeviceKind device = find_device(name, catalog);
    if (device.backend == BackendKind::cuda) return device;
    throw ConfigError(fmt::format("--device {}: {} is of NVIDIA's cards, and '{}' works by {}; give one of {}", name,
                                  what, name, parplan::name(device.backend), join(nvidia_card_names(catalog))));
  }
  const std::vector<std::string> cards = nvidia_card_names(catalog);
  throw ConfigError(
      fmt::format("--device: unknown card '{}'; known are {}{}", name, join(cards), did_you_mean(name, cards)));
}

void choose_devices(Cluster& this_machine, const ClusterOptions& options) {
  choose_of_node(this_machine, options, options.environment);
}

Cluster find_cluster(const std::string& name_or_path, const ClusterCatalog& catalog, const ClusterOptions& options) {
  const std::vector<std::string> names = cluster_names(catalog);
  Found found;
  VisibilityVariables environment = options.environment;
  if (contains(names, name_or_path)) {
    found = found_yaml(
        YamlNode::load((std::filesystem::path(catalog.clusters_folder) / (name_or_path + ".yaml")).string()), catalog);
    if (found.cluster.groups.size() == 1) found.nodes_of = NodesOf::any_number;
    environment = {};
  } else if (std::filesystem::exists(name_or_path) || looks_like_path(name_or_path)) {
    found = found_file(name_or_path, catalog, options);
  } else {
    throw ConfigError(fmt::format("unknown cluster '{}'; expected a file or one of {}{}", name_or_path, join(names),
                                  did_you_mean(name_or_path, names)));
  }
  Cluster& cluster = found.cluster;
  if (options.device && !found.takes_device)
    throw ConfigError(
        fmt::format("--device {}: cluster '{}' already says its device, {}; --device is for texts of nvidia-smi topo "
                    "-m and NCCL's topologies",
                    *options.device, cluster.name, device_name(cluster)));
  if (options.network && !found.takes_device) {
    bool any = false;
    for (NodeGroup& group : cluster.groups)
      for (Link& link : group.node.links)
        if (is_of_network(group.node, link)) {
          link.bandwidth = *options.network * nic_reached_share;
          link.line_rate.reset();
          any = true;
        }
    if (!any) throw ConfigError(fmt::format("--network: cluster '{}' has no NICs", cluster.name));
  }
  choose_devices(cluster, found.nodes_of, options, environment);
  if (const auto problem = problem_with(cluster)) throw ConfigError(*problem);
  return cluster;
}

}  // namespace parplan
