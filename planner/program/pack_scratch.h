#pragma once

#include <cstdint>
#include <vector>

namespace parplan {

// A temporary of a straight-line list of instructions: live from instruction `first` to `last`,
// inclusive.
struct Temporary {
  std::int64_t bytes = 0;
  int first = 0;
  int last = 0;
  std::int64_t offset = 0;  // result
};

// Sets offsets such that temporaries that are live together do not overlap; large ones are placed
// first, each at the lowest free offset. Returns the bytes needed. Offsets are multiples of
// `alignment`.
std::int64_t pack(std::vector<Temporary>& temporaries, std::int64_t alignment);

}  // namespace parplan
