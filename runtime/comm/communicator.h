#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "planner/base/units.h"
#include "planner/graph/tensor.h"
#include "runtime/device/backend.h"

namespace parplan {

// Ranks that communicate together, ascending, each once. `id` identifies the group within the job.
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

// The cost of one call to one rank. The times are set by calls that return when they are done;
// others leave them 0.
struct Transfer {
  Bytes sent;      // logical bytes that this rank sent to others
  Seconds waited;  // until all other ranks of the call had arrived
  Seconds moving;  // from then until the call returned
};

// Logical bytes that a member sends of a buffer of `count` elements of `element` bytes: the
// reduce-scatter and the all-to-all send every chunk but its own, the all-gather sends its own
// chunk to every other member, the all-reduce scatters and gathers.
constexpr Bytes reduce_scatter_bytes(std::int64_t count, std::int64_t element, int members, int member) {
  const Chunk own = chunk_of(count, members, member);
  return Bytes(element * (count - (own.end - own.begin)));
}
constexpr Bytes all_gather_bytes(std::int64_t count, std::int64_t element, int members, int member) {
  const Chunk own = chunk_of(count, members, member);
  return Bytes(element * (members - 1) * (own.end - own.begin));
}
constexpr Bytes all_reduce_bytes(std::int64_t count, std::int64_t element, int members, int member) {
  return reduce_scatter_bytes(count, element, members, member) + all_gather_bytes(count, element, members, member);
}
constexpr Bytes all_to_all_bytes(std::int64_t count, std::int64_t element, int members) {
  return Bytes(element * (count - count / members));
}

// The first member of a group sends all of its data to every other one, or each of these sends all
// of its own to it.
constexpr Bytes broadcast_bytes(std::int64_t count, std::int64_t element, int members, int member) {
  return Bytes(member == 0 ? element * (members - 1) * count : 0);
}
constexpr Bytes to_first_bytes(std::int64_t count, std::int64_t element, int member) {
  return Bytes(member == 0 ? 0 : element * count);
}

// `source` sends to `destination` on `channel`. A job that knows its routes can connect them before
// it starts.
struct SendRoute {
  int source = 0;
  int destination = 0;
  int channel = 0;
  auto operator<=>(const SendRoute&) const = default;
};

// A posted send, which must be waited for: on each stream whose later work changes its data.
struct SendTicket {
  int destination = 0;
  int channel = 0;
  std::int64_t number = 0;  // counted among the sends of this rank to that destination on that channel
  Bytes bytes;
};

// A run of elements in the memory of the rank's backend.
struct Elements {
  void* data = nullptr;
  std::int64_t count = 0;
  DataType type = DataType::fp32;
};

// One rank's end of the job's communication. All members of a group call its collectives in one
// order, with equal counts and types. A call belongs to a stream of the rank's backend: it runs
// after the work submitted there before. It may return before it has run (GPUs) or when it is done
// (CPUs). Where the implementation guarantees it (`in_order`), reductions add in ascending order of
// rank: ((r0 + r1) + r2) + ..., in fp32 for every type, so results are equal to the bit on every
// member, in every run and for every way of cutting the buffer. Calls throw RunError, naming the
// rank and its reason, once any rank has aborted.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int ranks() const = 0;
  virtual bool in_order() const = 0;

  // All collectives but all_to_all, gather and scatter are in place. all_reduce: all of the data
  // holds the result.
  virtual Transfer all_reduce(StreamId stream, int group, Reduction reduction, Elements data) = 0;
  // Member i's chunk_of(count, members, i) holds the sum; the other chunks are undefined.
  virtual Transfer reduce_scatter(StreamId stream, int group, Elements data) = 0;
  // Member i's chunk_of(count, members, i) is its input; all of the data holds the result.
  virtual Transfer all_gather(StreamId stream, int group, Elements data) = 0;
  // Chunk i of `from` goes to member i, and chunk i of `to` comes from member i. The two have equal
  // types and counts, a multiple of the members, and do not overlap.
  virtual Transfer all_to_all(StreamId stream, int group, Elements from, Elements to) = 0;
  // Those with a part for the group's first member. broadcast: all data becomes the first member's.
  virtual Transfer broadcast(StreamId stream, int group, Elements data) = 0;
  // The first member's data holds the sum; that of the others is only read.
  virtual Transfer reduce(StreamId stream, int group, Elements data) = 0;
  // The first member's `whole` holds one member's `own` after another's; on the others it is empty,
  // as for scatter, which goes the other way. `own` and `whole` do not overlap.
  virtual Transfer gather(StreamId stream, int group, Elements own, Elements whole) = 0;
  virtual Transfer scatter(StreamId stream, int group, Elements whole, Elements own) = 0;

  // Posts a send and returns; the data must not change until the work after wait_sent. Sends and
  // receives of one (source, destination, channel) match in order and have equal counts. Posting
  // waits while 64 earlier ones are outstanding.
  virtual SendTicket send(StreamId stream, int destination, int channel, Elements data) = 0;
  // Later work of `stream` runs after the send, and earlier ones to that destination on that
  // channel, are done. Several streams may wait for one send. `sent` counts its bytes.
  virtual Transfer wait_sent(StreamId stream, SendTicket ticket) = 0;
  virtual Transfer receive(StreamId stream, int source, int channel, Elements data) = 0;

  // The memory that most calls will use; it may be pinned for the network. It outlives the
  // communicator.
  virtual void register_memory(void* memory, Bytes bytes) {
    static_cast<void>(memory);
    static_cast<void>(bytes);
  }

  // Throws RunError when a rank has aborted or the network has failed; for callers that waited for
  // a stream.
  virtual void check() = 0;
  // Wakes every rank that waits, now or later, with a RunError that holds `reason`. The first
  // reason wins.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace parplan
