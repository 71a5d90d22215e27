#include "planner/program/pack_scratch.h"

#include <algorithm>
#include <numeric>

namespace parplan {

std::int64_t pack(std::vector<Temporary>& temporaries, std::int64_t alignment) {
  std::vector<std::size_t> by_size(temporaries.size());
  std::iota(by_size.begin(), by_size.end(), std::size_t{0});
  std::stable_sort(by_size.begin(), by_size.end(),
                   [&](std::size_t a, std::size_t b) { return temporaries[a].bytes > temporaries[b].bytes; });
  std::vector<std::size_t> placed;  // ascending offsets
  std::int64_t needed = 0;
  for (std::size_t index : by_size) {
    Temporary& temporary = temporaries[index];
    std::int64_t offset = 0;
    for (std::size_t other_index : placed) {
      const Temporary& other = temporaries[other_index];
      const bool together = other.first <= temporary.last && temporary.first <= other.last;
      if (!together || other.offset + other.bytes <= offset) continue;
      if (offset + temporary.bytes <= other.offset) break;
      offset = (other.offset + other.bytes + alignment - 1) / alignment * alignment;
    }
    temporary.offset = offset;
    needed = std::max(needed, offset + temporary.bytes);
    placed.insert(
        std::upper_bound(placed.begin(), placed.end(), index,
                         [&](std::size_t a, std::size_t b) { return temporaries[a].offset < temporaries[b].offset; }),
        index);
  }
  return needed;
}

}  // namespace parplan
