#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "planner/base/units.h"
#include "planner/cluster/cluster.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/step_result.h"

namespace parplan {

// The kinds of device among which the rank is that fills its device most, as bits by their groups
// in the cluster: those of its stage, and of its replica where replicas do unlike work.
std::uint64_t groups_of_fullest(const Cluster& cluster, const ParallelSpec& spec, const StepResult& result);
// The least memory of these.
Bytes memory_capacity(const Cluster& cluster, const ParallelSpec& spec, const StepResult& result);

// Whether a step fits a device, with a margin for what predictions of memory miss.
enum class MemoryVerdict {
  fits,          // with the headroom free
  tight,         // within the device, but with less than the headroom, or only without the allocator's reserve
  does_not_fit,  // more than the device has
};
const char* name(MemoryVerdict verdict);      // "fits", "tight", "does_not_fit": in files
const char* words_of(MemoryVerdict verdict);  // "fits", "tight", "does not fit"

// What the allocator keeps is given back before a step fails for want of memory: PyTorch frees what
// it caches and tries again (c10/cuda/CUDACachingAllocator.cpp, malloc).
MemoryVerdict memory_verdict(const MemoryUse& use, Bytes capacity, double headroom);

// The home that has less room than the worst rank needs there, the host or its drives before the
// device; nothing where all is there. A device has it all where a plan is tight.
struct Shortage {
  Home home{};
  Bytes needed, available;
};
std::optional<Shortage> shortage_of(const Cluster& cluster, const ParallelSpec& spec, const StepResult& result);
// "it needs 3 GiB of host memory on its worst rank, and its share of the host has 1 GiB".
std::string words_of(const Shortage& shortage);

}  // namespace parplan
