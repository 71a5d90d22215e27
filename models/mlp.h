#pragma once

#include <cstdint>

#include "models/model_spec.h"
#include "planner/graph/op_graph.h"

namespace parplan {

// A plain multi-layer perceptron over token embeddings: x <- down(activation(up(x) + bias)) + bias
// per layer, each token for itself, then the head. No norms, no residual stream, biases always.
OpGraph build_mlp(const ModelSpec& spec, std::int64_t sequence_length);

}  // namespace parplan
