#pragma once

#include <optional>
#include <string>

#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"

namespace parplan {

// Bytes are counted in 64 bits. Returns the reason why the memory that a step keeps of its samples
// cannot be counted, or nothing: batches that no cluster holds are refused rather than counted
// wrong. Whatever the layout, a step has no more samples in flight than its global batch.
std::optional<std::string> beyond_counting(const OpGraph& graph, const TrainingSpec& training);

}  // namespace parplan
