#include "planner/plan/memory_verdict.h"

#include <array>

#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/cluster/host_share.h"
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

std::optional<Shortage> shortage_of(const Cluster& cluster, const ParallelSpec& spec, const StepResult& result) {
  const MemoryUse& use = result.memory;
  const std::uint64_t groups = groups_of_fullest(cluster, spec, result);
  const std::optional<Bytes> host = host_memory(cluster, spec.mesh, groups);
  if (host && use.host > *host) return Shortage{.home = Home::host, .needed = use.host, .available = *host};
  const std::optional<Bytes> drives = nvme_capacity(cluster, spec.mesh, groups);
  if (drives && use.nvme > *drives) return Shortage{.home = Home::nvme, .needed = use.nvme, .available = *drives};
  const Bytes capacity = memory_capacity(cluster, groups);
  if (memory_verdict(use, capacity, cluster.memory_headroom) == MemoryVerdict::does_not_fit)
    return Shortage{.home = Home::device, .needed = use.peak(), .available = capacity};
  return std::nullopt;
}

std::string words_of(const Shortage& shortage) {
  constexpr PerHome<const char*> what{.device = "memory", .host = "host memory", .nvme = "NVMe"},
      whose{.device = "a device", .host = "its share of the host", .nvme = "its share of the drives"};
  return fmt::format("it needs {} of {} on its worst rank, and {} has {}", format_bytes(shortage.needed),
                     what[shortage.home], whose[shortage.home], format_bytes(shortage.available));
}

}  // namespace parplan
