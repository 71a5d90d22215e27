#pragma once

#include <array>
#include <cstddef>
#include <type_traits>

namespace parplan {

// The number of an enumerator: the index of its element in a table with one element for each.
template <class Enum>
  requires std::is_enum_v<Enum>
constexpr std::size_t index_of(Enum enumerator) {
  return static_cast<std::size_t>(enumerator);
}

// The number of enumerators of an enum that ends with `count_`.
template <class Enum>
inline constexpr std::size_t count_of = index_of(Enum::count_);

}  // namespace parplan
