#pragma once

#include <functional>
#include <span>
#include <vector>

#include "planner/base/units.h"

namespace parplan {

// Shares out micro-batches among replicas, by their place in `kinds`, so that the slowest is as
// fast as it can be; ties go to the first. `kinds` names for each the first replica as fast.
// `time` of a kind with a number of micro-batches, which never falls as that grows. Each has one
// at least: `micro_batches` is no less than the number of replicas.
std::vector<int> balanced_shares(std::span<const int> kinds, int micro_batches,
                                 const std::function<Seconds(int kind, int micro_batches)>& time);

}  // namespace parplan
