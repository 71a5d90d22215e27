#pragma once

#include <cstdint>

#include "models/model_spec.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"

namespace parplan {

// The model's graph for sequences of that many tokens, with the ops that the engine runs.
OpGraph graph_of(const ModelSpec& model, std::int64_t sequence_length, const Engine& engine);
inline OpGraph graph_of(const ModelSpec& model, const TrainingSpec& training) {
  return graph_of(model, training.sequence_length, training.engine);
}

}  // namespace parplan
