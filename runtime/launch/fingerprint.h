#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace parplan {

// Tells contents apart that differ by accident: bytes that differ in one place have different
// fingerprints, others the same one by chance alone (one in 2^64). No protection against intent. It
// is the same on every machine of the same byte order.
std::uint64_t fingerprint(std::span<const std::byte> bytes);
std::uint64_t fingerprint(std::string_view text);
// Sixteen hexadecimal digits.
std::string write_fingerprint(std::uint64_t value);

}  // namespace parplan
