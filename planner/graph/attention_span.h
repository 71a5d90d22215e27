#pragma once

#include <cstdint>

#include "planner/graph/op_kind.h"

namespace parplan {

// A rank's two chunks of queries and those of the rank that holds the keys, as rows (Liu et al.
// 2023, Ring Attention, arXiv:2310.01889, with the two chunks of ContextChunks). Its own keys are
// met causally. All queries see the whole first chunk of a rank before it, and none the second;
// both chunks of a rank behind it are seen by the second of queries, and by none else. So every
// step around the ring but the own one has as many pairs, on all ranks. Where attention is
// bidirectional, all queries see all keys in every step.
struct RingStep {
  std::int64_t first_query = 0;  // the queries from this row on meet
  std::int64_t keys = 0;         // the first so many rows of keys,
  bool causal = false;           // each those up to its own row, or all
};
constexpr RingStep ring_step(const OpShape& s) {
  const ContextChunks& chunks = s.chunks;
  if (s.bidirectional) return {.first_query = 0, .keys = 2 * chunks.size, .causal = false};
  if (*chunks.holder == chunks.rank) return {.first_query = 0, .keys = 2 * chunks.size, .causal = true};
  if (*chunks.holder < chunks.rank) return {.first_query = 0, .keys = chunks.size, .causal = false};
  return {.first_query = chunks.size, .keys = 2 * chunks.size, .causal = false};
}

// Queries [first, last) of a causal sequence, with the keys up to each: what a call of attention
// computes, or as much work. Or each of them with all keys.
struct AttentionSpan {
  std::int64_t first = 0;
  std::int64_t last = 0;
  std::int64_t keys = 0;  // that may be met
  bool causal = true;
};

// The most consecutive rows of queries with consecutive positions, and the most keys, that meet at
// once: what a kernel needs room for.
constexpr std::int64_t run_of_queries(const OpShape& s) {
  return s.gathered && !s.chunks.holder ? s.chunks.size : s.sequence;
}
constexpr std::int64_t room_for_keys(const OpShape& s) {
  if (s.keys > 0) return s.keys;
  return s.gathered && !s.chunks.holder ? s.chunks.positions() : s.sequence;
}

// The two chunks of a rank have as many pairs of queries and keys as the two in the middle, which
// the last rank holds. With a window, no rank has more than that one; all ranks count as much,
// since they wait for one another. So do the steps around a ring.
constexpr AttentionSpan attention_span(const OpShape& s) {
  if (s.bidirectional) return {.first = 0, .last = s.sequence, .keys = room_for_keys(s), .causal = false};
  if (!s.gathered) return {.first = 0, .last = s.sequence, .keys = s.sequence};
  if (s.chunks.holder == s.chunks.rank) return {.first = 0, .last = s.sequence, .keys = s.sequence};
  if (s.chunks.holder) return {.first = 0, .last = s.sequence, .keys = s.chunks.size, .causal = false};
  return {.first = (s.chunks.ranks - 1) * s.chunks.size,
          .last = (s.chunks.ranks + 1) * s.chunks.size,
          .keys = s.chunks.positions()};
}

}  // namespace parplan
