#include "planner/base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <system_error>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

struct FileCloser {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using OpenFile = std::unique_ptr<std::FILE, FileCloser>;

[[noreturn]] void refuse_to_write(const std::filesystem::path& path, const std::string& reason) {
  throw RunError(fmt::format("cannot write '{}': {}", path.string(), reason));
}
[[noreturn]] void refuse_to_write(const std::filesystem::path& path, int error) {
  refuse_to_write(path, std::strerror(error));
}

// A descriptor's own file is a link in this folder, but following that link would reopen the file
// at its beginning.
std::optional<int> descriptor_of(const std::filesystem::path& followed) {
  std::error_code none;
  const std::filesystem::path descriptors = std::filesystem::canonical("/proc/self/fd", none);
  if (none || followed.parent_path() != descriptors) return std::nullopt;
  const std::string name = followed.filename();
  int number = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  return error == std::errc() && end == name.data() + name.size() && number >= 0 ? std::optional(number) : std::nullopt;
}

// Where the bytes are written.
struct Target {
  std::filesystem::path path;               // file_behind
  std::optional<int> descriptor = {};       // of this process
  std::optional<struct stat> existing = {};

  bool is_replaced() const { return !descriptor && (!existing || S_ISREG(existing->st_mode)); }
};

Target target_of(const std::filesystem::path& path) {
  Target target{.path = file_behind(path)};
  target.descriptor = descriptor_of(target.path);
  struct stat found {};
  if (target.descriptor) return target;
  if (stat(target.path.c_str(), &found) == 0) target.existing = found;
  else if (errno != ENOENT) refuse_to_write(path, errno);
  if (target.existing && target.is_replaced()) {
    // The system would let root write; but whoever took the right away from everybody meant the
    // file to stay.
    if ((target.existing->st_mode & 0222) == 0)
      refuse_to_write(path,
                      fmt::format("it is read-only (mode {:04o}); allow writing (chmod u+w), or give another name",
                                  target.existing->st_mode & 07777));
    if (access(target.path.c_str(), W_OK) != 0) refuse_to_write(path, errno);
  }
  return target;
}

// Closes the descriptor in any case. `path` is for messages.
void write_and_close(int descriptor, const std::filesystem::path& path, std::string_view text) {
  if (descriptor < 0) refuse_to_write(path, errno);
  while (!text.empty()) {
    const ssize_t written = write(descriptor, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int reason = errno;
      close(descriptor);
      refuse_to_write(path, reason);
    }
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  if (close(descriptor) != 0) refuse_to_write(path, errno);
}

void write_as_it_stands(const Target& target, const std::filesystem::path& path, std::string_view text) {
  write_and_close(
      target.descriptor ? dup(*target.descriptor) : open(target.path.c_str(), O_WRONLY | O_NOCTTY | O_CLOEXEC), path,
      text);
}

// A file that is removed unless it replaced its target.
class Temporary {
 public:
  Temporary(std::filesystem::path name, const std::filesystem::path& path, mode_t mode) : name_(std::move(name)) {
    unlink(name_.c_str());
    const int descriptor = open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (descriptor < 0) refuse_to_write(path, errno);
    close(descriptor);
  }
  ~Temporary() {
    if (!name_.empty()) unlink(name_.c_str());
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;

  const std::filesystem::path& name() const { return name_; }
  void take_place_of(const Target& target, const std::filesystem::path& path) {
    if (target.existing) {
      // Not everybody may change a file's owner; the mode is set afterwards, since a change of
      // owner clears some of its bits.
      [[maybe_unused]] const int given = chown(name_.c_str(), target.existing->st_uid, target.existing->st_gid);
      if (chmod(name_.c_str(), target.existing->st_mode & 07777) != 0) refuse_to_write(path, errno);
    }
    if (rename(name_.c_str(), target.path.c_str()) != 0) refuse_to_write(path, errno);
    name_.clear();
  }

 private:
  std::filesystem::path name_;
};

}  // namespace

std::string read_file(const std::filesystem::path& path, std::size_t most) {
  const auto refuse = [&] {
    throw ConfigError(fmt::format("cannot read '{}': {}", path.string(), std::strerror(errno)));
  };
  const OpenFile file(std::fopen(path.c_str(), "rb"));
  if (!file) refuse();
  std::string text;
  char chunk[65536];
  while (text.size() < most) {
    const std::size_t count = std::fread(chunk, 1, std::min(sizeof chunk, most - text.size()), file.get());
    if (count == 0) break;
    text.append(chunk, count);
  }
  if (std::ferror(file.get())) refuse();  // a folder opens, then cannot be read
  return text;
}

std::filesystem::path file_behind(const std::filesystem::path& path) {
  constexpr int most_links = 40;  // the limit of Linux
  std::filesystem::path name = path;
  for (int followed = 0; followed < most_links; ++followed) {
    std::error_code error;
    const std::filesystem::path folder =
        std::filesystem::canonical(name.has_parent_path() ? name.parent_path() : ".", error);
    if (error) return name;  // no such folder
    name = folder / name.filename();
    if (descriptor_of(name)) return name;
    const std::filesystem::path target = std::filesystem::read_symlink(name, error);
    if (error) return name;  // no link, or nothing
    name = folder / target;
  }
  return path;  // a cycle of links: writing reports it
}

void check_can_write(const std::filesystem::path& path) {
  const Target target = target_of(path);
  if (target.existing && S_ISDIR(target.existing->st_mode)) refuse_to_write(path, EISDIR);
  if (target.is_replaced() && access(target.path.parent_path().c_str(), W_OK | X_OK) != 0) refuse_to_write(path, errno);
}

void write_file_atomically(const std::filesystem::path& path, std::string_view text) {
  if (const Target target = target_of(path); !target.is_replaced()) return write_as_it_stands(target, path, text);
  write_through_temporary(path, [&](const std::string& temporary) {
    write_and_close(open(temporary.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC), path, text);
  });
}

void write_through_temporary(const std::filesystem::path& path,
                             const std::function<void(const std::string& temporary)>& write) {
  const Target target = target_of(path);
  // The name contains the process: two processes that write the same file at once have different
  // temporary files. Beside a target that is no regular file there may be no place for one.
  const std::filesystem::path folder =
      target.is_replaced() ? target.path.parent_path() : std::filesystem::temp_directory_path();
  // The old file may be private, so the temporary one is too.
  Temporary temporary(folder / fmt::format(".{}.{}.tmp", target.path.filename().string(), getpid()), path,
                      target.existing ? 0600 : 0666);
  write(temporary.name());
  if (target.is_replaced()) return temporary.take_place_of(target, path);
  write_as_it_stands(target, path, read_file(temporary.name()));
}

std::vector<std::string> names_of_yaml_files(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored))
    if (entry.path().extension() == ".yaml") names.push_back(entry.path().stem().string());
  std::ranges::sort(names);
  return names;
}

}  // namespace parplan
