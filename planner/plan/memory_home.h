#pragma once

#include <array>
#include <compare>
#include <cstdint>

#include "planner/base/enum_index.h"

namespace parplan {

// What a rank keeps a buffer in: the memory of its device, that of its host, or a file on the NVMe
// drives of its machine. A rank has an arena in each of them; kernels reach the first two.
enum class Home : std::uint8_t { device, host, nvme, count_ };
inline constexpr std::array<Home, count_of<Home>> all_homes = {Home::device, Home::host, Home::nvme};

// A value for each home, by name (`bytes.host`) and by home (`bytes[home]`).
template <class T>
struct PerHome {
  T device{};
  T host{};
  T nvme{};

  constexpr T& operator[](Home home) { return this->*members[index_of(home)]; }
  constexpr const T& operator[](Home home) const { return this->*members[index_of(home)]; }
  auto operator<=>(const PerHome&) const = default;

 private:
  static constexpr std::array<T PerHome::*, count_of<Home>> members = {&PerHome::device, &PerHome::host,
                                                                       &PerHome::nvme};
};

constexpr const char* name(Home home) {
  return PerHome<const char*>{.device = "device", .host = "host", .nvme = "NVMe"}[home];
}
// What a text about an arena or a buffer adds; the device goes without saying.
constexpr const char* where(Home home) {
  return PerHome<const char*>{.device = "", .host = " on the host", .nvme = " on NVMe"}[home];
}

}  // namespace parplan
