#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/cluster/cluster.h"

namespace parplan {

// The variables by which drivers show programs a part of a machine, as the environment has them;
// absent: not set.
struct VisibilityVariables {
  std::optional<std::string> cuda_visible_devices = {};      // "2,0", "GPU-8932f937"; empty: no device
  std::optional<std::string> cuda_device_order = {};         // PCI_BUS_ID or FASTEST_FIRST
  std::optional<std::string> ze_affinity_mask = {};          // "0,2", "0,1.1"
  std::optional<std::string> ze_flat_device_hierarchy = {};  // FLAT, COMPOSITE or COMBINED
  bool operator==(const VisibilityVariables&) const = default;
};

// One device of a machine. nvidia-smi and files of topologies list them in the order of their bus
// ids: that order counts here.
struct MachineDevice {
  std::string uuid;    // "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"; empty where it is not known
  double speed = 0.0;  // in any unit: CUDA's order FASTEST_FIRST
};

struct SelectionRequest {
  std::string machine;  // for messages: "cluster 'mine'"
  BackendKind backend{};
  std::vector<MachineDevice> devices;
  int tiles_per_card = 1;  // Level Zero: how many devices in a row are tiles of one card
  VisibilityVariables environment = {};
  std::vector<int> device_ids =
      {};  // --device-ids, which count the devices that the environment shows; empty: all of these
};

struct DeviceSelection {
  std::vector<int> devices;  // numbers in SelectionRequest::devices, in the order of ranks
  std::string shown_by;      // "CUDA_VISIBLE_DEVICES='2,0'"; empty where no variable chose
  bool operator==(const DeviceSelection&) const = default;
};

// Which devices a program would get, as CUDA and Level Zero choose them (docs/cluster.md), and of
// these the ones that --device-ids names. A variable speaks for devices of its driver only; cores
// have none. ConfigError where nothing is left, and where a variable cannot be understood without
// the machine.
DeviceSelection select_devices(const SelectionRequest& request);

// What a driver needs to be told so that device i of a program is device `devices[i]` of the
// machine.
struct VisibilitySetting {
  std::vector<std::pair<std::string, std::string>> variables;  // in the order in which to print them
  bool in_this_order = true;  // false: the driver shows the devices, but in its own order
  bool operator==(const VisibilitySetting&) const = default;
};
VisibilitySetting visibility_of(BackendKind backend, const std::vector<int>& devices);

// Leaves a cluster of one node the devices that are selected and notes which they are
// (Cluster::device_ids).
DeviceSelection select_devices(Cluster& cluster, const VisibilityVariables& environment,
                               const std::vector<int>& device_ids);

}  // namespace parplan
