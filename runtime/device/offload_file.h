#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "planner/base/units.h"
#include "runtime/device/file_transfer.h"

namespace parplan {

// The folder for such files where none is named: $TMPDIR, or the working directory. Not /tmp, which
// many systems keep in memory.
std::string default_nvme_folder();

// A file that holds what a rank keeps on NVMe. It has no name once it is open, so that the system
// removes it when the process ends, however that ends.
//
// Data does not stay in the page cache, which is memory of the host: a write returns when the drive
// has it (sync_file_range, which does not make it survive a loss of power, as nobody needs), and
// what was read or written is dropped from the cache (posix_fadvise). O_DIRECT would do the same
// without the copy; it wants offsets and memory at whole blocks, and not every file system has it.
//
// Any number of threads may read and write at once. All errors are RunErrors with the folder, what
// the system said and what to do.
class OffloadFile {
 public:
  // A file of `bytes` bytes, whose place on the drive is taken.
  OffloadFile(const std::string& folder, Bytes bytes);
  ~OffloadFile();
  OffloadFile(const OffloadFile&) = delete;
  OffloadFile& operator=(const OffloadFile&) = delete;

  void read(std::int64_t offset, void* to, std::int64_t bytes) const;
  void write(std::int64_t offset, const void* from, std::int64_t bytes) const;
  FileTransfer reading(std::int64_t offset, std::byte* to, std::int64_t bytes) const;
  FileTransfer writing(std::int64_t offset, std::byte* from, std::int64_t bytes) const;

 private:
  [[noreturn]] void fail(const std::string& what, int error) const;
  void drop_from_cache(std::int64_t offset, std::int64_t bytes) const;

  std::string folder_;
  int file_ = -1;
};

}  // namespace parplan
