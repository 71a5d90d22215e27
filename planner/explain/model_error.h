#pragma once

#include <optional>

#include "planner/cluster/cluster.h"
#include "planner/plan/explanation.h"

namespace parplan {

// From published runs in tests/data/published, which a test simulates anew. They are of one kind of
// GPU: nothing for a cluster of others.
std::optional<ModelError> model_error(const Cluster& cluster);
// The same for a cluster of other accelerators, of the devices of which runs are known.
std::optional<ModelError> model_error_elsewhere(const Cluster& cluster);

}  // namespace parplan
