#pragma once

#include "planner/graph/engine.h"
#include "planner/graph/op_graph.h"

namespace parplan {

// The graph with the ops that the engine runs: where it does not fuse attention, the ops on scores
// that attention stands for; where it drops elements, dropout, but in models with RMS norms, which
// are trained without (Touvron et al. 2023, and those after); where its loss is not fused, a copy
// of the logits in fp32; and with the vocabulary padded as it pads it. parplan's own runtime runs
// the graph as it is.
OpGraph as_run_by(const Engine& engine, OpGraph graph);

}  // namespace parplan
