#pragma once

#include <cstddef>

#include <fmt/core.h>

#include "planner/base/error.h"
#include "runtime/comm/communicator.h"

namespace parplan {

// The bytes of each chunk of an all_to_all between `members`; asserts that its buffers fit each
// other.
inline std::int64_t all_to_all_chunk(const Elements& from, const Elements& to, int members) {
  PARPLAN_ASSERT(from.count == to.count && from.type == to.type && from.count % members == 0,
                 fmt::format("all_to_all of {} {} elements into {} {} elements by {} members", from.count,
                             name(from.type), to.count, name(to.type), members));
  return from.count / members * size_of(from.type);
}

// Asserts that the buffers of a gather or scatter fit each other.
inline void check_parts(const Elements& own, const Elements& whole, int members, int member) {
  PARPLAN_ASSERT(whole.type == own.type && whole.count == (member == 0 ? own.count * members : 0),
                 fmt::format("{} {} elements of member {} of {}, whose whole is {} {} elements", own.count,
                             name(own.type), member, members, whole.count, name(whole.type)));
}

}  // namespace parplan
