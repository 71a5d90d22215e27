#pragma once

#include <cstdint>

#include "models/model_spec.h"
#include "planner/graph/op_graph.h"

namespace parplan {

// T5 (Raffel et al. 2020, arXiv:1910.10683): an encoder, and a decoder whose layers attend to what
// the encoder has made of its text.
OpGraph build_encoder_decoder(const ModelSpec& spec, std::int64_t sequence_length);

// The fewest tokens of a sample that leave both sides enough to cut out one span and tell it.
std::int64_t shortest_encoder_decoder_sample(const ModelSpec& spec);

}  // namespace parplan
