#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/cluster/cluster.h"

namespace parplan {

// Where the named devices and clusters are: folders of NAME.yaml.
struct ClusterCatalog {
  std::string devices_folder;   // configs/devices
  std::string clusters_folder;  // configs/clusters
};
std::vector<std::string> device_names(const ClusterCatalog& catalog);   // sorted
std::vector<std::string> cluster_names(const ClusterCatalog& catalog);  // sorted

// configs/devices/NAME.yaml. ConfigError lists the known names.
DeviceKind find_device(const std::string& name, const ClusterCatalog& catalog);

// A cluster.yaml; a device that is only named is looked up.
Cluster read_cluster(const YamlNode& document, const ClusterCatalog& catalog);

// --device, --network, --devices and --nodes.
struct ClusterOptions {
  std::optional<std::string> device;       // for texts of nvidia-smi, which name no card
  std::optional<BytesPerSecond> network;   // line rate of each NIC
  std::optional<int> devices;
  std::optional<int> nodes;
};

// A named cluster, a cluster.yaml or the text of `nvidia-smi topo -m`, told apart by content, cut or repeated to the
// number of devices asked for. A named cluster, a text of nvidia-smi and a cluster.yaml without `nodes` are kinds of
// nodes, of which there may be any number where they have a network; a cluster.yaml with `nodes` has no more than it says.
Cluster find_cluster(const std::string& name_or_path, const ClusterCatalog& catalog, const ClusterOptions& options = {});

// A short table for people.
std::string describe(const Cluster& cluster);

}  // namespace parplan
