#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/cluster/cluster.h"

namespace parplan {

// The variables with which drivers show programs a part of a machine, as the environment has them;
// absent: not set.
struct VisibilityVariables {
  std::optional<std::string> cuda_visible_devices = {};      // "2,0", "GPU-8932f937"; empty: no device
  std::optional<std::string> cuda_device_order = {};         // PCI_BUS_ID or FASTEST_FIRST
  std::optional<std::string> ze_affinity_mask = {};          // "0,2", "0,1.1"
  std::optional<std::string> ze_flat_device_hierarchy = {};  // FLAT, COMPOSITE or COMBINED
  bool operator==(const VisibilityVariables&) const = default;
};

// One device of a machine. nvidia-smi and topology files list devices in the order of their bus
// ids, and so does parplan.
struct MachineDevice {
  std::string uuid;    // "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"; empty where unknown
  double speed = 0.0;  // in any unit, for CUDA's order FASTEST_FIRST
};

struct SelectionRequest {
  std::string machine;  // for messages: "cluster 'mine'"
  BackendKind backend{};
  std::vector<MachineDevice> devices;
  int tiles_per_card = 1;  // Level Zero: number of consecutive devices that are tiles of one card
  VisibilityVariables environment = {};
  // --device-ids, which count the devices that the environment shows; empty: all of these.
  std::vector<int> device_ids = {};
};

struct DeviceSelection {
  std::vector<int> devices;  // numbers in SelectionRequest::devices, in the order of ranks
  std::string shown_by;      // "CUDA_VISIBLE_DEVICES='2,0'"; empty where no variable chose
  bool operator==(const DeviceSelection&) const = default;
};

// The devices that a program would get, as CUDA and Level Zero choose them (docs/cluster.md),
// reduced to those that --device-ids names. A variable applies to devices of its driver only, and
// to no cores. Throws ConfigError where nothing is left, and where a variable cannot be understood
// without the machine.
DeviceSelection select_devices(const SelectionRequest& request);

// The settings of a driver with which device i of a program is device `devices[i]` of the machine.
struct VisibilitySetting {
  std::vector<std::pair<std::string, std::string>> variables;  // in the order in which to print them
  bool in_this_order = true;  // false: the driver shows the devices, but in its own order
  bool operator==(const VisibilitySetting&) const = default;
};
VisibilitySetting visibility_of(BackendKind backend, const std::vector<int>& devices);

// Reduces a cluster of one node to the selected devices and records their numbers
// (Cluster::device_ids).
DeviceSelection select_devices(Cluster& cluster, const VisibilityVariables& environment,
                               const std::vector<int>& device_ids);

}  // namespace parplan
