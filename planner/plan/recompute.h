#pragma once

#include <span>

#include "planner/graph/op_graph.h"

namespace parplan {

// What is kept from forward to backward. `per_stage`: each stage has its own value.
enum class Recompute { none, full, per_stage };
const char* name(Recompute recompute);

// What a block between the first and the last keeps. The forward ops whose results the backward
// reads and does not find are executed again before it, from what is kept.
struct RecomputeRow {
  Recompute kind{};
  const char* name = nullptr;
  // Whether the block keeps a tensor that its backward reads; it keeps its input in any case.
  bool (*keeps)(const OpGraph& graph, const Block& block, TensorId tensor) = nullptr;
};
// All that a stage can choose from.
std::span<const RecomputeRow> recompute_rows();
// InternalError for per_stage.
const RecomputeRow& row_of(Recompute recompute);

}  // namespace parplan
