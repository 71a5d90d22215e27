#include "planner/plan/memory_verdict.h"

#include <array>

#include "planner/base/enum_index.h"
#include "planner/cluster/mesh.h"

namespace parplan {

const char* name(MemoryVerdict verdict) {
  constexpr std::array names = {"fits", "tight", "does_not_fit"};
  return names[index_of(verdict)];
}

const char* words_of(MemoryVerdict verdict) {
  return verdict == MemoryVerdict::does_not_fit ? "does not fit" : name(verdict);
}

MemoryVerdict memory_verdict(const MemoryUse& use, Bytes capacity, double headroom) {
  if (use.peak() - use.reserve > capacity) return MemoryVerdict::does_not_fit;
  return use.peak() > usable_memory(capacity, headroom) ? MemoryVerdict::tight : MemoryVerdict::fits;
}

}  // namespace parplan
