#include "cli/model_graph.h"

#include "models/families.h"
#include "planner/graph/engine_graph.h"

namespace parplan {

OpGraph graph_of(const ModelSpec& model, std::int64_t sequence_length, const TrainingSpec& training) {
  return as_trained(training, as_run_by(training, build_graph(model, sequence_length)));
}

// The names are the same for every sequence length.
std::optional<TrainedProblem> problem_with_trained(const ModelSpec& model, const TrainingSpec& training) {
  if (!training.lora && training.trainable.all) return std::nullopt;
  return find_problem(training, build_graph(model, shortest_sample(model)));
}

}  // namespace parplan
