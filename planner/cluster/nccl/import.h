#pragma once

#include <optional>
#include <string>

#include "planner/cluster/find_cluster.h"
#include "planner/cluster/nccl/xml_files.h"

namespace parplan {

// The cluster whose nodes are like the one in NCCL's topology file; --nodes and --devices repeat
// it.
//
// The card is identified by its PCI device id where only one kind of configs/devices has it,
// otherwise by options.device. The GPUs of a vendor's partial file are the PCI devices of class
// 0x03, in the order of their bus ids; what the file leaves out comes from the device kind (NVLinks
// of modules on a baseboard, PCIe links without a speed) and from options.network (the line rate of
// each NIC, also where the file has one). The notes state the assumptions.
//
// Throws ConfigError with file:line:column for errors in the file, and with everything that is
// missing and the options that supply it.
Cluster import_nccl_topology(const std::string& text, const std::string& file_name, const ClusterCatalog& catalog,
                             const ClusterOptions& options);

// The file's topology completed by options and device kind, as NCCL would find it on the machine.
NcclTopology completed(NcclTopology topology, const DeviceKind& device, std::optional<BytesPerSecond> network);

// The only kind of configs/devices that the topology's GPUs can be by their PCI device ids, or
// nothing. Throws ConfigError where they are of different kinds.
std::optional<std::string> device_kind_of(const NcclTopology& topology);

// 90 for compute capability 9.0; nothing for kinds whose PCI device ids parplan does not know.
std::optional<int> compute_capability_of(const std::string& device_kind);

}  // namespace parplan
