#include "planner/plan/objective.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "planner/base/enum_index.h"

namespace parplan {
namespace {

// The price of the first `devices` devices for a second, in the cluster's currency; without a price
// for all of them, their number.
double price_of_second(const Cluster& cluster, int devices) {
  double sum = 0.0;
  int left = devices;
  for (const NodeGroup& group : cluster.groups) {
    if (!group.price || group.price->currency != cluster.groups.front().price->currency) return devices;
    const int taken = std::min(left, group.devices());
    sum += taken * group.price->per_device_hour / 3600.0;
    left -= taken;
  }
  return sum;
}

}  // namespace

const char* name(Objective objective) {
  constexpr std::array<const char*, 3> names = {"time", "cost", "memory"};
  return names[index_of(objective)];
}

Score score(Objective objective, const Cluster& cluster, const ParallelSpec& spec, Seconds time,
            const MemoryUse& memory) {
  switch (objective) {
    case Objective::time: return {time.value, 0.0};
    case Objective::cost: return {time.value * price_of_second(cluster, spec.mesh.size()), 0.0};
    case Objective::memory: return {static_cast<double>(memory.peak().count), time.value};
  }
  return {};
}

bool better(const Score& a, const Score& b, double margin) {
  if (std::abs(a.first - b.first) > margin * b.first) return a.first < b.first;
  return a.second < b.second * (1.0 - margin);
}

}  // namespace parplan
