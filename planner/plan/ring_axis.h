#pragma once

#include <optional>

#include "planner/plan/parallel_spec.h"

namespace parplan {

// The axis, beside the pipeline's, whose ranks exchange with their neighbours around a ring.
inline std::optional<Axis> ring_axis(const ParallelSpec& spec) {
  return spec.cp() > 1 && spec.cp_method == ContextMethod::ring ? std::optional(Axis::cp) : std::nullopt;
}

}  // namespace parplan
