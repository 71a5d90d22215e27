#pragma once

#include <cstdint>

#include "models/model_spec.h"
#include "planner/graph/op_graph.h"

namespace parplan {

// A plain multi-layer perceptron over token embeddings: x <- down(activation(up(x) + bias)) + bias
// per layer, each token by itself, then the head. It has no norms and no residual stream, and
// always biases.
OpGraph build_mlp(const ModelSpec& spec, std::int64_t sequence_length);

}  // namespace parplan
