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

// A key and a value of each key/value head, as they are gathered, or arrive from one rank:
// [sequence, batch, heads, 2, head_dim].
constexpr std::int64_t key_value_width(const OpShape& s) { return 2 * s.kv_heads * s.head_dim; }
constexpr std::int64_t gathered_elements(const OpShape& s) {
  return (s.chunks.any() && !s.chunks.holder ? s.chunks.positions() : s.sequence) * s.batch * key_value_width(s);
}

// The input's granules are groups of one key/value head. Ranks may share one: each has some of its
// query heads, and a copy of its key and value.
void localize_heads(const LocalOp& local, OpShape& shape);

}  // namespace parplan
