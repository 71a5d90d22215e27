#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <type_traits>

#include <fmt/core.h>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"
#include "runtime/comm/communicator.h"

namespace parplan {

// A collective as a member of its group shows it to the others, so that all see that they call the
// same. Processes send it to each other, as bytes.
enum class Collective : std::int64_t {
  all_reduce_sum,
  all_reduce_max,
  reduce_scatter,
  all_gather,
  all_to_all,
  broadcast,
  reduce,
  gather,
  scatter
};
inline const char* name(Collective collective) {
  constexpr std::array names = {"all_reduce (sum)", "all_reduce (max)", "reduce_scatter", "all_gather", "all_to_all",
                                "broadcast",        "reduce",           "gather",         "scatter"};
  return names.at(index_of(collective));
}
inline Collective all_reduce_of(Reduction reduction) {
  return reduction == Reduction::sum ? Collective::all_reduce_sum : Collective::all_reduce_max;
}

struct CollectiveCall {
  Collective collective{};
  std::int64_t count = 0;  // of elements
  DataType type = DataType::fp32;
  std::int32_t padding = 0;  // so that every byte that is sent has a value
  bool operator==(const CollectiveCall&) const = default;
};
static_assert(std::has_unique_object_representations_v<CollectiveCall>);

// Asserts that two ranks of a group call the same.
inline void check_same_call(int group, int rank, const CollectiveCall& call, int other_rank,
                            const CollectiveCall& other) {
  const auto words = [](const CollectiveCall& one) {
    return fmt::format("{} of {} {} elements", name(one.collective), one.count, name(one.type));
  };
  PARPLAN_ASSERT(call == other, fmt::format("group {}: rank {} calls {}, rank {} {}", group, rank, words(call),
                                            other_rank, words(other)));
}

// What a call has sent and taken until now: it began then, and moved data once the others had come.
inline Transfer carried_out_since(std::chrono::steady_clock::time_point begin,
                                  std::chrono::steady_clock::time_point met, Bytes sent) {
  const auto between = [](auto from, auto to) { return Seconds(std::chrono::duration<double>(to - from).count()); };
  return {.sent = sent, .waited = between(begin, met), .moving = between(met, std::chrono::steady_clock::now())};
}
// The same of a call that only waited.
inline Transfer waited_since(std::chrono::steady_clock::time_point begin, Bytes sent) {
  return {.sent = sent,
          .waited = Seconds(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()),
          .moving = Seconds(0)};
}

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
