#pragma once

#include "planner/base/units.h"
#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/placement.h"
#include "planner/graph/training_spec.h"

namespace parplan {

// The FLOPs of the products in a sample's forward and backward of one of the graph's blocks.
double product_flops(const OpGraph& graph, const Block& block);

// Lower bounds for any plan on a number of devices, whatever its layout: known before a single
// candidate is made. They never exceed the simulation (a property test holds this).
class DeviceCountBound {
 public:
  // The graph, the cluster and the training must outlive it.
  // `homes`: of all layouts that are looked at.
  DeviceCountBound(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                   const StateHomes& homes = {});

  // The time of a step on the first `devices` devices: all products of a step, forward and
  // backward, at the highest rate of each device; 0 where a device's rate is unknown.
  Seconds time(int devices) const;
  // The memory of the fullest of them by its share, which is at least that of all together:
  // parameters, gradients, optimizer state and the memory of libraries.
  // `others`: bytes that are known to be held beside these, by all devices together.
  Bytes memory(int devices, double others = 0.0) const;
  // Whether parameters, gradients, optimizer state and `others` do not fit on them.
  bool lacks_room(int devices, double others = 0.0) const;

 private:
  const Cluster& cluster_;
  DataType precision_;
  double flops_ = 0.0;  // of a step
  Bytes state_;         // of all devices together
};

}  // namespace parplan
