#pragma once

#include "planner/plan/parallel_spec.h"

namespace parplan {

// Whether `spec` is `other` but for what its stages recompute: each all that its counterpart does,
// and some more. Its calls then do the same work in the same order and more, and it is no faster (a
// property test holds this).
bool recomputes_more(const ParallelSpec& spec, const ParallelSpec& other);

}  // namespace parplan
