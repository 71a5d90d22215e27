#include "runtime/arena.h"

#include <algorithm>
#include <array>
#include <exception>
#include <span>
#include <vector>

namespace parplan {
namespace {

// A signalling NaN with a payload that arithmetic does not produce.
constexpr std::uint32_t poison = 0xFFBADBADu;
constexpr std::int64_t word = 4;
constexpr std::int64_t guard_bytes = 4096;
constexpr std::int64_t piece_bytes = 1 << 20;  // of the file, at a time
constexpr StreamId compute_stream = static_cast<StreamId>(Stream::compute);

struct HomeMemory {
  void* (Backend::*allocate)(Bytes);
  void (Backend::*release)(void*);
};
constexpr PerHome<HomeMemory> home_memory = {.device = {&Backend::allocate, &Backend::release},
                                             .host = {&Backend::allocate_host, &Backend::release_host},
                                             .nvme = {}};
constexpr std::array homes_in_memory = {Home::device, Home::host};

}  // namespace

void Arena::Release::operator()(std::byte* memory) const { (backend->*home_memory[home].release)(memory); }

Arena::Arena(Backend& backend, const Program& program, const std::string& nvme_folder)
    : backend_(backend), program_(program) {
  backend.attach_thread();
  for (const Home home : homes_in_memory)
    if (size(home).count > 0) {
      void* memory = (backend.*home_memory[home].allocate)(Bytes(guard_begin(home) + guard_bytes));
      blocks_[home] = {static_cast<std::byte*>(memory), Release{&backend, home}};
    }
  if (size(Home::nvme).count > 0)
    file_ = std::make_unique<OffloadFile>(nvme_folder.empty() ? default_nvme_folder() : nvme_folder,
                                          Bytes(guard_begin(Home::nvme) + guard_bytes));
  refill();
}

Arena::~Arena() {
  backend_.attach_thread();
  if (file_ == nullptr) return;
  try {
    backend_.synchronize();          // a step that failed may have left transfers
  } catch (const std::exception&) {  // that failure was told
  }
}

void Arena::refill() const {
  refill_memory();
  if (file_ != nullptr) fill_file(poison, 0, guard_begin(Home::nvme) + guard_bytes);
}

void Arena::refill_memory() const {
  backend_.attach_thread();
  for (const Home home : homes_in_memory)
    if (begin(home) != nullptr)
      backend_.fill(compute_stream, begin(home), poison, (guard_begin(home) + guard_bytes) / word);
  backend_.synchronize();
}

void Arena::fill_file(std::uint32_t pattern, std::int64_t begin, std::int64_t end) const {
  const std::vector<std::uint32_t> words(static_cast<std::size_t>(std::min(piece_bytes, end - begin) / word), pattern);
  for (std::int64_t at = begin; at < end; at += piece_bytes)
    file_->write(at, words.data(), std::min(piece_bytes, end - at));
}

void Arena::read(int buffer, void* to, Bytes bytes, Bytes from) const {
  if (bytes.count == 0) return;  // where no buffer has any, there is no arena
  if (program_.buffers[buffer].home == Home::nvme) return file_->read(in_file(buffer) + from.count, to, bytes.count);
  backend_.attach_thread();
  backend_.copy(compute_stream, to, at(buffer) + from.count, bytes);
  backend_.synchronize();
}

void Arena::write(int buffer, const void* from, Bytes bytes, Bytes to) const {
  if (bytes.count == 0) return;
  if (program_.buffers[buffer].home == Home::nvme) return file_->write(in_file(buffer) + to.count, from, bytes.count);
  backend_.attach_thread();
  backend_.copy(compute_stream, at(buffer) + to.count, from, bytes);
  backend_.synchronize();
}

void Arena::zero(int buffer) const {
  const std::int64_t bytes = program_.buffers[buffer].bytes;
  if (program_.buffers[buffer].home == Home::nvme)
    return fill_file(0, in_file(buffer), in_file(buffer) + ceil_div(bytes, word) * word);
  backend_.attach_thread();
  backend_.fill(compute_stream, at(buffer), 0, ceil_div(bytes, word));
  backend_.synchronize();
}

std::int64_t Arena::guard_begin(Home home) const { return align_up(size(home), word).count; }

// Buffers begin at whole words; one that ends within a word shares it with padding.
std::int64_t Arena::highest_touched(Home home, std::int64_t begin, std::int64_t end) const {
  if (home == Home::nvme) return highest_touched_in_file(begin, end);
  backend_.attach_thread();
  const std::int64_t words = ceil_div(end - begin, word);
  return std::min(begin + word * backend_.end_of_unlike(this->begin(home) + begin, poison, words), end);
}

std::int64_t Arena::highest_touched_in_file(std::int64_t begin, std::int64_t end) const {
  std::vector<std::uint32_t> piece(static_cast<std::size_t>(piece_bytes / word));
  for (std::int64_t behind = begin + ceil_div(end - begin, word) * word; behind > begin;) {
    const std::int64_t from = std::max(begin, behind - piece_bytes);
    const std::span<std::uint32_t> words = std::span(piece).first(static_cast<std::size_t>((behind - from) / word));
    file_->read(from, words.data(), behind - from);
    for (std::size_t count = words.size(); count > 0; --count)
      if (words[count - 1] != poison) return std::min(from + word * static_cast<std::int64_t>(count), end);
    behind = from;
  }
  return begin;
}

PerHome<std::int64_t> Arena::highest_touched() const {
  PerHome<std::int64_t> touched;
  for (const Home home : all_homes) {
    if (size(home).count == 0) continue;
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
