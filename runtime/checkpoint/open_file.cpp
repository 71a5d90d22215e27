#include "runtime/checkpoint/open_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

[[noreturn]] void fail_to_read(const std::string& path, int reason) {
  throw ConfigError(fmt::format("cannot read '{}': {}", path, std::strerror(reason)));
}
[[noreturn]] void fail_to_write(const std::string& path, int reason) {
  throw RunError(fmt::format("cannot write '{}': {}", path, std::strerror(reason)));
}

}  // namespace

// Without O_NONBLOCK, opening a pipe waits for its writer.
OpenFile::OpenFile(const std::string& path) : path_(path) {
  descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) fail_to_read(path, errno);
  struct stat found {};
  const bool known = fstat(descriptor_, &found) == 0;
  const int reason = errno;
  if (known && S_ISREG(found.st_mode)) {
    size_ = found.st_size;
    return;
  }
  ::close(descriptor_);
  if (!known) fail_to_read(path, reason);
  throw ConfigError(fmt::format("cannot read '{}': it is no regular file", path));
}

OpenFile::~OpenFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

OpenFile::OpenFile(OpenFile&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)), size_(other.size_) {}

void OpenFile::read(std::int64_t offset, void* to, std::int64_t bytes) const {
  auto* at = static_cast<std::byte*>(to);
  while (bytes > 0) {
    const ssize_t count = pread(descriptor_, at, static_cast<std::size_t>(bytes), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_to_read(path_, errno);
    if (count == 0) throw ConfigError({path_}, fmt::format("the file ends at byte {}: it is cut off", offset));
    at += count;
    offset += count;
    bytes -= count;
  }
}

NewFile::NewFile(const std::string& path) : path_(path) {
  descriptor_ = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor_ < 0) fail_to_write(path, errno);
}

NewFile::~NewFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void NewFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(descriptor_, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_to_write(path_, errno);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
}

void NewFile::close() {
  if (fsync(descriptor_) != 0) fail_to_write(path_, errno);
  if (::close(std::exchange(descriptor_, -1)) != 0) fail_to_write(path_, errno);
}

void synchronize_folder(const std::string& path) {
  const int folder = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) fail_to_write(path, errno);
  const bool done = fsync(folder) == 0;
  const int reason = errno;
  ::close(folder);
  if (!done) fail_to_write(path, reason);
}

}  // namespace parplan
