#pragma once

#include <cstddef>
#include <cstdint>

namespace parplan {

class OffloadFile;

// One read or write of a rank's file, for a backend to carry out in a stream's order. Plain data
// and a function, so that backends need not know the file.
struct FileTransfer {
  void (*carry_out)(const FileTransfer&) = nullptr;  // returns when it is done; throws RunError
  const OffloadFile* file = nullptr;
  std::byte* memory = nullptr;  // of the host
  std::int64_t offset = 0;      // in the file
  std::int64_t bytes = 0;
};

}  // namespace parplan
