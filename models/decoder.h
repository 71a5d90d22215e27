#pragma once

#include <cstdint>

#include "models/model_spec.h"
#include "planner/graph/op_graph.h"

namespace parplan {

// Decoder-only transformers: what a family does differently is a field of the spec, not a case
// here. Blocks: "embedding", "layers.0" ..., "head". Weights are [out, in].
OpGraph build_decoder(const ModelSpec& spec, std::int64_t sequence_length);

}  // namespace parplan
