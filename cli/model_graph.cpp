#include "cli/model_graph.h"

#include "models/families.h"
#include "planner/graph/engine_graph.h"

namespace parplan {

OpGraph graph_of(const ModelSpec& model, std::int64_t sequence_length, const Engine& engine) {
  return as_run_by(engine, build_graph(model, sequence_length));
}

}  // namespace parplan
