#pragma once

#include <cstdint>

#include "planner/graph/op_kind.h"

// Ops on fused queries, keys and values: what attention and the norms of queries and keys share.
namespace parplan {

constexpr std::int64_t fused_width(const OpShape& s) {
  return (s.heads + 2 * s.kv_heads) * s.head_dim;
}
constexpr std::int64_t fused_elements(const OpShape& s) {
  return s.sequence * s.batch * fused_width(s);
}
inline constexpr OperandSize fused{fused_elements};

// The input's granules are groups of one key/value head.
void localize_heads(const LocalOp& local, OpShape& shape);

}  // namespace parplan
