#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planner/base/error.h"
#include "planner/cluster/nccl/graph.h"

namespace parplan {

// NCCL's topology files (NCCL_TOPO_FILE, NCCL_TOPO_DUMP_FILE) as they are, checked element by
// element: the format of NVIDIA/nccl src/graph/xml.cc and topo.cc at 5067397c. Two kinds exist:
// those that NCCL captured on a machine, and those that cloud vendors ship for NCCL to complete on
// theirs, without <gpu>, <nvlink> and <net>.

struct NcclNvlink {
  std::int64_t target = 0;  // bus id
  std::string target_name;  // as written
  int target_class = 0;     // PCI class of the other end: a GPU, an NVSwitch or a CPU
  int count = 0;
  Location where;
};

struct NcclGpu {
  int dev = 0;                 // NVML's number
  std::optional<int> rank;     // NCCL leaves out GPUs without one
  int compute_capability = 0;  // 90 for 9.0
  bool direct_rdma = false;
  std::vector<NcclNvlink> nvlinks;
  double c2c_bandwidth = 0.0;  // GB/s to the CPU; 0 where absent
  Location where;
};

struct NcclNet {
  std::string name;
  int dev = 0;
  int megabits = 0;  // per second; 0 where the file has none: NCCL assumes 10000
  float latency = 0.0F;
  int port = 0;
  std::optional<std::uint64_t> guid;
  bool direct_rdma = false;
  bool collectives = false;  // whether switches reduce (SHARP)
  std::optional<int> rail;
  std::optional<int> plane;
  Location where;
};

struct NcclPci {
  std::int64_t bus_id = 0;
  // As written; empty where this is no PCI device but NCCL's own place for NICs that are none.
  std::string bus_name;
  std::optional<int> pci_class;  // 0x030200
  std::uint64_t device = 0;      // vendor, device, subsystem vendor, subsystem device: 16 bits each
  std::string link_speed;        // as written, "16.0 GT/s PCIe"; empty where unknown
  int link_width = 0;            // lanes; 0 where unknown
  std::optional<NcclGpu> gpu;
  bool has_nic = false;
  std::vector<NcclNet> nets;
  std::vector<NcclPci> children;
  std::vector<std::int64_t> peers;  // <pcilink>: switches that reach this one directly
  Location where;

  bool is_gpu() const { return pci_class && *pci_class >> 16 == 0x03; }
  bool is_nic() const { return has_nic || (pci_class && *pci_class >> 16 == 0x02); }
  int vendor_id() const { return static_cast<int>(device >> 48); }
  int device_id() const { return static_cast<int>(device >> 32 & 0xffff); }
};

enum class CpuArchitecture { unknown, x86, arm, power };
enum class CpuVendor { unknown, intel, amd, zhaoxin };

struct NcclCpu {
  int numa = 0;
  std::optional<std::uint64_t> host;
  CpuArchitecture architecture{};
  CpuVendor vendor{};
  int family = 0;
  int model = 0;
  std::vector<NcclPci> children;
  Location where;
};

struct NcclTopology {
  std::string file;
  std::vector<NcclCpu> cpus;
  std::vector<std::string> notes;  // elements left out
};

// Whether the text begins as XML does.
bool is_xml(const std::string& text);

// Throws ConfigError with file:line:column for text that is no topology file of NCCL or contradicts
// itself; for other XML about topologies it says what it is.
NcclTopology read_nccl_topology(const std::string& text, const std::string& file_name);

// NCCL's graph files (NCCL_GRAPH_FILE, NCCL_GRAPH_DUMP_FILE), in the order of the file.
std::vector<NcclGraph> read_nccl_graphs(const std::string& text, const std::string& file_name);

// All PCI devices of the topology, parents first, in the order of the file.
std::vector<const NcclPci*> pci_devices(const NcclTopology& topology);
std::vector<NcclPci*> pci_devices(NcclTopology& topology);

// 1 to 6 for "2.5 GT/s" to "64.0 GT/s PCIe"; nothing for "" and "Unknown speed".
std::optional<int> pcie_generation(const std::string& link_speed);

// Broadcom's Gen4 and Gen5 switches appear as two levels although each port has its full rate, so
// NCCL merges the second into the first. This is the generation of such a switch by its ids, 0 for
// others. Level 0 is the upper one.
int broadcom_generation(std::uint64_t device, int level);

// NCCL's figures, in GB/s one way (src/graph/topo.h, topo.cc).
double nvlink_bandwidth(int compute_capability);  // one link
double inter_cpu_bandwidth(const NcclCpu& cpu);   // 5000, meaning no limit, for CPUs unknown to NCCL

}  // namespace parplan
