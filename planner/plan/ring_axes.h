#pragma once

#include "planner/cluster/axis.h"
#include "planner/plan/parallel_spec.h"

namespace parplan {

// The axes, beside the pipeline's, whose ranks exchange with their neighbours around a ring; and
// the pipeline's where they exchange with them a second time, on the way back of a V.
inline PerAxis<bool> ring_axes(const ParallelSpec& spec) {
  return {.pp = spec.pp() > 1 && is_v_shaped(spec.schedule),
          .cp = spec.cp() > 1 && spec.cp_method == ContextMethod::ring,
          .tp = spec.tp() > 1 && spec.tp_overlap == TensorOverlap::ring};
}

}  // namespace parplan
