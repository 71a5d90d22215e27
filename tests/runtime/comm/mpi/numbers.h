#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "runtime/comm/communicator.h"

namespace parplan::testing {

inline Elements elements(std::vector<float>& values) {
  return {.data = values.data(), .count = static_cast<std::int64_t>(values.size()), .type = DataType::fp32};
}

// The contribution of rank `rank`: numbers whose sums round, and differently in another order.
inline std::vector<float> contribution(std::int64_t count, int rank) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i)
    values.push_back(static_cast<float>(std::sin(static_cast<double>(i * 31 + rank * 17 + 1)) * std::pow(10.0, i % 5)));
  return values;
}

// Added, or compared, in ascending order of rank.
inline std::vector<float> reduced(std::int64_t count, const std::vector<int>& ranks, Reduction reduction) {
  std::vector<float> result = contribution(count, ranks.front());
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    const std::vector<float> next = contribution(count, ranks[r]);
    for (std::size_t i = 0; i < result.size(); ++i)
      result[i] = reduction == Reduction::sum ? result[i] + next[i] : std::max(result[i], next[i]);
  }
  return result;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b, Chunk chunk) {
  return chunk.begin == chunk.end ||
         std::memcmp(a.data() + chunk.begin, b.data() + chunk.begin,
                     static_cast<std::size_t>(chunk.end - chunk.begin) * sizeof(float)) == 0;
}
inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && same_bits(a, b, {0, static_cast<std::int64_t>(a.size())});
}

}  // namespace parplan::testing
