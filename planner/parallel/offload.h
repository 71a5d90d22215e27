#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"

namespace parplan {

// What is in host memory or on NVMe (planner/plan/offload.h). With the optimizer's state there,
// reduced gradients are copied to the host while the backward goes on, its processor updates this
// rank's shard, and the parameters are copied back. With activations there, what a layer's forward
// keeps is copied out while the next ones run, and back while the backward of the layer behind it
// runs. Sums of gradients and parameters go there only with the optimizer's state (`wrong_with`),
// and parameters where each rank has a shard of them (ZeRO-3), or alone has them. `offload_layers`
// goes with activations. Another engine than parplan's own takes activations alone, of some layers,
// where its file says that it has that.
std::vector<int> legal_offloads(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec, int most);
std::optional<std::string> illegal_offload(const OpGraph& graph, const TrainingSpec& training,
                                           const ParallelSpec& spec);
void place_offload(const OpGraph& graph, const ParallelSpec& spec, Placements& placements);

}  // namespace parplan
