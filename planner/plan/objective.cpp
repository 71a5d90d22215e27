#include "planner/plan/objective.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "planner/base/enum_index.h"

namespace parplan {
namespace {

// The price of the first `devices` devices for a second, in the cluster's currency. All plans of a
// cluster count in one unit: where any of its devices has no price, in their number.
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

// To ten digits: rounding must not decide between plans that take equally long. It is monotonic, so
// that what bounds a value bounds it still.
double compared(double value) {
  constexpr int bits = 33;
  int exponent = 0;
  const double mantissa = std::frexp(value, &exponent);
  return std::ldexp(std::round(std::ldexp(mantissa, bits)), exponent - bits);
}

}  // namespace

const char* name(Objective objective) {
  constexpr std::array<const char*, 3> names = {"time", "cost", "memory"};
  return names[index_of(objective)];
}

Score score(Objective objective, const Cluster& cluster, const ParallelSpec& spec, Seconds time,
            const MemoryUse& memory) {
  const double bytes = static_cast<double>(memory.peak().count);
  switch (objective) {
    case Objective::time: return {compared(time.value), bytes};
    case Objective::cost: return {compared(time.value * price_of_second(cluster, spec.mesh.size())), bytes};
    case Objective::memory: return {bytes, compared(time.value)};
  }
  return {};
}

bool better(const Score& a, const Score& b, double margin) {
  if (std::abs(a.first - b.first) > margin * b.first) return a.first < b.first;
  return a.second < b.second * (1.0 - margin);
}

}  // namespace parplan
