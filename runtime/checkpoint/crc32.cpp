#include "runtime/checkpoint/crc32.h"

#include <array>
#include <bit>
#include <cstring>

namespace parplan {
namespace {

// Eight bytes at a time ("slicing by 8": Kounavis and Berry, A Systematic Approach to Building High
// Performance Software-based CRC Generators, ISCC 2005): table k is a byte's effect k bytes later.
using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? 0xEDB88320u : 0u);
    tables[0][byte] = value;
  }
  for (std::size_t k = 1; k < tables.size(); ++k)
    for (std::size_t byte = 0; byte < 256; ++byte)
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 0xFFu];
  return tables;
}

constexpr Tables tables = make_tables();
static_assert(std::endian::native == std::endian::little);

}  // namespace

void Crc32::add(std::span<const std::byte> bytes) {
  std::uint32_t state = state_;
  while (bytes.size() >= 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), 8);
    word ^= state;
    state = 0;
    for (std::size_t k = 0; k < 8; ++k) state ^= tables[7 - k][(word >> (8 * k)) & 0xFFu];
    bytes = bytes.subspan(8);
  }
  for (const std::byte byte : bytes)
    state = (state >> 8) ^ tables[0][(state ^ static_cast<std::uint32_t>(byte)) & 0xFFu];
  state_ = state;
}

}  // namespace parplan
