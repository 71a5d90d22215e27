#pragma once

#include <optional>
#include <string>

#include "planner/base/units.h"
#include "planner/cluster/cluster.h"
#include "planner/cluster/mesh.h"

namespace parplan {

// What one device has of its machine's host while all devices at work use it alike.
struct HostShare {
  BytesPerSecond link;  // one way; the other way may be used at the same time
  Seconds latency;      // of a copy
  BytesPerSecond memory_bandwidth;
  bool operator==(const HostShare&) const = default;
};

// What one device has of its machine's NVMe drives while all devices at work use them alike.
struct NvmeShare {
  BytesPerSecond read, write;
  Seconds latency;
  bool operator==(const NvmeShare&) const = default;
};
std::optional<NvmeShare> nvme_share(const NodeGroup& group, int active);

// Why plans that keep data on NVMe cannot be timed on the cluster; nothing where they can.
std::optional<std::string> lacks_nvme(const Cluster& cluster);

// With the first `active` devices of a node at work. The link is that of the way over PCIe switches
// to the nearest host bridge, shared with the devices whose way it is, too, unless the file states
// it. Nothing where the cluster does not tell, or where cores are the devices: the host's memory is
// theirs.
std::optional<HostShare> host_share(const NodeGroup& group, int active);

// Why plans that use the host's memory cannot be timed on the cluster; nothing where they can.
std::optional<std::string> lacks_host(const Cluster& cluster);

// What of the host's memory a rank may take on these kinds of device, as bits by their groups in
// the cluster; nothing where that does not state it. The least of heterogeneous machines.
std::optional<Bytes> host_memory(const Cluster& cluster, const DeviceMesh& mesh, std::uint64_t groups);
// Likewise of its NVMe drives.
std::optional<Bytes> nvme_capacity(const Cluster& cluster, const DeviceMesh& mesh, std::uint64_t groups);

}  // namespace parplan
