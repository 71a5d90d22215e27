#include "runtime/arena.h"

#include <algorithm>

namespace parplan {
namespace {

// A signalling NaN with a payload that arithmetic does not produce.
constexpr std::uint32_t poison = 0xFFBADBADu;
constexpr std::int64_t word = 4;
constexpr std::int64_t guard_bytes = 4096;
constexpr StreamId compute_stream = static_cast<StreamId>(Stream::compute);

struct HomeMemory {
  void* (Backend::*allocate)(Bytes);
  void (Backend::*release)(void*);
};
constexpr PerHome<HomeMemory> home_memory = {.device = {&Backend::allocate, &Backend::release},
                                             .host = {&Backend::allocate_host, &Backend::release_host}};

}  // namespace

void Arena::Release::operator()(std::byte* memory) const { (backend->*home_memory[home].release)(memory); }

Arena::Arena(Backend& backend, const Program& program) : backend_(backend), program_(program) {
  backend.attach_thread();
  for (const Home home : all_homes)
    if (size(home).count > 0) {
      void* memory = (backend.*home_memory[home].allocate)(Bytes(guard_begin(home) + guard_bytes));
      blocks_[home] = {static_cast<std::byte*>(memory), Release{&backend, home}};
    }
  refill();
}

Arena::~Arena() { backend_.attach_thread(); }

void Arena::refill() const {
  backend_.attach_thread();
  for (const Home home : all_homes)
    if (begin(home) != nullptr)
      backend_.fill(compute_stream, begin(home), poison, (guard_begin(home) + guard_bytes) / word);
  backend_.synchronize();
}

void Arena::read(int buffer, void* to, Bytes bytes, Bytes from) const {
  backend_.attach_thread();
  backend_.copy(compute_stream, to, at(buffer) + from.count, bytes);
  backend_.synchronize();
}

void Arena::write(int buffer, const void* from, Bytes bytes) const {
  backend_.attach_thread();
  backend_.copy(compute_stream, at(buffer), from, bytes);
  backend_.synchronize();
}

void Arena::zero(int buffer) const {
  const std::int64_t bytes = program_.buffers[buffer].bytes;
  backend_.attach_thread();
  backend_.fill(compute_stream, at(buffer), 0, ceil_div(bytes, word));
  backend_.synchronize();
}

std::int64_t Arena::guard_begin(Home home) const { return align_up(size(home), word).count; }

// Buffers begin at whole words; one that ends within a word shares it with padding.
std::int64_t Arena::highest_touched(Home home, std::int64_t begin, std::int64_t end) const {
  backend_.attach_thread();
  const std::int64_t words = ceil_div(end - begin, word);
  return std::min(begin + word * backend_.end_of_unlike(this->begin(home) + begin, poison, words), end);
}

PerHome<std::int64_t> Arena::highest_touched() const {
  PerHome<std::int64_t> touched;
  for (const Home home : all_homes) {
    if (begin(home) == nullptr) continue;
    const std::int64_t guard = highest_touched(home, guard_begin(home), guard_begin(home) + guard_bytes);
    touched[home] = guard > guard_begin(home) ? guard : highest_touched(home, 0, size(home).count);
  }
  return touched;
}

std::int64_t Arena::highest_touched(int buffer) const {
  const Buffer& b = program_.buffers[buffer];
  if (b.bytes == 0) return 0;
  return highest_touched(b.home, b.offset, b.offset + b.bytes) - b.offset;
}

}  // namespace parplan
