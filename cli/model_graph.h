#pragma once

#include <cstdint>
#include <optional>

#include "models/model_spec.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/trained_graph.h"
#include "planner/graph/training_spec.h"

namespace parplan {

// The model's graph for sequences of that many tokens, with the ops that the engine runs, trained
// as `training` says.
OpGraph graph_of(const ModelSpec& model, std::int64_t sequence_length, const TrainingSpec& training);
inline OpGraph graph_of(const ModelSpec& model, const TrainingSpec& training) {
  return graph_of(model, training.sequence_length, training);
}

// What of `training` does not fit the model: names that it lacks.
std::optional<TrainedProblem> problem_with_trained(const ModelSpec& model, const TrainingSpec& training);

}  // namespace parplan
