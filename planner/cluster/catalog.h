#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/cluster/selection.h"

namespace parplan {

// Where the named devices and clusters are: folders of NAME.yaml.
struct ClusterCatalog {
  std::string devices_folder;   // configs/devices
  std::string clusters_folder;  // configs/clusters
};
std::vector<std::string> device_names(const ClusterCatalog& catalog);   // sorted
std::vector<std::string> nvidia_card_names(const ClusterCatalog& catalog);  // of these the ones that work by CUDA
std::vector<std::string> cluster_names(const ClusterCatalog& catalog);  // sorted

// configs/devices/NAME.yaml. ConfigError lists the known names.
DeviceKind find_device(const std::string& name, const ClusterCatalog& catalog);

// The same for --device and `what`, which is of NVIDIA's cards: no other is known there.
DeviceKind find_nvidia_card(const std::string& name, const std::string& what, const ClusterCatalog& catalog);

// A cluster.yaml; a device that is only named is looked up.
Cluster read_cluster(const YamlNode& document, const ClusterCatalog& catalog);

// --device, --network, --devices, --nodes and --device-ids, and what the environment says of this
// machine's devices.
struct ClusterOptions {
  std::optional<std::string> device;  // for texts of nvidia-smi, which name no card, and NCCL's topologies that do not
  std::optional<BytesPerSecond> network;   // line rate of each NIC
  std::optional<int> devices;
  std::optional<int> nodes;
  std::vector<int> device_ids = {};        // of one node, in this order; empty: as they are
  VisibilityVariables environment = {};    // for files that describe one node: this machine, or one like it
};

// A named cluster, a cluster.yaml, the text of `nvidia-smi topo -m` or NCCL's topology (XML), told
// apart by content, cut or repeated to the number of devices asked for. A named cluster, a text of
// nvidia-smi, a topology of NCCL and a cluster.yaml without `nodes` are kinds of nodes, of which
// there may be any number where they have a network; a cluster.yaml with `nodes` or `groups` has no
// more than it says. Of several nodes whole ones are taken, in order. The environment chooses
// devices where a file is one node, never of a named cluster.
Cluster find_cluster(const std::string& name_or_path, const ClusterCatalog& catalog,
                     const ClusterOptions& options = {});

// What is asked for by number, of a cluster that is this machine: device_ids and the environment
// first, then --devices.
void choose_devices(Cluster& this_machine, const ClusterOptions& options);

}  // namespace parplan
