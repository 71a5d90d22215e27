#include "planner/plan/memory_verdict.h"

#include <array>

#include "planner/base/enum_index.h"
#include "planner/cluster/mesh.h"

namespace parplan {

std::uint64_t groups_of_fullest(const Cluster& cluster, const ParallelSpec& spec, const StepResult& result) {
  return spec.replica_micro_batches.empty()
             ? groups_of_stage(cluster, spec.mesh, result.memory_stage)
             : groups_of_stage(cluster, spec.mesh, result.memory_stage, result.memory_replica);
}

Bytes memory_capacity(const Cluster& cluster, const ParallelSpec& spec, const StepResult& result) {
  return memory_capacity(cluster, groups_of_fullest(cluster, spec, result));
}

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
