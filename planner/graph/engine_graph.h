#pragma once

#include "planner/graph/engine.h"
#include "planner/graph/op_graph.h"

namespace parplan {

// The graph with the ops that the engine runs: where it does not fuse attention, the ops on scores
// that attention stands for; where it drops elements, dropout, but in models with RMS norms, which
// are trained without (Touvron et al. 2023, and those after); where its loss is not fused, a copy
// of the logits in fp32; where products of layers are in fp8 (`fp8`) and it casts their inputs
// once, the casts; and with the vocabulary padded as it pads it. parplan's own runtime runs the
// graph as it is.
OpGraph as_run_by(const Engine& engine, OpGraph graph, bool fp8 = false);
// The graph with a cast of each activation that products of layers read.
OpGraph quantized(OpGraph graph);

}  // namespace parplan
