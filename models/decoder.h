#pragma once

#include <cstdint>

#include "models/model_spec.h"
#include "planner/graph/op_graph.h"

namespace parplan {

// Transformers of one stack, decoders and encoders: where families differ, the spec has a field and
// not a case here. The blocks are "embedding", "layers.0" ... and "head". Weights are [out, in].
OpGraph build_decoder(const ModelSpec& spec, std::int64_t sequence_length);

}  // namespace parplan
