#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/cluster/catalog.h"
#include "planner/cluster/node_layout.h"
#include "planner/search/suggest_request.h"
#include "planner/suggest.h"

// Small models on clusters of configs/, to be planned and explained.
namespace parplan::testing {

inline const std::string source = PARPLAN_SOURCE_DIR;

inline OpGraph graph_of(const std::string& model, std::int64_t sequence) {
  return build_graph(load_model(source + "/tests/data/models/" + model + ".yaml", "").spec, sequence);
}

inline Cluster cluster_of(const std::string& name, std::optional<int> devices = {}) {
  return find_cluster(name, {source + "/configs/devices", source + "/configs/clusters"},
                      {.device = {}, .network = {}, .devices = devices, .nodes = {}});
}

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
