#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <tuple>
#include <vector>

namespace parplan {

// Mixes another hash into one.
constexpr void add_hash(std::size_t& seed, std::size_t hash) {
  seed = (seed ^ hash) * std::size_t{0x9e3779b97f4a7c15};  // 2^64 over the golden ratio
  seed ^= seed >> 32;
}

// For keys that the standard library has no hash for.
struct NumbersHash {
  std::size_t operator()(const std::vector<std::int64_t>& numbers) const {
    std::size_t seed = numbers.size();
    for (const std::int64_t number : numbers) add_hash(seed, static_cast<std::size_t>(number));
    return seed;
  }
};
struct TupleHash {
  template <class... Parts>
  std::size_t operator()(const std::tuple<Parts...>& parts) const {
    std::size_t seed = 0;
    std::apply([&](const Parts&... each) { (add_hash(seed, std::hash<Parts>()(each)), ...); }, parts);
    return seed;
  }
};

}  // namespace parplan
