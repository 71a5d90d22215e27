#include "planner/cluster/catalog.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <tuple>

#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/base/text.h"
#include "planner/cluster/node_layout.h"
#include "planner/cluster/routes.h"
#include "planner/cluster/smi_topology.h"

namespace parplan {
namespace {

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code ignored;  // a folder that is not there holds no names
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored))
    if (entry.path().extension() == ".yaml") names.push_back(entry.path().stem().string());
  std::sort(names.begin(), names.end());
  return names;
}

bool contains(const std::vector<std::string>& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

bool looks_like_path(const std::string& text) {
  return text.find('/') != std::string::npos || !std::filesystem::path(text).extension().empty();
}

// A cluster as its file has it, and whether the file leaves the number of nodes open.
struct Found {
  Cluster cluster;
  bool any_number_of_nodes = false;
};

Found found_yaml(const YamlNode& document, const ClusterCatalog& catalog) {
  return {.cluster = read_cluster(document, catalog), .any_number_of_nodes = !document.find("nodes").has_value()};
}

Found found_file(const std::string& path, const ClusterCatalog& catalog, const ClusterOptions& options) {
  const std::string text = read_file(path);
  if (is_smi_topology(text)) {
    const SmiTopology topology = read_smi_topology(text, path);
    std::optional<DeviceKind> device;
    if (options.device) device = find_device(*options.device, catalog);
    const bool several_nodes = options.nodes.value_or(1) > 1 || options.devices.value_or(1) > topology.devices();
    std::vector<std::string> missing;
    if (!device) missing.push_back("the card (give --device with one of " + join(device_names(catalog)) + ")");
    if (several_nodes && !options.network && !topology.nics.empty())
      missing.push_back("the speed of its NICs (give --network, such as --network '400 Gbit/s')");
    if (!missing.empty())
      throw ConfigError(Location{.file = path}, "nvidia-smi topo -m does not say " + join(missing, ", nor "));
    return {.cluster = cluster_of(topology, std::filesystem::path(path).stem().string(), *device, options.network),
            .any_number_of_nodes = true};
  }
  const auto first = text.find_first_not_of(" \t\r\n");
  if (first != std::string::npos && text[first] == '<')
    throw ConfigError(Location{.file = path}, "found XML; expected a cluster.yaml or the text of nvidia-smi topo -m");
  return found_yaml(YamlNode::parse(text, path), catalog);
}

// What --devices and --nodes ask for.
void choose_devices(Cluster& cluster, bool any_number_of_nodes, const ClusterOptions& options) {
  const int per_node = cluster.groups.front().devices_per_node();
  const bool network = !routes_of(cluster.groups.front().node)->uplinks.front().empty();
  const int most = !network ? 1 : any_number_of_nodes ? 1 << 20 : cluster.groups.front().nodes;
  const auto refuse = [&](const std::string& asked) {
    const std::string nodes = !network  ? "no network, so it is one node"
                              : any_number_of_nodes ? "any number of nodes"
                                                    : fmt::format("{} node{}", most, most == 1 ? "" : "s");
    throw ConfigError(fmt::format("{}: cluster '{}' has {} device{} a node and {}; allowed are 1 to {}{}", asked, cluster.name,
                                  per_node, per_node == 1 ? "" : "s", nodes, per_node,
                                  most == 1             ? " devices"
                                  : any_number_of_nodes ? fmt::format(" devices and multiples of {}", per_node)
                                                        : fmt::format(" devices and multiples of {} up to {}", per_node, per_node * most)));
  };
  if (options.nodes) {
    if (*options.nodes < 1 || *options.nodes > most) refuse(fmt::format("--nodes {}", *options.nodes));
    cluster.groups.front().nodes = *options.nodes;
  }
  if (!options.devices) return;
  const int devices = *options.devices;
  const std::string asked = options.nodes ? fmt::format("--devices {} with --nodes {}", devices, *options.nodes) : fmt::format("--devices {}", devices);
  if (devices < 1) refuse(asked);
  if (devices >= per_node) {
    const int nodes = devices / per_node;
    if (devices % per_node != 0 || nodes > most || (options.nodes && nodes != *options.nodes)) refuse(asked);
    cluster.groups.front().nodes = nodes;
    return;
  }
  if (options.nodes && *options.nodes != 1) refuse(asked);
  cluster.groups.front().nodes = 1;
  cluster.groups.front().node = first_devices(cluster.groups.front().node, devices);
}

}  // namespace

std::vector<std::string> device_names(const ClusterCatalog& catalog) { return names_in(catalog.devices_folder); }
std::vector<std::string> cluster_names(const ClusterCatalog& catalog) { return names_in(catalog.clusters_folder); }

DeviceKind find_device(const std::string& name, const ClusterCatalog& catalog) {
  const std::vector<std::string> names = device_names(catalog);
  if (!contains(names, name))
    throw ConfigError(fmt::format("unknown device '{}'; known are {}{}", name, join(names), did_you_mean(name, names)));
  return read_device(YamlNode::load((std::filesystem::path(catalog.devices_folder) / (name + ".yaml")).string()));
}

Cluster find_cluster(const std::string& name_or_path, const ClusterCatalog& catalog, const ClusterOptions& options) {
  const std::vector<std::string> names = cluster_names(catalog);
  Found found;
  bool smi = false;
  if (contains(names, name_or_path)) {
    found = found_yaml(YamlNode::load((std::filesystem::path(catalog.clusters_folder) / (name_or_path + ".yaml")).string()), catalog);
    found.any_number_of_nodes = true;
  } else if (std::filesystem::exists(name_or_path) || looks_like_path(name_or_path)) {
    smi = is_smi_topology(read_file(name_or_path));
    found = found_file(name_or_path, catalog, options);
  } else {
    throw ConfigError(fmt::format("unknown cluster '{}'; expected a file or one of {}{}", name_or_path, join(names),
                                  did_you_mean(name_or_path, names)));
  }
  Cluster& cluster = found.cluster;
  if (options.device && !smi)
    throw ConfigError(fmt::format("--device {}: cluster '{}' already says its device, {}; --device is for texts of nvidia-smi topo -m",
                                  *options.device, cluster.name, cluster.groups.front().device.name));
  if (options.network && !smi) {
    bool any = false;
    for (Link& link : cluster.groups.front().node.links)
      if (link.kind == "network") {
        link.bandwidth = *options.network * nic_reached_share;
        any = true;
      }
    if (!any) throw ConfigError(fmt::format("--network: cluster '{}' has no NICs", cluster.name));
  }
  choose_devices(cluster, found.any_number_of_nodes, options);
  if (const auto problem = problem_with(cluster)) throw ConfigError(*problem);
  return cluster;
}

std::string describe(const Cluster& cluster) {
  const DeviceKind& device = cluster.groups.front().device;
  const DeviceRates rates = rates_at(device, cluster.groups.front().devices_per_node());
  const auto routes = routes_of(cluster.groups.front().node);
  std::string text = fmt::format("{}: {} node{} of {} x {} ({})\n", cluster.name, cluster.groups.front().nodes, cluster.groups.front().nodes == 1 ? "" : "s",
                                 cluster.groups.front().devices_per_node(), device.title, device.name);
  text += fmt::format("  memory    {}, {} of it for libraries; {} reached\n", format_bytes(device.memory_capacity),
                      format_bytes(device.memory_overhead), format_bandwidth(rates.memory));
  // A probe measures what is reached and knows no peak.
  const auto reached = [](FlopsPerSecond rate, FlopsPerSecond of) {
    return format_flop_rate(rate) + " reached" + (of.value > 0.0 ? " of " + format_flop_rate(of) : "");
  };
  text += fmt::format("  fp32      {}\n", reached(rates.matrix_fp32, device.peak_fp32));
  if (rates.matrix_half.value > 0.0) text += fmt::format("  half      {}\n", reached(rates.matrix_half, device.peak_half));
  if (rates.matrix_tf32.value > 0.0) text += fmt::format("  tf32      {}\n", reached(rates.matrix_tf32, device.peak_tf32));

  // Pairs by what lies between them, nearest first.
  const auto name_of = [&](std::size_t i) { return cluster.groups.front().node.vertices[static_cast<std::size_t>(cluster.groups.front().node.devices[i])].name; };
  const auto kinds_of = [&](const Path& path) {
    std::vector<std::string> kinds;
    for (const Arc arc : path.arcs) {
      const std::string& kind = cluster.groups.front().node.links[static_cast<std::size_t>(link_of(arc))].kind;
      if (kinds.empty() || kinds.back() != kind) kinds.push_back(kind);
    }
    return join(kinds, "+");
  };
  std::map<std::tuple<PathClass, double, std::string, double>, std::vector<std::string>> pairs;
  for (std::size_t i = 0; i < routes->between.size(); ++i)
    for (std::size_t j = i + 1; j < routes->between.size(); ++j) {
      const Path& path = routes->between[i][j];
      pairs[{path.distance, -path.bandwidth.value, kinds_of(path), path.latency.value}].push_back(name_of(i) + "-" + name_of(j));
    }
  for (const auto& [key, members] : pairs) {
    const auto& [distance, bandwidth, kinds, latency] = key;
    constexpr std::size_t shown = 8;
    std::vector<std::string> first(members.begin(), members.begin() + static_cast<std::ptrdiff_t>(std::min(shown, members.size())));
    if (members.size() > shown) first.push_back("...");
    text += fmt::format("  {:<9} {}, {}: {}\n", kinds, format_bandwidth(BytesPerSecond(-bandwidth)), format_duration(Seconds(latency)),
                        pairs.size() == 1 && members.size() > 1 ? fmt::format("all {} pairs", members.size()) : join(first));
  }
  if (routes->uplinks.empty() || routes->uplinks.front().empty()) {
    text += "  network   none\n";
  } else {
    std::vector<std::string> ways;
    for (std::size_t i = 0; i < routes->uplinks.size(); ++i) {
      std::vector<std::string> nics;
      for (const Uplink& uplink : routes->uplinks[i]) nics.push_back(cluster.groups.front().node.vertices[static_cast<std::size_t>(uplink.nic)].name);
      ways.push_back(name_of(i) + " by " + join(nics, "+"));
    }
    text += fmt::format("  network   {} a node, {}, oversubscription {}: {}\n", format_bandwidth(routes->network_bandwidth),
                        format_duration(cluster.network.latency), cluster.network.oversubscription, join(ways));
  }
  if (cluster.measured_on) text += fmt::format("  measured  {}\n", *cluster.measured_on);
  for (const std::string& note : cluster.notes) text += fmt::format("  note      {}\n", note);
  return text;
}

}  // namespace parplan
