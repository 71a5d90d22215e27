#pragma once

#include <compare>

#include "planner/cluster/cluster.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/step_result.h"

namespace parplan {

// What the search minimises: the time of a step, or its cost, the price of its devices for that
// time (without prices: device-seconds), then the memory of the fullest device; or that memory,
// then time.
enum class Objective { time, cost, memory };
const char* name(Objective objective);

// Smaller is better; `first` decides, and `second` where it is equal. Times and costs are compared
// to ten digits.
struct Score {
  double first = 0.0;
  double second = 0.0;
  auto operator<=>(const Score&) const = default;
};
Score score(Objective objective, const Cluster& cluster, const ParallelSpec& spec, Seconds time,
            const MemoryUse& memory);

// Plans whose times (or costs) differ by less than this share are equal to whoever runs them.
inline constexpr double tied_plans = 5e-4;

// Whether `a` is less than `b` by more than the share `margin` of it; if the first values differ by
// less, the second ones decide.
bool better(const Score& a, const Score& b, double margin);

}  // namespace parplan
