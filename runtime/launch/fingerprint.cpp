#include "runtime/launch/fingerprint.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

namespace parplan {
namespace {

// Each word through the finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom
// Number Generators, OOPSLA 2014), so that what differs in one word does not cancel in the next.
std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) {
  hash = (hash ^ word) + 0x9e3779b97f4a7c15u;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9u;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebu;
  return hash ^ (hash >> 31);
}

}  // namespace

std::uint64_t fingerprint(std::span<const std::byte> bytes) {
  std::uint64_t hash = mixed(0, bytes.size());
  for (std::size_t begin = 0; begin < bytes.size(); begin += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + begin, std::min<std::size_t>(8, bytes.size() - begin));
    hash = mixed(hash, word);
  }
  return hash;
}

std::uint64_t fingerprint(std::string_view text) { return fingerprint(std::as_bytes(std::span(text))); }

std::string write_fingerprint(std::uint64_t value) { return fmt::format("{:016x}", value); }

}  // namespace parplan
