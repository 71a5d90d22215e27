#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "planner/cluster/node_layout.h"
#include "planner/search/suggest_request.h"
#include "planner/suggest.h"
#include "tests/planner/search/random_settings.h"

// Small models on clusters of configs/, to be planned and explained.
namespace parplan::testing {

inline SuggestRequest request_of(const OpGraph& graph, Cluster cluster, std::int64_t batch) {
  SuggestRequest request;
  request.graph = &graph;
  request.model_name = "tiny";
  request.cluster = std::move(cluster);
  request.training.global_batch = batch;
  request.training.sequence_length = graph.sequence;
  request.training.precision = request.cluster.backend() == BackendKind::cpu ? DataType::fp32 : DataType::bf16;
  return request;
}

// The first of a DGX A100's GPUs in each node.
inline Cluster nodes_of(int devices_per_node, int nodes) {
  Cluster cluster = cluster_of("dgx-a100", 16);
  NodeGroup& group = cluster.groups.front();
  group.node = first_devices(group.node, devices_per_node);
  group.nodes = nodes;
  return cluster;
}

inline double step(const StepResult& result) { return result.time.total().value; }

}  // namespace parplan::testing
