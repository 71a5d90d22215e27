#pragma once

#include <cstdint>

#include "planner/graph/op_kind.h"
#include "runtime/device/cpu/kernels/instruction_set.h"

// Rows of fused queries, keys and values: for each key/value head its query heads, the key and the
// value, each head_dim wide.
namespace parplan::PARPLAN_CPU_NAMESPACE {

enum class HeadPart { query, key, value };

struct FusedHead {
  HeadPart part{};
  std::int64_t index = 0;   // among the heads of its part
  std::int64_t offset = 0;  // in a row
};

inline std::int64_t fused_width(const OpShape& s) { return (s.heads + 2 * s.kv_heads) * s.head_dim; }

// Calls body(head) in the order of memory.
template <class Body>
inline void for_each_head(const OpShape& s, const Body& body) {
  const std::int64_t per_group = s.heads / s.kv_heads;
  std::int64_t offset = 0;
  for (std::int64_t group = 0; group < s.kv_heads; ++group) {
    for (std::int64_t query = 0; query < per_group; ++query, offset += s.head_dim)
      body(FusedHead{HeadPart::query, group * per_group + query, offset});
    body(FusedHead{HeadPart::key, group, offset});
    body(FusedHead{HeadPart::value, group, offset + s.head_dim});
    offset += 2 * s.head_dim;
  }
}

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
