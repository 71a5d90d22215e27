#include "planner/base/file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string_view>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

struct FileCloser {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using OpenFile = std::unique_ptr<std::FILE, FileCloser>;

}  // namespace

std::string read_file(const std::filesystem::path& path) {
  const auto refuse = [&] {
    throw ConfigError(fmt::format("cannot read '{}': {}", path.string(), std::strerror(errno)));
  };
  const OpenFile file(std::fopen(path.c_str(), "rb"));
  if (!file) refuse();
  std::string text;
  char chunk[65536];
  while (const std::size_t count = std::fread(chunk, 1, sizeof chunk, file.get())) text.append(chunk, count);
  if (std::ferror(file.get())) refuse();  // a folder opens, then cannot be read
  return text;
}

void write_file_atomically(const std::filesystem::path& path, std::string_view text) {
  write_through_temporary(path, [&](const std::string& temporary) {
    const auto refuse = [&] { throw RunError(fmt::format("cannot write '{}': {}", path.string(), std::strerror(errno))); };
    OpenFile file(std::fopen(temporary.c_str(), "wb"));
    if (!file || std::fwrite(text.data(), 1, text.size(), file.get()) != text.size()) refuse();
    if (std::fclose(file.release()) != 0) refuse();
  });
}

void write_through_temporary(const std::filesystem::path& path, const std::function<void(const std::string& temporary)>& write) {
  // Named by process: two that write the same file at once do not meet in the temporary one.
  const std::string temporary = path.parent_path() / fmt::format(".{}.{}.tmp", path.filename().string(), getpid());
  const auto refuse = [&] {
    const int reason = errno;
    std::remove(temporary.c_str());
    throw RunError(fmt::format("cannot write '{}': {}", path.string(), std::strerror(reason)));
  };
  if (!OpenFile(std::fopen(temporary.c_str(), "wb"))) refuse();
  try {
    write(temporary);
  } catch (...) {
    std::remove(temporary.c_str());
    throw;
  }
  if (std::rename(temporary.c_str(), path.c_str()) != 0) refuse();
}

}  // namespace parplan
