#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/cluster/visible_devices.h"

namespace parplan {

// Where the named devices and clusters are: folders of NAME.yaml.
struct ClusterCatalog {
  std::string devices_folder;   // configs/devices
  std::string clusters_folder;  // configs/clusters
};
std::vector<std::string> device_names(const ClusterCatalog& catalog);       // sorted
std::vector<std::string> nvidia_card_names(const ClusterCatalog& catalog);  // those of them that work with CUDA
std::vector<std::string> cluster_names(const ClusterCatalog& catalog);      // sorted

// configs/devices/NAME.yaml. ConfigError lists the known names.
DeviceKind find_device(const std::string& name, const ClusterCatalog& catalog);

// The same for --device and `what`, an input that describes NVIDIA's cards only.
DeviceKind find_nvidia_card(const std::string& name, const std::string& what, const ClusterCatalog& catalog);

// A cluster.yaml; a device that is given by name is looked up.
Cluster read_cluster(const YamlNode& document, const ClusterCatalog& catalog);

// --device, --network, --devices, --nodes and --device-ids, and what the environment says about
// this machine's devices.
struct ClusterOptions {
  // For texts of nvidia-smi, which name no card, and for NCCL topologies that do not.
  std::optional<std::string> device;
  std::optional<BytesPerSecond> network;   // line rate of each NIC
  std::optional<int> devices;
  std::optional<int> nodes;
  std::vector<int> device_ids = {};      // of one node, in this order; empty: all of them
  VisibilityVariables environment = {};  // for files that describe one node: this machine, or one like it
};

// A named cluster, a cluster.yaml, the text of `nvidia-smi topo -m` or NCCL's topology (XML), told
// apart by content, and cut or repeated to the number of devices asked for. A named cluster, a text
// of nvidia-smi, a topology of NCCL and a cluster.yaml without `nodes` are kinds of nodes, of which
// there may be any number if they have a network; a cluster.yaml with `nodes` or `groups` is
// exactly what it says. Several nodes are taken whole and in order. The environment chooses devices
// where a file is one node, never in a named cluster.
Cluster find_cluster(const std::string& name_or_path, const ClusterCatalog& catalog,
                     const ClusterOptions& options = {});

// Selects by number in a cluster that is this machine: device_ids and the environment first, then
// --devices.
void choose_devices(Cluster& this_machine, const ClusterOptions& options);

}  // namespace parplan
