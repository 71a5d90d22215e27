#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/search/node_group_arrangements.h"
#include "planner/search/search.h"
#include "planner/search/space.h"

namespace parplan {

// A request for a plan.
struct SuggestRequest {
  const OpGraph* graph = nullptr;  // built for training.sequence_length
  std::string model_text;          // the model.yaml that the plan carries
  std::string model_name;
  Cluster cluster;
  TrainingSpec training;
  // Where nobody gave a precision: the one for the devices that a plan uses. Empty: the training's.
  PrecisionOf precision_of;
  LayoutRequest layout;
  SearchOptions options;
  // Where changes that would make the request fit are looked for, which need not leave the memory
  // free that was asked for: how much plans leave free where they can (Cluster::memory_headroom).
  double headroom_of_remedies = 0.0;
  // Used to look for changes that would make the request fit, where the caller can supply them: the
  // graph for sequences of another length; that of the same length where other parameters are
  // trained (nothing where the model lacks these); and the cluster with another number of devices
  // of the same kind (nothing where there is no such cluster).
  std::function<OpGraph(std::int64_t sequence_length)> graph_of_length;
  std::function<std::optional<OpGraph>(const TrainingSpec& training)> graph_of_training;
  std::function<std::optional<Cluster>(int devices)> cluster_of;
};

}  // namespace parplan
