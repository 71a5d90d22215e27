#include "runtime/comm/communicator.h"

namespace parplan {

namespace {

std::int64_t own_elements(std::int64_t count, int members, int member) {
  const Chunk chunk = chunk_of(count, members, member);
  return chunk.end - chunk.begin;
}

constexpr std::int64_t element_bytes = 4;

}  // namespace

Bytes reduce_scatter_bytes(std::int64_t count, int members, int member) {
  return Bytes(element_bytes * (count - own_elements(count, members, member)));
}

Bytes all_gather_bytes(std::int64_t count, int members, int member) {
  return Bytes(element_bytes * (members - 1) * own_elements(count, members, member));
}

Bytes all_reduce_bytes(std::int64_t count, int members, int member) {
  return reduce_scatter_bytes(count, members, member) + all_gather_bytes(count, members, member);
}

}  // namespace parplan
