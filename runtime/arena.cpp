#include "runtime/arena.h"

#include <algorithm>

namespace parplan {
namespace {

// A signalling NaN with a payload that arithmetic does not produce.
constexpr std::uint32_t pattern = 0xFFBADBADu;
constexpr std::int64_t word = 4;
constexpr std::int64_t guard_bytes = 4096;
constexpr StreamId stream = static_cast<StreamId>(Stream::compute);

}  // namespace

Arena::Arena(Backend& backend, const Program& program) : backend_(backend), program_(program) {
  backend.attach_thread();
  memory_ = static_cast<std::byte*>(backend.allocate(Bytes(guard_begin() + guard_bytes)));
  refill();
}

Arena::~Arena() {
  backend_.attach_thread();
  backend_.release(memory_);
}

void Arena::refill() const {
  backend_.attach_thread();
  backend_.fill(stream, memory_, pattern, (guard_begin() + guard_bytes) / word);
  backend_.synchronize();
}

void Arena::read(int buffer, void* to, Bytes bytes) const {
  backend_.attach_thread();
  backend_.copy(stream, to, at(buffer), bytes);
  backend_.synchronize();
}

void Arena::write(int buffer, const void* from, Bytes bytes) const {
  backend_.attach_thread();
  backend_.copy(stream, at(buffer), from, bytes);
  backend_.synchronize();
}

void Arena::zero(int buffer) const {
  const std::int64_t bytes = program_.buffers[buffer].bytes;
  backend_.attach_thread();
  backend_.fill(stream, at(buffer), 0, ceil_div(bytes, word));
  backend_.synchronize();
}

std::int64_t Arena::guard_begin() const { return align_up(Bytes(program_.arena_bytes), word).count; }

// Buffers begin at whole words; one that ends within a word shares it with padding.
std::int64_t Arena::highest_touched(std::int64_t begin, std::int64_t end) const {
  backend_.attach_thread();
  return std::min(begin + word * backend_.end_of_unlike(memory_ + begin, pattern, ceil_div(end - begin, word)), end);
}

std::int64_t Arena::highest_touched() const {
  const std::int64_t guard = highest_touched(guard_begin(), guard_begin() + guard_bytes);
  return guard > guard_begin() ? guard : highest_touched(0, program_.arena_bytes);
}

std::int64_t Arena::highest_touched(int buffer) const {
  const Buffer& b = program_.buffers[buffer];
  if (b.bytes == 0) return 0;
  return highest_touched(b.offset, b.offset + b.bytes) - b.offset;
}

}  // namespace parplan
