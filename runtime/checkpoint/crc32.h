#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace parplan {

// The CRC-32 of zlib, gzip and Python's zlib.crc32 (polynomial 0xEDB88320, reflected), piece by
// piece.
class Crc32 {
 public:
  void add(std::span<const std::byte> bytes);
  std::uint32_t value() const { return ~state_; }

 private:
  std::uint32_t state_ = ~std::uint32_t{0};
};

}  // namespace parplan
