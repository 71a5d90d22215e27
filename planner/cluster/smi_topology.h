#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/cluster/cluster.h"

namespace parplan {

// The matrix that `nvidia-smi topo -m` prints: how each pair of GPUs and NICs is connected.
//
// It is read with everything that copies of it contain: ANSI escapes, tabs or spaces, missing
// affinity columns, columns that ran together (NIC7NIC8, PXBSYS), rows that are cut off or missing
// where the other half of the matrix has the same cells, NICs named by their drivers (mlx5_0), the
// old SOC for SYS, comments and prompts before the header.
struct SmiTopology {
  std::vector<std::string> gpus;  // "GPU0" ..., in the order of the columns
  std::vector<std::string> nics;  // "NIC0" or "mlx5_0" ...
  // [end][end], GPUs first: "X", "NV12", "PIX", "PXB", "PHB", "NODE", "SYS"; empty between two NICs
  // whose rows are missing.
  std::vector<std::vector<std::string>> connection;
  std::vector<std::optional<std::string>> numa;  // [GPU]: NUMA affinity
  std::vector<std::string> notes;                // what was repaired

  int devices() const { return static_cast<int>(gpus.size()); }
  bool operator==(const SmiTopology&) const = default;
};

// Whether the text has the header of such a matrix.
bool is_smi_topology(const std::string& text);

// ConfigError with the line that is incomplete, unknown or contradictory.
SmiTopology read_smi_topology(const std::string& text, const std::string& file_name);

// The node that the matrix describes. The matrix names neither card nor speeds: they come from the
// device kind, from `network` (the line rate of each NIC; without it NICs are left out) and from
// NCCL's figures. Throws ConfigError where the NVLinks do not fit the device kind.
Cluster cluster_of(const SmiTopology& topology, const std::string& name, const DeviceKind& device,
                   std::optional<BytesPerSecond> network);

}  // namespace parplan
