#pragma once

#include <optional>

#include "planner/cluster/cluster.h"
#include "planner/plan/reasons.h"

namespace parplan {

// The error on published runs of one model in many layouts (tests/data/published), which a test
// simulates again. They are of one kind of GPU: a cluster of other devices gets nothing. Pass the
// nodes that a plan uses alone: what others are like does not bear on it.
std::optional<ModelError> model_error(const Cluster& cluster);
// The same for a cluster of other accelerators, from the devices that have runs.
std::optional<ModelError> model_error_elsewhere(const Cluster& cluster);

}  // namespace parplan
