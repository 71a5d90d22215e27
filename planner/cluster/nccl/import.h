#pragma once

#include <optional>
#include <string>

#include "planner/cluster/catalog.h"
#include "planner/cluster/nccl/xml.h"

namespace parplan {

// The cluster whose nodes are as NCCL's topology file says, one node of them; --nodes and --devices
// repeat it.
//
// The card is told by its PCI device id where a kind of configs/devices is the only one with it,
// else by options.device. Of a vendor's partial file the GPUs are the PCI devices of class 0x03, in
// the order of their bus ids; what it leaves out comes from the device kind (NVLinks of modules on
// a baseboard, PCIe links that are not said) and options.network (the line rate of each NIC, also
// where the file has one). The notes say what was assumed.
//
// ConfigError with file:line:column for what is wrong in the file, and with everything that is
// missing and the options that supply it.
Cluster import_nccl_topology(const std::string& text, const std::string& file_name, const ClusterCatalog& catalog,
                             const ClusterOptions& options);

// The file's topology with all that options and device kind say filled in, as NCCL would find it on
// the machine.
NcclTopology completed(NcclTopology topology, const DeviceKind& device, std::optional<BytesPerSecond> network);

// The only kind of configs/devices that the topology's GPUs can be by their PCI device ids, or
// nothing. ConfigError where they are of different kinds.
std::optional<std::string> device_kind_of(const NcclTopology& topology);

// 90 for compute capability 9.0; nothing for kinds whose PCI device ids parplan does not know.
std::optional<int> compute_capability_of(const std::string& device_kind);

}  // namespace parplan
