#pragma once

#include "planner/graph/op_graph.h"
#include "planner/validate/stated_run.h"

namespace parplan {

// The graph of a published run's model, for its own sequence length.
OpGraph graph_of_published(const StatedModel& stated);

}  // namespace parplan
