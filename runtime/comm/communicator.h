#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "planner/base/units.h"

namespace parplan {

// Ranks that communicate together, ascending, each once. `id` is the group's name within the job.
struct CommunicationGroup {
  int id = 0;
  std::vector<int> ranks;
  bool operator==(const CommunicationGroup&) const = default;
};

enum class Reduction { sum, max };

// The elements [begin, end) of a buffer of `count` that belong to member `member` of `members`.
struct Chunk {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool operator==(const Chunk&) const = default;
};
constexpr Chunk chunk_of(std::int64_t count, int members, int member) {
  return {.begin = count * member / members, .end = count * (member + 1) / members};
}

// What one call cost one rank.
struct Transfer {
  Bytes sent;       // logical bytes that this rank sent to others
  Seconds waited;   // until every other rank concerned had arrived
  Seconds moving;   // from then until the call returned
};

inline constexpr std::int64_t communicated_element_bytes = 4;  // fp32

// Logical bytes that a member sends: the reduce-scatter sends every chunk but its own, the all-gather sends
// its own chunk to every other member, the all-reduce does both.
constexpr Bytes reduce_scatter_bytes(std::int64_t count, int members, int member) {
  const Chunk own = chunk_of(count, members, member);
  return Bytes(communicated_element_bytes * (count - (own.end - own.begin)));
}
constexpr Bytes all_gather_bytes(std::int64_t count, int members, int member) {
  const Chunk own = chunk_of(count, members, member);
  return Bytes(communicated_element_bytes * (members - 1) * (own.end - own.begin));
}
constexpr Bytes all_reduce_bytes(std::int64_t count, int members, int member) {
  return reduce_scatter_bytes(count, members, member) + all_gather_bytes(count, members, member);
}

// A posted send, to be waited for once.
struct SendTicket {
  int destination = 0;
  int channel = 0;
  std::int64_t number = 0;  // among the sends of this rank to that destination on that channel
  Bytes bytes;
};

// One rank's end of the job's communication, fp32. Collectives are called by all members of a group, in one order.
// Reductions add in ascending order of rank: ((r0 + r1) + r2) + ..., so results are equal to the bit on every member,
// in every run and for every way of cutting the buffer. Calls throw RunError, naming the rank and its reason, once
// any rank has aborted.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int ranks() const = 0;

  // All in place on `count` elements. all_reduce: all of data holds the result.
  virtual Transfer all_reduce(int group, Reduction reduction, float* data, std::int64_t count) = 0;
  // Member i's chunk_of(count, members, i) holds the sum; the other chunks are undefined.
  virtual Transfer reduce_scatter(int group, float* data, std::int64_t count) = 0;
  // Member i's chunk_of(count, members, i) is its input; all of data holds the result.
  virtual Transfer all_gather(int group, float* data, std::int64_t count) = 0;

  // Posts and returns; `data` must stay as it is until wait_sent has returned. Sends and receives of one (source,
  // destination, channel) match in order and have equal counts. Posting waits while 64 earlier ones are outstanding.
  virtual SendTicket send(int destination, int channel, const float* data, std::int64_t count) = 0;
  virtual Transfer wait_sent(SendTicket ticket) = 0;  // `sent` counts the bytes of the send
  virtual Transfer receive(int source, int channel, float* data, std::int64_t count) = 0;

  // Wakes every rank that waits, now or later, with a RunError that holds `reason`. The first reason wins.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace parplan
