#pragma once

#include <cstdint>

#include "models/model_spec.h"
#include "planner/graph/op_graph.h"

namespace parplan {

// Decoder-only transformers with the norm before each branch (GPT-2, Llama, Mistral, Qwen2 and what lies between).
// Blocks: "embedding", "layers.0" ..., "head". Weights are [out, in].
OpGraph build_decoder(const ModelSpec& spec, std::int64_t sequence_length);

}  // namespace parplan
