#include "runtime/arena.h"

#include <algorithm>
#include <cstring>

namespace parplan {
namespace {

// A signalling NaN with a payload that arithmetic does not produce.
constexpr std::uint32_t pattern = 0xFFBADBADu;
constexpr std::int64_t guard_bytes = 4096;

}  // namespace

Arena::Arena(Backend& backend, const Program& program) : backend_(backend), program_(program) {
  const std::int64_t bytes = program.arena_bytes + guard_bytes;
  memory_ = static_cast<std::byte*>(backend.allocate(Bytes(bytes)));
  for (std::int64_t i = 0; i + 4 <= bytes; i += 4) std::memcpy(memory_ + i, &pattern, 4);
}

Arena::~Arena() { backend_.release(memory_); }

std::int64_t Arena::highest_touched(std::int64_t begin, std::int64_t end) const {
  std::int64_t word = (end - 1) / 4 * 4;
  for (; word >= begin; word -= 4)
    if (std::memcmp(memory_ + word, &pattern, 4) != 0) break;
  return std::clamp<std::int64_t>(word + 4, begin, end);
}

std::int64_t Arena::highest_touched() const {
  const std::int64_t guard = highest_touched(program_.arena_bytes, program_.arena_bytes + guard_bytes);
  return guard > program_.arena_bytes ? guard : highest_touched(0, program_.arena_bytes);
}

std::int64_t Arena::highest_touched(int buffer) const {
  const Buffer& b = program_.buffers[static_cast<std::size_t>(buffer)];
  if (b.bytes == 0) return 0;
  return highest_touched(b.offset, b.offset + b.bytes) - b.offset;
}

}  // namespace parplan
