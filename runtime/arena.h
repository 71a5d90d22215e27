#pragma once

#include <cstddef>
#include <cstdint>

#include "planner/program/program.h"
#include "runtime/device/backend.h"

namespace parplan {

// The single block of device memory in which a rank's Program works, filled with a pattern before
// use and followed by a guard of the same pattern, so that the touched bytes can be found
// afterwards. Any thread may call its functions while nobody else uses the backend.
class Arena {
 public:
  Arena(Backend& backend, const Program& program);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Device memory.
  std::byte* at(int buffer) const { return memory_ + program_.buffers[buffer].offset; }
  std::byte* begin() const { return memory_; }
  Bytes size() const { return Bytes(program_.arena_bytes); }

  // Copies between host memory and a buffer, from its start; returns when the copy is done.
  void read(int buffer, void* to, Bytes bytes) const;
  void write(int buffer, const void* from, Bytes bytes) const;
  // Sets a whole buffer to 0; it begins at a whole word, and the rest of its last word is padding.
  void zero(int buffer) const;

  // Fills everything with the pattern again, as if nothing had been touched.
  void refill() const;

  // One past the highest byte that no longer holds the pattern; beyond `size` if the guard was hit.
  std::int64_t highest_touched() const;
  // The same for one buffer, counted from its start.
  std::int64_t highest_touched(int buffer) const;

 private:
  std::int64_t guard_begin() const;
  std::int64_t highest_touched(std::int64_t begin, std::int64_t end) const;

  Backend& backend_;
  const Program& program_;
  std::byte* memory_ = nullptr;
};

}  // namespace parplan
