#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "planner/base/error.h"
#include "planner/program/program.h"
#include "runtime/device/backend.h"
#include "runtime/device/offload_file.h"

namespace parplan {

// The memory in which a rank's Program works: a block in each home that has buffers (on NVMe a
// file), filled with a pattern before use and followed by a guard of the same pattern, so that the
// touched bytes can be found afterwards. Kernels reach every block in memory by its address, those
// of a GPU the host's over the link between them, slowly. Any thread may call its functions while
// nobody else uses the backend.
class Arena {
 public:
  // `nvme_folder`: for the file; empty: default_nvme_folder.
  Arena(Backend& backend, const Program& program, const std::string& nvme_folder = {});
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // The bytes of a buffer in memory.
  std::byte* at(int buffer) const {
    const Buffer& placed = program_.buffers[buffer];
    PARPLAN_ASSERT(placed.home != Home::nvme, placed.name);
    return blocks_[placed.home].get() + placed.offset;
  }
  // Where a buffer on NVMe begins in the file.
  const OffloadFile& file() const { return *file_; }
  std::int64_t in_file(int buffer) const { return program_.buffers[buffer].offset; }
  std::byte* begin(Home home) const { return blocks_[home].get(); }
  Bytes size(Home home) const { return Bytes(program_.arena_bytes[home]); }

  // Copies between the caller's memory and a buffer, from its start or so many bytes behind it;
  // returns when the copy is done.
  void read(int buffer, void* to, Bytes bytes, Bytes from = Bytes(0)) const;
  void write(int buffer, const void* from, Bytes bytes, Bytes to = Bytes(0)) const;
  // Sets a whole buffer to 0; it begins at a whole word, and the rest of its last word is padding.
  void zero(int buffer) const;

  // Fills everything with the pattern again, as if nothing had been touched.
  void refill() const;
  // The same of what kernels reach: not of the file.
  void refill_memory() const;

  // One past the highest byte that no longer holds the pattern; beyond `size` if the guard was hit.
  PerHome<std::int64_t> highest_touched() const;
  // The same for one buffer, counted from its start.
  std::int64_t highest_touched(int buffer) const;

 private:
  struct Release {
    Backend* backend;
    Home home;
    void operator()(std::byte* memory) const;
  };

  std::int64_t guard_begin(Home home) const;
  std::int64_t highest_touched(Home home, std::int64_t begin, std::int64_t end) const;
  std::int64_t highest_touched_in_file(std::int64_t begin, std::int64_t end) const;
  void fill_file(std::uint32_t pattern, std::int64_t begin, std::int64_t end) const;

  Backend& backend_;
  const Program& program_;
  PerHome<std::unique_ptr<std::byte, Release>> blocks_;  // null where nothing is kept
  std::unique_ptr<OffloadFile> file_;                    // likewise
};

}  // namespace parplan
