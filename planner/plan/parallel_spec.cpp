#include "planner/plan/parallel_spec.h"

#include <array>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

const char* name(ScheduleKind kind) {
  constexpr std::array<const char*, 2> names = {"gpipe", "1f1b"};
  const auto i = static_cast<std::size_t>(kind);
  PARPLAN_ASSERT(i < names.size(), fmt::format("schedule {}", i));
  return names[i];
}

const char* name(Recompute recompute) {
  constexpr std::array<const char*, 3> names = {"none", "full", "per_stage"};
  const auto i = static_cast<std::size_t>(recompute);
  PARPLAN_ASSERT(i < names.size(), fmt::format("recompute {}", i));
  return names[i];
}

}  // namespace parplan
