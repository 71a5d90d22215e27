#include "runtime/device/offload_file.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <system_error>

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

std::string default_nvme_folder() {
  const char* const folder = std::getenv("TMPDIR");
  return folder != nullptr && *folder != '\0' ? folder : ".";
}

OffloadFile::OffloadFile(const std::string& folder, Bytes bytes) : folder_(folder) {
  std::string path = folder + "/parplan-offload-XXXXXX";
  file_ = ::mkostemp(path.data(), O_CLOEXEC);
  if (file_ < 0) fail("cannot create a file", errno);
  int error = ::unlink(path.c_str()) == 0 ? 0 : errno;
  if (error == 0 && bytes.count > 0) error = ::posix_fallocate(file_, 0, bytes.count);
  if (error == 0) return;
  ::close(file_);
  fail(fmt::format("cannot take {}", format_bytes(bytes)), error);
}

OffloadFile::~OffloadFile() {
  ::close(file_);
}

void OffloadFile::fail(const std::string& what, int error) const {
  const char* const remedy = error == EFBIG ? "raise the limit on the size of files (ulimit -f)"
                                            : "name a folder with room, which this user may write to, with --nvme-dir";
  throw RunError(fmt::format("{} in '{}' for what a rank keeps on NVMe: {}; {}", what, folder_,
                             std::generic_category().message(error), remedy));
}

void OffloadFile::read(std::int64_t offset, void* to, std::int64_t bytes) const {
  for (std::int64_t done = 0; done < bytes;) {
    const ssize_t count =
        ::pread(file_, static_cast<char*>(to) + done, static_cast<std::size_t>(bytes - done), offset + done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(fmt::format("cannot read {} of a file", format_bytes(Bytes(bytes))), errno);
    if (count == 0) fail(fmt::format("the file ends before byte {}", offset + bytes), EIO);
    done += count;
  }
  drop_from_cache(offset, bytes);
}

void OffloadFile::write(std::int64_t offset, const void* from, std::int64_t bytes) const {
  const auto what = [&] { return fmt::format("cannot write {} to a file", format_bytes(Bytes(bytes))); };
  for (std::int64_t done = 0; done < bytes;) {
    const ssize_t count =
        ::pwrite(file_, static_cast<const char*>(from) + done, static_cast<std::size_t>(bytes - done), offset + done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(what(), errno);
    done += count;
  }
  constexpr unsigned now = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  // Some file systems have no part of a file to offer.
  if (::sync_file_range(file_, offset, bytes, now) != 0 && ::fdatasync(file_) != 0) fail(what(), errno);
  drop_from_cache(offset, bytes);
}

// A wish, which a system may leave unfulfilled.
void OffloadFile::drop_from_cache(std::int64_t offset, std::int64_t bytes) const {
  static_cast<void>(::posix_fadvise(file_, offset, bytes, POSIX_FADV_DONTNEED));
}

FileTransfer OffloadFile::reading(std::int64_t offset, std::byte* to, std::int64_t bytes) const {
  return {.carry_out = [](const FileTransfer& of) { of.file->read(of.offset, of.memory, of.bytes); },
          .file = this,
          .memory = to,
          .offset = offset,
          .bytes = bytes};
}

FileTransfer OffloadFile::writing(std::int64_t offset, std::byte* from, std::int64_t bytes) const {
  return {.carry_out = [](const FileTransfer& of) { of.file->write(of.offset, of.memory, of.bytes); },
          .file = this,
          .memory = from,
          .offset = offset,
          .bytes = bytes};
}

}  // namespace parplan
