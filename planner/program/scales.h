#pragma once

#include <cstdint>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout.h"
#include "planner/program/program.h"

// Scales of products in fp8 that follow from the largest magnitudes of earlier casts
// (Engine::scale_history; TransformerEngine@v1.9 pytorch/fp8.py, reduce_and_update_fp8_tensors, at
// the exit of fp8_autocast around the layers of a chunk, and behind the backward of its first
// product).

namespace parplan {

inline bool reduces_scales(const TrainingSpec& training) {
  return training.fp8 && training.engine.scale_history > 0;
}

// The products of these blocks that may be in fp8.
int products_in_fp8(const OpGraph& graph, BlockRange blocks);

// The tensors whose magnitudes a pass on a rank that holds so many products joins: of each product
// its input, weight and output forward, the gradients of its output and input backward.
constexpr std::int64_t magnitudes_of_pass(int products, Phase phase) {
  return (phase == Phase::forward ? 3 : 2) * static_cast<std::int64_t>(products);
}

// What a rank does behind a stage's pass, in order: joins so many magnitudes, reduces them over all
// ranks of the stage where it has several, and makes scales of them.
std::vector<Instruction> reduce_scales(std::int64_t magnitudes, const DeviceMesh& mesh, const Engine& engine);

}  // namespace parplan
