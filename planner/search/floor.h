#pragma once

#include "planner/base/units.h"
#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training.h"

namespace parplan {

// What any plan on so many devices takes at least, whatever its layout: known before a single
// candidate is made. Never above what a simulation says (a property test holds this).
class Floor {
 public:
  // The graph, the cluster and the training must outlive it.
  Floor(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training);

  // A step on the first `devices` devices: all products of a step, forward and backward, at the
  // highest rate of each device; 0 where a device's is not known.
  Seconds time(int devices) const;
  // The fullest of them by its share, which is no less than that of all together: parameters,
  // gradients, optimizer state and what libraries take.
  Bytes memory(int devices) const;
  // Whether they have not the room for parameters, gradients and optimizer state alone.
  bool lacks_room(int devices) const;

 private:
  const Cluster& cluster_;
  DataType precision_;
  double flops_ = 0.0;  // of a step
  Bytes state_;         // of all devices together
};

}  // namespace parplan
