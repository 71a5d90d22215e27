#pragma once

#include "planner/cost/cost_model.h"

namespace parplan {

// A device and links with round numbers: 1 FLOP/s (half precision 2), 1 B/s, no launch floor, hops
// that cost nothing.
inline DeviceKind unit_device(BackendKind backend) {
  DeviceKind device;
  device.name = "unit";
  device.title = "unit device";
  device.backend = backend;
  device.overlaps_communication = backend == BackendKind::cuda;
  device.rates = {{.active = 1,
                   .matrix_fp32 = FlopsPerSecond(1.0),
                   .matrix_half = FlopsPerSecond(2.0),
                   // Kernels are bound by arithmetic.
                   .vector = FlopsPerSecond(1.0), .memory = BytesPerSecond(1e30)}};
  return device;
}

inline GroupNetwork unit_network(int ranks, int nodes = 1) {
  return {.ranks = ranks,
          .nodes = nodes,
          .ring_bandwidth = BytesPerSecond(1.0),
          .tree_bandwidth = BytesPerSecond(1.0),
          .intra_latency = Seconds(0.0),
          .inter_latency = Seconds(0.0),
          .uplink_bandwidth = BytesPerSecond(nodes > 1 ? 1.0 : 0.0)};
}

}  // namespace parplan
