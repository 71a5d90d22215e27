#pragma once

#include <cstdint>

#include "planner/graph/op_kind.h"

namespace parplan {

// Queries [first, last) of a causal sequence, with the keys up to each: what a call of attention
// computes, or as much work.
struct AttentionSpan {
  std::int64_t first = 0;
  std::int64_t last = 0;
  std::int64_t keys = 0;  // that may be met
};

// The two chunks of a rank have as many pairs of queries and keys as the two in the middle, which
// the last rank holds. With a window, no rank has more than that one; all ranks count as much,
// since they wait for one another.
constexpr AttentionSpan attention_span(const OpShape& s) {
  if (!s.gathered) return {.first = 0, .last = s.sequence, .keys = s.sequence};
  return {.first = (s.chunks.ranks - 1) * s.chunks.size,
          .last = (s.chunks.ranks + 1) * s.chunks.size,
          .keys = s.chunks.positions()};
}

}  // namespace parplan
