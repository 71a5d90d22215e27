#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"

namespace parplan {

// DataParallel: one process drives all devices, and the first is its master. It alone keeps and
// updates the optimizer's state. For each micro-batch it hands its parameters to the replicas on
// the other devices, gathers the logits of all, computes the loss, scatters its gradient, and sums
// the gradients of all parameters (PyTorch 1.8, torch/nn/parallel/data_parallel.py and
// replicate.py).
std::vector<int> legal_data_methods(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec,
                                    int most);
std::optional<std::string> illegal_master(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec);
void place_master(const OpGraph& graph, const ParallelSpec& spec, Placements& placements);

}  // namespace parplan
